//! The server: from an inherited socket to its end.
//!
//! One thread, one event loop. The server ends when containerd requests the end (`Shutdown`) and no
//! containers are left, or after a long time without requests. SIGTERM requests the end, too, but
//! never ends a shim whose containers run: containerd would treat the end as a crash and kill the
//! containers. No other signal that can be caught ends the server.

use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use std::{fs, io};

use nix::libc::{SIGINT, SIGTERM, SIGUSR1};
use rustix::fs::Mode;
use rustix::process::{getpid, set_child_subreaper, umask};

use crate::args::Args;
use crate::bootstrap::{events_address, remove_socket};
use crate::events::TaskEvents;
use crate::exits::{Exits, children_of, reap_on_sigchld};
use crate::kernel::{self, Signals};
use crate::logging;
use crate::service::{self, Containers};
use crate::task::SharedState;
use crate::work::{Result, event_loop, failed, read_each, run_blocking};

/// The time limit for the last events; Go's shim waits as long.
const FLUSH_LIMIT: Duration = Duration::from_secs(5);
/// The time limit for sending the answer to `Shutdown`.
const GOODBYE_LIMIT: Duration = Duration::from_millis(200);
/// Each line of the log is a single write, which the fifo keeps whole up to 4 KiB.
const MAX_LINE: usize = 2048;
/// The interval at which a shim that got SIGTERM checks whether it may end.
const TERMINATE_POLL: Duration = Duration::from_millis(500);

/// Serves until containerd no longer needs this shim.
pub fn serve(args: &Args) -> Result<()> {
    kernel::remove_memory_settings();
    let listener = match args.socket.as_str() {
        "" => take_over_socket().map_err(failed("take over the socket from `start`"))?,
        path => bind_socket(path).map_err(failed("bind the socket of the command line"))?,
    };
    if let Err(error) = logging::to_fifo(Path::new(logging::FIFO), args.debug, true) {
        // Started by hand, or containerd is gone already. The containers matter more.
        eprintln!("no log fifo in this directory: {error}");
    }
    kernel::ignore_stray_signals();
    set_child_subreaper(Some(getpid())).map_err(failed("become the subreaper of containers"))?;
    event_loop()
        .map_err(failed("start the event loop"))?
        .block_on(run(args, listener))
}

/// `start` bound the socket and passes it as stdin: only stdin can be passed on and taken up
/// without `unsafe`. /dev/null replaces stdin at once.
fn take_over_socket() -> io::Result<UnixListener> {
    let socket = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?;
    rustix::stdio::dup2_stdin(fs::File::open("/dev/null")?)?;
    let listener = UnixListener::from(socket);
    // Fails if it is no socket.
    listener.local_addr()?;
    Ok(listener)
}

/// Only its own user may connect: a mode that is set after the bind would be late.
fn bind_socket(path: &str) -> io::Result<UnixListener> {
    let former = umask(Mode::from_raw_mode(0o177));
    let listener = UnixListener::bind(path);
    umask(former);
    listener
}

async fn run(args: &Args, listener: UnixListener) -> Result<()> {
    let exits = Arc::new(Exits::default());
    tokio::spawn(reap_on_sigchld(Arc::clone(&exits)));
    let shared = SharedState {
        namespace: args.namespace.clone(),
        events: TaskEvents::publish_to(events_address(&args.address), args.namespace.clone()),
        exits,
    };
    let containers = Arc::new(Containers::new(shared.clone()));

    // The bundle in which the server started may be gone at the end.
    let address = listener.local_addr();
    let mut server = service::server(listener, &containers).map_err(failed("watch the socket"))?;
    server
        .start()
        .await
        .map_err(failed("serve the task service"))?;
    tracing::debug!(id = args.id, "serving");
    tokio::select! {
        () = containers.shutdown.notified() => {}
        () = terminated(&containers) => {}
        () = containers.deserted() => tracing::info!("ending: no container, and no client uses this shim"),
    }
    if let Ok(address) = &address
        && let Some(path) = address.as_pathname()
    {
        remove_socket(path, path);
    }
    server.stop_listen().await;
    shared.events.flush(FLUSH_LIMIT).await;
    let _ = tokio::time::timeout(GOODBYE_LIMIT, server.disconnect()).await;
    Ok(())
}

/// Resolves after SIGTERM or SIGINT, when no container needs the shim. SIGUSR1 writes the shim's
/// state into the log.
async fn terminated(containers: &Containers) {
    let mut signals = match Signals::register(&[SIGTERM, SIGINT, SIGUSR1]) {
        Ok(signals) => signals,
        Err(error) => {
            tracing::error!(%error, "SIGTERM, SIGINT and SIGUSR1 will be ignored");
            return std::future::pending().await;
        }
    };
    let mut is_to_end = false;
    while !(is_to_end && containers.close_if_idle()) {
        tokio::select! {
            woken = signals.next() => if woken.is_err() { return std::future::pending().await },
            () = tokio::time::sleep(TERMINATE_POLL), if is_to_end => {}
        }
        if signals.take(SIGUSR1) {
            dump(containers).await;
        }
        // Both flags are cleared.
        let is_requested = signals.take(SIGTERM) | signals.take(SIGINT);
        if is_requested && !is_to_end {
            tracing::info!("SIGTERM: ending as soon as no container runs");
            is_to_end = true;
        }
    }
}

/// Writes the state of the shim into its log on SIGUSR1, as Go's shim writes its stacks.
///
/// For a pod that hangs: the pending calls and their ages, the processes of the runtime, and the
/// kernel functions that those processes wait in. The dump reads only memory and files of /proc,
/// with a time limit for files of other processes.
async fn dump(containers: &Containers) {
    tracing::info!("=== BEGIN state dump ===");
    let children = children(children_of(getpid())).await;
    for line in [containers.describe(), threads(), children, descriptors()].concat() {
        tracing::info!("{line}");
    }
    tracing::info!("=== END state dump ===");
}

fn threads() -> Vec<String> {
    let describe = |tid| {
        format!(
            "thread: tid {tid}{}",
            waits_of(&format!("/proc/self/task/{tid}"))
        )
    };
    names_in("/proc/self/task").iter().map(describe).collect()
}

/// Away from the event loop, which serves the pod while a child blocks its readers.
async fn children(pids: Vec<u32>) -> Vec<String> {
    let describe = move || {
        // A child is the init of a container, which can block the readers of these files.
        let all = read_each(&pids, |pid| waits_of(&format!("/proc/{pid}")));
        let mut lines = Vec::new();
        for (pid, waits) in pids.iter().zip(all) {
            let waits = waits.unwrap_or_else(|| {
                let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
                format!(", {:?} blocks its readers", name.trim_end())
            });
            lines.push(format!("child: pid {pid}{waits}"));
        }
        lines
    };
    run_blocking(describe)
        .await
        .unwrap_or_else(|error| vec![format!("children: {error}")])
}

fn waits_of(folder: &str) -> String {
    let stat = fs::read_to_string(format!("{folder}/stat")).unwrap_or_default();
    let waits = fs::read_to_string(format!("{folder}/wchan")).unwrap_or_default();
    format!("{}, waits in {waits:?}", state_of(&stat))
}

/// `, NAME is S`; see proc_pid_stat(5).
fn state_of(stat: &str) -> String {
    let rest = stat.split_once(" (").map_or("", |(_, rest)| rest);
    match rest.rsplit_once(") ") {
        Some((name, rest)) => format!(", {name:?} is {}", &rest[..rest.len().min(1)]),
        None => String::new(),
    }
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
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        names.extend(entry.file_name().into_string());
    }
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
