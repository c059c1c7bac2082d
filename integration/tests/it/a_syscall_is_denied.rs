//! A syscall of the guard always fails: the kernel is too old, out of memory or descriptors, or a
//! filter (LSM, seccomp) denies the call. For each call and each answer the runtime still runs,
//! nothing panics, no reader sees the file underneath, and the next create repairs the rest.

use bindguard_integration::prelude::*;
use std::os::unix::process::ExitStatusExt;

use bindguard_integration::image::busybox;
use bindguard_integration::privilege;
use bindguard_integration::stale::StaleBundle;
use nix::libc;

/// Linux 6.8's, on every architecture; the C library does not name it yet.
const SYS_STATMOUNT: libc::c_long = 457;

/// The calls for reading, judging, repairing and writing. Not poll(2): Rust's start-up calls it
/// once and aborts when it says what no kernel says.
const CALLS: [(&str, libc::c_long); 36] = [
    ("openat", libc::SYS_openat),
    ("open", libc::SYS_open),
    ("openat2", libc::SYS_openat2),
    ("statx", libc::SYS_statx),
    ("newfstatat", libc::SYS_newfstatat),
    ("fstat", libc::SYS_fstat),
    ("statmount", SYS_STATMOUNT),
    ("open_tree", libc::SYS_open_tree),
    ("move_mount", libc::SYS_move_mount),
    ("mount_setattr", libc::SYS_mount_setattr),
    ("mount", libc::SYS_mount),
    ("umount2", libc::SYS_umount2),
    ("flock", libc::SYS_flock),
    ("readlink", libc::SYS_readlink),
    ("readlinkat", libc::SYS_readlinkat),
    ("read", libc::SYS_read),
    ("write", libc::SYS_write),
    ("rename", libc::SYS_rename),
    ("fchmod", libc::SYS_fchmod),
    ("mkdir", libc::SYS_mkdir),
    ("unlink", libc::SYS_unlink),
    ("unlinkat", libc::SYS_unlinkat),
    ("getdents64", libc::SYS_getdents64),
    ("fcntl", libc::SYS_fcntl),
    ("unshare", libc::SYS_unshare),
    ("clone", libc::SYS_clone),
    ("clone3", libc::SYS_clone3),
    ("wait4", libc::SYS_wait4),
    ("pipe2", libc::SYS_pipe2),
    ("ppoll", libc::SYS_ppoll),
    ("close_range", libc::SYS_close_range),
    ("pidfd_open", libc::SYS_pidfd_open),
    ("pidfd_send_signal", libc::SYS_pidfd_send_signal),
    ("kill", libc::SYS_kill),
    ("clock_nanosleep", libc::SYS_clock_nanosleep),
    ("sched_getaffinity", libc::SYS_sched_getaffinity),
];

const ERRORS: [(&str, i32); 5] = [
    ("EBUSY", libc::EBUSY),
    ("ENOMEM", libc::ENOMEM),
    ("EPERM", libc::EPERM),
    ("EMFILE", libc::EMFILE),
    ("ENOSYS", libc::ENOSYS),
];

/// The calls of a swap on a kernel before 6.5 that differ from a newer kernel's.
const OF_TUCK: [&str; 10] = [
    "open",
    "statx",
    "statmount",
    "open_tree",
    "move_mount",
    "mount",
    "umount2",
    "unshare",
    "clone",
    "clone3",
];

#[test]
fn mounting_beneath() {
    Setup::on(Generation::NEWEST).story(|node| story(node, "", |_| true));
}

#[test]
fn tucked_by_propagation() {
    Setup::on(Generation::NEWEST)
        .story(|node| story(node, "no-beneath,", |name| OF_TUCK.contains(&name)));
}

fn story(node: &Node, more: &str, is_denied: impl Fn(&str) -> bool) -> Result<()> {
    let guard = node.programs().join(GUARD);
    if needs_a_loader(&fs::read(&guard).with_context(|| format!("read {}", guard.display()))?) {
        privilege::skipped("the guard is not static: its loader would meet the denial first");
        return Ok(());
    }
    let runtime = node.disk().join("true");
    std::os::unix::fs::symlink(busybox()?, &runtime).context("link a runtime that does nothing")?;
    denials_bite(node)?;
    let mut stale = StaleBundle::lay_out(node, "denied")?;
    for (name, call) in CALLS.into_iter().filter(|(name, _)| is_denied(name)) {
        for (error, number) in ERRORS {
            stale.begin_anew()?;
            let rules = format!("{more}{call}={number}");
            let mut guard = stale.guard(&[env!("CARGO_BIN_EXE_denied"), &rules])?;
            guard.env("BINDGUARD_RUNTIME", &runtime);
            let ended = run(guard)?;
            went_on(&stale, &ended).with_context(|| format!("{name} says {error}"))?;
            stale
                .next_create()
                .with_context(|| format!("after {name} said {error}"))?;
        }
    }
    stale.delete()
}

fn went_on(stale: &StaleBundle<'_>, ended: &Finished) -> Result<()> {
    ensure!(!ended.stderr.contains("panicked"), "it panicked: {ended:?}");
    ensure!(
        ended.status.signal().is_none() && ended.status.success(),
        "the runtime was not reached: {ended:?}"
    );
    stale.shows_no_file_underneath()
}

fn denials_bite(node: &Node) -> Result<()> {
    let mut cat = node.command(env!("CARGO_BIN_EXE_denied"))?;
    cat.arg(format!("{}={}", libc::SYS_openat, libc::EBUSY))
        .arg(busybox()?)
        .args(["cat", "/proc/version"]);
    let words = run(cat)?.failure()?;
    ensure!(words.contains("busy"), "opening was not denied: {words}");
    Ok(())
}

/// The program names an interpreter, as ld.so(8) is called there.
fn needs_a_loader(program: &[u8]) -> bool {
    program[..program.len().min(4096)]
        .windows(10)
        .any(|window| window == b"/ld-linux-" || window == b"/ld-linux.")
}
