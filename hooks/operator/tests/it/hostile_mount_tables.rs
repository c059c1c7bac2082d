//! Containers that fill their own mount tables cost the reader little memory, and are reported.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use bindguard_core::mount_table::{ExceededLimit, TableError};
use bindguard_core::places::Places;
use bindguard_operator::doctor::{PointStatus, pinned};
use bindguard_operator::namespaces::{Namespaces, Proc, UnreadTable};
use bindguard_sys::enter::ProcessError;
use bindguard_testing::live::Container;
use bindguard_testing::{live, test_if};
use nix::sys::wait::WaitStatus;
use nix::unistd::{ForkResult, fork};

/// 3,000 binds are 78 MB of text, 10,000 are 260 MB. An agent has 64 MiB.
#[test_if(is_root)]
fn a_table_of_78_mb_is_unread_and_costs_less_than_16_mib() {
    let root = tempfile::tempdir().unwrap();
    let container = Container::start_with(root.path(), &[], || live::make_long_mounts(3000));
    let proc = proc_with(&container);
    let peak = peak_of(|| {
        let seen = Proc::at(proc.path().to_owned()).namespaces().unwrap();
        assert!(
            matches!(
                seen.others[0].table,
                Err(UnreadTable::Table(TableError::TooLarge(_)))
            ),
            "{seen:?}"
        );
    });
    assert!(peak < 16 << 10, "{peak} KiB");
    let Namespaces {
        own,
        others,
        problems,
        ..
    } = Proc::at(proc.path().to_owned()).namespaces().unwrap();
    let point = pinned(&own, &others, &problems, &Places::default());
    assert_eq!(
        point.status,
        PointStatus::Unknown,
        "an unread table keeps nothing, as far as the point shows"
    );
    let process = format!("of process {}: ", container.process.pid());
    assert!(
        point.message.contains(&process) && point.message.contains("too large"),
        "{}",
        point.message
    );
}

/// The kernel prints a line into a buffer of its own, which it doubles until the line fits. The
/// buffer is the reader's memory: a process with 64 MiB would be killed.
#[test]
fn a_line_of_40_mb_does_not_kill_its_reader() {
    if !is_root() || !lists_mounts_itself() {
        return;
    }
    let Some(limit) = MemoryLimit::of(64 << 20) else {
        return;
    };
    let root = tempfile::tempdir().unwrap();
    let container = Container::start_with(root.path(), &[], || live::make_deep_mount(40_000));
    let proc = proc_with(&container);
    let status = limit.status_of(|| {
        let namespaces = Proc::at(proc.path().to_owned()).namespaces().unwrap();
        let read = container.process.mounts();
        let is_long_line = |error: &TableError| {
            matches!(error, TableError::TooLarge(ExceededLimit::Line(_)))
        };
        assert!(
            matches!(&namespaces.others[0].table, Err(UnreadTable::Table(error)) if is_long_line(error))
        );
        assert!(
            matches!(&read, Err(ProcessError::Table { source, .. }) if is_long_line(source)),
            "{read:?}"
        );
    });
    assert_eq!(status, WaitStatus::Exited(status.pid().unwrap(), 0));
}

/// Linux 6.12 and newer list the mounts of another namespace singly.
fn lists_mounts_itself() -> bool {
    let version = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = version
        .split(['.', '-'])
        .map_while(|number| number.parse::<u32>().ok());
    let is_new = (numbers.next(), numbers.next()) >= (Some(6), Some(12));
    if !is_new {
        eprintln!("skipped: before Linux 6.12 the table is read as text");
    }
    is_new
}

/// A cgroup with a memory limit.
struct MemoryLimit(PathBuf);

impl MemoryLimit {
    /// `None` without the controller.
    fn of(bytes: u64) -> Option<Self> {
        let is_v1 = fs::exists("/sys/fs/cgroup/memory").unwrap();
        let (root, file) = match is_v1 {
            true => ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
            false => ("/sys/fs/cgroup", "memory.max"),
        };
        let folder = Path::new(root).join(format!("bindguard-line-{}", std::process::id()));
        let made = fs::create_dir(&folder);
        if made
            .and_then(|()| fs::write(folder.join(file), bytes.to_string()))
            .is_err()
        {
            eprintln!("skipped: no controller of memory");
            return None;
        }
        Some(Self(folder))
    }

    /// The end of a process that does this in the cgroup.
    fn status_of(&self, work: impl FnOnce()) -> WaitStatus {
        // SAFETY: the child uses the heap, which glibc keeps usable across fork, and ends without
        // returning.
        match unsafe { fork() }.unwrap() {
            ForkResult::Child => {
                let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                    fs::write(self.0.join("cgroup.procs"), "0").unwrap();
                    work();
                }));
                // SAFETY: ends the child without running the parent's exit handlers.
                unsafe { nix::libc::_exit(i32::from(done.is_err())) }
            }
            ForkResult::Parent { child } => nix::sys::wait::waitpid(child, None).unwrap(),
        }
    }
}

impl Drop for MemoryLimit {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

/// A container that binds the host's root has as many mounts as the host.
#[test_if(is_root)]
fn ten_thousand_mounts_are_read() {
    let root = tempfile::tempdir().unwrap();
    let container = Container::start_with(root.path(), &[], || live::make_mounts(10_000));
    let proc = proc_with(&container);
    let peak = peak_of(|| {
        let seen = Proc::at(proc.path().to_owned()).namespaces().unwrap();
        assert!(seen.others[0].table.as_ref().unwrap().entries().len() > 10_000);
    });
    assert!(peak < 16 << 10, "{peak} KiB");
}

/// A `/proc` with the test's own process first, and the container.
fn proc_with(container: &Container) -> tempfile::TempDir {
    let proc = tempfile::tempdir().unwrap();
    symlink(
        Path::new("/proc").join(std::process::id().to_string()),
        proc.path().join("1"),
    )
    .unwrap();
    let pid = container.process.pid().to_string();
    symlink(Path::new("/proc").join(&pid), proc.path().join(&pid)).unwrap();
    proc
}

/// The memory in KiB that `work` needs at most, beyond what its process had before.
fn peak_of(work: impl FnOnce()) -> u64 {
    let (read, write) = nix::unistd::pipe().unwrap();
    // SAFETY: the child uses the heap, which glibc keeps usable across fork, and ends without
    // returning.
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                // proc_pid_clear_refs(5): the peak begins anew.
                fs::write("/proc/self/clear_refs", "5").unwrap();
                let before = peak();
                work();
                let needed = peak() - before;
                fs::File::from(write)
                    .write_all(&needed.to_ne_bytes())
                    .unwrap();
            }));
            // SAFETY: ends the child without running the parent's exit handlers.
            unsafe { nix::libc::_exit(i32::from(done.is_err())) }
        }
        ForkResult::Parent { child } => {
            drop(write);
            let mut needed = [0; 8];
            fs::File::from(read)
                .read_exact(&mut needed)
                .expect("the work failed");
            nix::sys::wait::waitpid(child, None).unwrap();
            u64::from_ne_bytes(needed)
        }
    }
}

fn peak() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))
        .unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

fn is_root() -> bool {
    let is_root = nix::unistd::geteuid().is_root();
    if !is_root {
        eprintln!("skipped: it needs root, to make mounts");
    }
    is_root
}
