//! Reads command lines beside a process that holds its mmap_lock: a reader of its memory would hang
//! without end.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::process::Command;

use bindguard_sys::enter::{HeldProcess, ProcessError, open_process_file};
use bindguard_sys::process_files::{ProcessFile, arguments_of, contents, inodes, links};
use bindguard_testing::held_memory::{Executing, Holder, blocks_readers, unless_it_hangs};

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

/// A process decides where its arguments begin and end (PR_SET_MM_ARG_END of prctl(2)).
#[test]
fn a_process_with_long_arguments_fills_no_memory() {
    let long = "x".repeat(100_000);
    let script = "kill -STOP $$; exit";
    let mut other = Command::new("sh")
        .args(["-c", script, &long])
        .spawn()
        .unwrap();
    let read = arguments_of(&[other.id(), std::process::id()]);
    other.kill().unwrap();
    other.wait().unwrap();
    let error = read[0].as_ref().map_err(std::io::Error::kind);
    assert_eq!(error, Err(ErrorKind::FileTooLarge));
    assert!(read[1].is_ok());
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
    assert!(process.start_time().is_ok());
    for name in ["cgroup", "status", "mountinfo"] {
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

/// A refresh reads these of the init of a container, which can make a FUSE mount of its own.
#[test]
fn a_process_that_hangs_in_execve_does_not_delay_its_readers() {
    let Some(executing) = Executing::start() else {
        return;
    };
    let pid = executing.pid();
    let is_own = unless_it_hangs(move || {
        let namespace = HeldProcess::open(pid).unwrap().mount_namespace();
        namespace.unwrap().is_own().unwrap()
    });
    assert_eq!(is_own, Some(true));
    let program = unless_it_hangs(move || HeldProcess::open(pid).unwrap().program_name());
    assert!(is_read_or_blocked(&program), "{program:?}");
    let started = unless_it_hangs(move || HeldProcess::open(pid).unwrap().start_time());
    assert!(is_read_or_blocked(&started), "{started:?}");
    for name in ["uid_map", "gid_map", "status", "mountinfo"] {
        let read = unless_it_hangs(move || HeldProcess::open(pid).unwrap().read(name).is_ok());
        assert_eq!(read, Some(true), "{name}");
    }
}

/// The way to a namespace before Linux 6.11, and to a namespace that only a descriptor of a process
/// keeps.
#[test]
fn a_file_of_a_process_that_hangs_in_execve_is_opened_within_a_time_limit() {
    let Some(executing) = Executing::start() else {
        return;
    };
    let own = ProcessFile::of(std::process::id(), "ns/mnt");
    let opened = File::from(open_process_file(&own).unwrap());
    let number = |namespace: std::fs::Metadata| (namespace.dev(), namespace.ino());
    assert_eq!(
        number(opened.metadata().unwrap()),
        number(std::fs::metadata("/proc/self/ns/mnt").unwrap())
    );
    let none = open_process_file(&ProcessFile::of(u32::MAX, "ns/mnt")).unwrap_err();
    assert_eq!(none.kind(), ErrorKind::NotFound);

    let file = ProcessFile::of(executing.pid(), "ns/mnt");
    let opened = unless_it_hangs(move || open_process_file(&file));
    let opened = opened.expect("the open hangs");
    assert!(opened.as_ref().is_ok() || opened.as_ref().is_err_and(is_late));
}

/// A kernel that takes no lock for the file answers.
fn is_read_or_blocked<T>(read: &Option<Result<T, ProcessError>>) -> bool {
    matches!(read, Some(Ok(_) | Err(ProcessError::Blocked { .. })))
}

fn is_late(error: &std::io::Error) -> bool {
    error.kind() == ErrorKind::TimedOut
}
