//! Reads command lines beside a process that holds its mmap_lock: a reader of its memory would hang
//! without end.

use std::io::ErrorKind;
use std::process::Command;

use bindguard_sys::enter::HeldProcess;
use bindguard_sys::process_files::{ProcessFile, arguments_of, contents, inodes, links};
use bindguard_testing::held_memory::{Executing, Holder, blocks_readers};

#[test]
fn a_process_that_holds_its_memory_delays_no_other() {
    let Some(holder) = Holder::start(c"conmon", || {}) else {
        return;
    };
    assert!(
        blocks_readers(holder.pid()),
        "the process does not hold its memory"
    );
    let mut other = Command::new("sleep").arg("1000").spawn().unwrap();
    let pids = [other.id(), holder.pid(), u32::MAX, holder.pid(), other.id()];
    let read = arguments_of(&pids);
    other.kill().unwrap();
    other.wait().unwrap();
    let of = |at: usize| read[at].as_ref().map_err(std::io::Error::kind).cloned();
    let sleep = Ok(vec!["sleep".to_owned(), "1000".to_owned()]);
    assert_eq!((of(0), of(4)), (sleep.clone(), sleep));
    assert_eq!(
        (of(1), of(3)),
        (Err(ErrorKind::TimedOut), Err(ErrorKind::TimedOut))
    );
    assert_eq!(of(2), Err(ErrorKind::NotFound));
}

/// The files by which the product recognizes a process.
#[test]
fn a_process_that_holds_its_memory_is_still_recognized() {
    let Some(holder) = Holder::start(c"held", || {}) else {
        return;
    };
    assert!(
        blocks_readers(holder.pid()),
        "the process does not hold its memory"
    );
    let process = HeldProcess::open(holder.pid()).unwrap();
    assert_eq!(process.read("comm").unwrap(), b"held\n");
    for name in ["cgroup", "stat", "status", "mountinfo"] {
        assert!(!process.read(name).unwrap().is_empty(), "{name}");
    }
    let folder = format!("/proc/{}", holder.pid());
    let own = std::fs::read_link("/proc/self/exe").unwrap();
    assert_eq!(std::fs::read_link(format!("{folder}/exe")).unwrap(), own);
    let open = std::fs::read_dir(format!("{folder}/fd")).unwrap();
    assert!(
        open.flatten()
            .all(|entry| std::fs::read_link(entry.path()).is_ok())
    );
    for name in ["ns/mnt", "ns/user"] {
        assert!(
            std::fs::metadata(format!("{folder}/{name}")).is_ok(),
            "{name}"
        );
    }
    assert!(process.mount_namespace().unwrap().is_own().unwrap());
}

/// Such a process also blocks readers of its links: only a separate process may read them.
#[test]
fn a_process_that_hangs_in_execve_delays_no_other() {
    let Some(executing) = Executing::start() else {
        return;
    };
    let process = HeldProcess::open(executing.pid()).unwrap();
    for name in ["comm", "cgroup", "status", "mountinfo"] {
        assert!(!process.read(name).unwrap().is_empty(), "{name}");
    }
    let own = std::process::id();
    let files =
        |name: &str| [executing.pid(), executing.pid(), own].map(|pid| ProcessFile::of(pid, name));
    let mnt = inodes(&files("ns/mnt"));
    // Before it took this lock for links, a kernel answers.
    assert!(mnt[0].as_ref().is_ok_and(|_| mnt[1].is_ok()) || mnt[0].as_ref().is_err_and(is_late));
    assert!(
        mnt[2].is_ok() && links(&files("exe"))[2].is_ok() && contents(&files("stat"))[2].is_ok()
    );
}

fn is_late(error: &std::io::Error) -> bool {
    error.kind() == ErrorKind::TimedOut
}
