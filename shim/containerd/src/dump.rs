//! Writes the state of the shim into its log on SIGUSR1, as Go's shim writes its stacks.
//!
//! For a pod that hangs: the pending calls and their ages, the processes of the runtime, and the
//! kernel functions that those processes wait in. The dump reads only memory and files of /proc,
//! with a time limit for files of other processes.

use std::fs;

use crate::blockable::read_each;
use crate::blocking::run_blocking;
use crate::exits::child_pids;
use crate::service::Containers;

/// Each line of the log is a single write, which the fifo keeps whole up to 4 KiB.
const MAX_LINE: usize = 2048;

/// Writes the dump.
pub(crate) async fn write(containers: &Containers) {
    tracing::info!("=== BEGIN state dump ===");
    let kernel = [threads(), children(child_pids()).await, descriptors()].concat();
    containers
        .describe()
        .into_iter()
        .chain(kernel)
        .for_each(|line| tracing::info!("{line}"));
    tracing::info!("=== END state dump ===");
}

fn threads() -> Vec<String> {
    let line = |tid: &String| {
        let read = |file: &str| {
            fs::read_to_string(format!("/proc/self/task/{tid}/{file}")).unwrap_or_default()
        };
        format!(
            "thread: tid {tid}{}, waits in {:?}",
            state_of(&read("stat")),
            read("wchan")
        )
    };
    names_in("/proc/self/task").iter().map(line).collect()
}

/// Away from the event loop, which serves the pod while a child blocks its readers.
async fn children(pids: Vec<u32>) -> Vec<String> {
    run_blocking(move || describe(&pids))
        .await
        .unwrap_or_else(|error| vec![format!("children: {error}")])
}

fn describe(pids: &[u32]) -> Vec<String> {
    // A child is the init of a container, which can block the readers of these files.
    let lines = read_each(pids, |pid| {
        let read =
            |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
        format!(
            "child: pid {pid}{}, waits in {:?}",
            state_of(&read("stat")),
            read("wchan")
        )
    });
    let without_answer = |pid: &u32| {
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        format!("child: pid {pid}, {:?} blocks its readers", name.trim_end())
    };
    pids.iter()
        .zip(lines)
        .map(|(pid, line)| line.unwrap_or_else(|| without_answer(pid)))
        .collect()
}

/// `, NAME is S`; see proc_pid_stat(5).
fn state_of(stat: &str) -> String {
    let name_and_state = stat
        .split_once(" (")
        .and_then(|(_, rest)| rest.rsplit_once(") "));
    name_and_state.map_or_else(String::new, |(name, rest)| {
        format!(", {name:?} is {}", &rest[..rest.len().min(1)])
    })
}

fn descriptors() -> Vec<String> {
    let mut lines = vec!["descriptors:".to_owned()];
    for number in names_in("/proc/self/fd") {
        // The directory's own descriptor is closed by now.
        let Ok(target) = fs::read_link(format!("/proc/self/fd/{number}")) else {
            continue;
        };
        let word = format!(" {number}={}", target.display());
        match lines.last_mut() {
            Some(line) if line.len() + word.len() <= MAX_LINE => line.push_str(&word),
            _ => lines.push(format!("descriptors:{word}")),
        }
    }
    lines
}

/// In numerical order.
fn names_in(folder: &str) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort_by_key(|name| name.parse::<u32>().unwrap_or(u32::MAX));
    names
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use bindguard_testing::held_memory::{Executing, unless_it_hangs};

    use super::*;

    #[test]
    fn a_process_has_its_name_and_state() {
        assert_eq!(state_of("12 (a) b) S 1 12"), ", \"a) b\" is S");
        assert_eq!(state_of(""), "");
        assert!(
            threads().iter().any(|line| line.contains("waits in")),
            "{:?}",
            threads()
        );
    }

    #[test]
    fn a_child_that_hangs_in_execve_delays_neither_the_dump_nor_other_calls() {
        let Some(executing) = Executing::start() else {
            return;
        };
        let pid = executing.pid();
        let dump = move || {
            let event_loop = tokio::runtime::Builder::new_current_thread()
                .build()
                .unwrap();
            let is_done = Cell::new(false);
            event_loop.block_on(async {
                let dump = async {
                    let lines = children(vec![pid]).await;
                    is_done.set(true);
                    lines
                };
                tokio::join!(dump, async { is_done.get() })
            })
        };
        let (line, is_late) = unless_it_hangs(dump).expect("the dump hangs");
        assert!(!is_late, "the event loop waited");
        assert!(
            line[0].starts_with(&format!("child: pid {pid}, ")),
            "{line:?}"
        );
    }

    #[test]
    fn descriptors_are_on_lines_that_the_log_takes_whole() {
        let files: Vec<_> = (0..200)
            .map(|_| fs::File::open("/dev/null").unwrap())
            .collect();
        let lines = descriptors();
        assert!(lines.iter().all(|line| line.len() <= MAX_LINE), "{lines:?}");
        assert!(
            lines.concat().matches("=/dev/null").count() >= files.len(),
            "{lines:?}"
        );
    }
}
