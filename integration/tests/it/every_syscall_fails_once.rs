//! Each syscall of an admission fails once, with an error that a machine in trouble gives. In `make
//! soak` the syscalls of a repair fail once with each of the errors. The create goes on, no reader
//! sees the file underneath, and the next create completes the repair.
//!
//! strace(1) injects the failures, see its `--inject`. strace detaches from the process when the
//! runtime begins.

use bindguard_integration::prelude::*;
use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;

use bindguard_integration::privilege;
use bindguard_integration::stale::StaleBundle;
use bindguard_testing::rounds;

/// The errors of a machine in trouble.
const ERRORS: [&str; 4] = ["EBUSY", "ENOMEM", "EPERM", "EMFILE"];
/// The calls by which a repair reads, binds and attaches.
const OF_REPAIR: [&str; 12] = [
    "flock",
    "mount",
    "move_mount",
    "openat2",
    "open_tree",
    "readlink",
    "readlinkat",
    "rename",
    "statx",
    "umount2",
    "unlinkat",
    "unshare",
];
/// They cannot fail on any kernel, or they are how memory is had and a thread is waited for.
const NEVER_FAIL: [&str; 18] = [
    "getrandom",
    "close",
    "getpid",
    "gettid",
    "getuid",
    "brk",
    "mmap",
    "munmap",
    "mremap",
    "mprotect",
    "madvise",
    "exit",
    "exit_group",
    "execve",
    "futex",
    "rt_sigaction",
    "rt_sigprocmask",
    "sigaltstack",
];

/// The calls of a swap on a kernel before 6.5 that differ from a newer kernel's.
const OF_TUCK: [&str; 9] = [
    "clone",
    "clone3",
    "mount",
    "move_mount",
    "open",
    "open_tree",
    "statx",
    "umount2",
    "unshare",
];

#[test]
fn mounting_beneath() {
    Setup::on(Generation::V1_7).story(|node| story(node, "", &[]));
}

#[test]
fn tucked_by_propagation() {
    Setup::on(Generation::V1_7)
        .fault_points()
        .story(|node| story(node, "no-beneath", &OF_TUCK));
}

/// The syscalls in `only` fail; all syscalls if `only` is empty.
fn story(node: &Node, fault: &str, only: &[&str]) -> Result<()> {
    if !privilege::has_program("strace") {
        privilege::skipped("no strace");
        return Ok(());
    }
    let mut stale = StaleBundle::lay_out(node, "failing")?;
    let trace = node.disk().join("trace");
    stale.begin_anew()?;
    traced(&stale, fault, &trace, None)?.success()?;
    let calls = calls(&fs::read_to_string(&trace).context("read the trace")?);
    ensure!(
        calls.values().map(|call| call.count).sum::<usize>() > 40,
        "the trace shows these calls only: {calls:?}"
    );
    stale.next_create()?;
    let mut turn = 0;
    for (name, call) in calls
        .iter()
        .filter(|(name, _)| only.is_empty() || only.contains(&name.as_str()))
    {
        for number in call.before + 1..=call.count {
            let is_of_repair = OF_REPAIR.contains(&name.as_str());
            let count = if is_of_repair {
                rounds(1, ERRORS.len())
            } else {
                1
            };
            let errors = ERRORS.iter().cycle().skip(turn % ERRORS.len());
            turn += 1;
            for error in errors.take(count) {
                let what = format!("{name} number {number} says {error}");
                stale.begin_anew()?;
                let ended = traced(
                    &stale,
                    fault,
                    &trace,
                    Some(&format!("{name}:error={error}:when={number}")),
                )?;
                survived(&stale, &ended).with_context(|| what.clone())?;
                stale.next_create().context(what)?;
            }
        }
    }
    eprintln!("{turn} calls failed in turn");
    stale.delete()
}

fn traced(
    stale: &StaleBundle<'_>,
    fault: &str,
    trace: &Path,
    inject: Option<&str>,
) -> Result<Finished> {
    let trace = trace.to_str().context("the trace's path is UTF-8")?;
    let inject = inject.map(|rule| format!("--inject={rule}"));
    let mut words = vec!["strace", "-f", "-qq", "-b", "execve", "-o", trace];
    words.extend(inject.as_deref());
    let mut guard = stale.guard(&words)?;
    guard.env("BINDGUARD_FAULT", fault);
    run(guard)
}

/// The runtime was reached, and nothing panicked on the way.
fn survived(stale: &StaleBundle<'_>, ended: &Finished) -> Result<()> {
    let said = format!(
        "{}{}",
        ended.stderr,
        stale.bundle().log().unwrap_or_default()
    );
    ensure!(!said.contains("panicked"), "it panicked: {ended:?}");
    ensure!(
        ended.status.signal().is_none() && ended.status.success(),
        "the runtime was not reached: {ended:?}"
    );
    stale.shows_no_file_underneath()
}

/// The number of a process's calls, in all and before it reads its config: its loader's calls are
/// not the guard's.
#[derive(Clone, Copy, Debug, Default)]
struct Call {
    count: usize,
    before: usize,
}

/// The maximum number of calls by a single process of the trace, by name.
fn calls(trace: &str) -> BTreeMap<String, Call> {
    let mut of_process: BTreeMap<(&str, &str), Call> = BTreeMap::new();
    let mut has_begun = false;
    for (process, rest) in trace.lines().filter_map(|line| line.split_once(' ')) {
        let Some((name, arguments)) = rest.trim_start().split_once('(') else {
            continue;
        };
        has_begun |= arguments.contains("bindguard.toml");
        let call = of_process.entry((process, name)).or_default();
        call.count += 1;
        call.before += usize::from(!has_begun);
    }
    let mut calls: BTreeMap<String, Call> = BTreeMap::new();
    for ((_, name), call) in of_process {
        // strace knows a call that is newer than itself by a number that it does not take
        if NEVER_FAIL.contains(&name) || name.starts_with("syscall_") || !is_word(name) {
            continue;
        }
        let most = calls.entry(name.to_owned()).or_default();
        *most = if call.count > most.count { call } else { *most };
    }
    calls
}

fn is_word(name: &str) -> bool {
    name.bytes()
        .all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}
