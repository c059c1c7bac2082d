//! Probes of a mount whose daemon takes requests and never answers.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use bindguard_sys::probe::{Answer, Timeouts, probe, probe_side_by_side};
use bindguard_testing::live::{change, kernel};
use bindguard_testing::scene::tmpfs;
use bindguard_testing::{Folder, Fuse, bind, own_namespace};
use nix::mount::{MsFlags, mount};

const EACH: Duration = Duration::from_millis(700);

/// A daemon that takes all requests.
fn silent_daemon() -> Option<Fuse> {
    let mut fuse = own_namespace().then(Fuse::mounted).flatten()?;
    fuse.begin();
    let mut device = fuse.device.as_ref()?.try_clone().unwrap();
    thread::spawn(move || while device.read(&mut vec![0; 1 << 17]).is_ok() {});
    Some(fuse)
}

fn probed(path: &Path) -> Answer {
    let timeouts = Timeouts {
        each: EACH,
        all: 2 * EACH,
    };
    probe(&[path.to_owned()], timeouts).unwrap().pop().unwrap()
}

fn is_silent(answer: &Answer) -> bool {
    matches!(answer, Answer::Silent(_))
}

/// A volume and its subPaths are several mounts of the same filesystem.
#[test]
fn a_filesystem_with_a_probe_that_hangs_is_not_probed_again() {
    let Some(fuse) = silent_daemon() else { return };
    let (folder, healthy) = (Folder::new(), Folder::new());
    bind(&fuse.path(), folder.path());
    change(folder.path(), MsFlags::MS_PRIVATE);
    tmpfs(healthy.path());
    assert!(is_silent(&probed(&fuse.path())));
    for path in [fuse.path(), folder.path().to_owned(), fuse.path().join("x")] {
        let answer = probed(&path);
        assert!(is_silent(&answer), "{}: {answer:?}", path.display());
    }
    assert_eq!(probes_in_own_namespace(), 1);
    let paths: [PathBuf; 3] = [folder.path().into(), healthy.path().into(), fuse.path()];
    let answers = probe_side_by_side(&paths, EACH).unwrap();
    let silent: Vec<bool> = answers.iter().map(is_silent).collect();
    assert_eq!(silent, [true, false, true], "{answers:?}");
    assert!(matches!(answers[1], Answer::Reached(_)), "{answers:?}");

    // The driver mounts the volume anew, while the probe of the old mount still hangs.
    tmpfs(folder.path());
    assert!(matches!(probed(folder.path()), Answer::Reached(_)));
    assert!(is_silent(&probed(&fuse.path())));
}

#[test]
fn once_the_probe_ended_the_filesystem_is_probed_again() {
    let Some(mut fuse) = silent_daemon() else {
        return;
    };
    assert!(is_silent(&probed(&fuse.path())));
    abort_connection(&fuse.path());
    fuse.device = None;
    let start = Instant::now();
    while !matches!(probed(&fuse.path()), Answer::Refused(_)) {
        assert!(start.elapsed() < Duration::from_secs(60));
        thread::sleep(Duration::from_millis(5));
    }
}

/// As if the daemon ended: another thread has its device.
fn abort_connection(mounted_at: &Path) {
    let table = bindguard_sys::read_mount_table().unwrap();
    let mounts = table.entries().iter();
    let found = mounts
        .rev()
        .find(|it| it.mount_point == mounted_at)
        .unwrap();
    let connections = Folder::new();
    let kind = Some("fusectl");
    mount(
        kind,
        connections.path(),
        kind,
        MsFlags::empty(),
        None::<&str>,
    )
    .unwrap();
    let abort = connections.path().join(found.device.minor.to_string());
    std::fs::write(abort.join("abort"), "1").unwrap();
}

/// A daemon that answers, with the directory `dir`, which the kernel looks up at each walk.
fn answering_daemon() -> Option<Fuse> {
    let mut fuse = Fuse::mounted()?;
    fuse.begin();
    let mut device = fuse.device.as_ref()?.try_clone().unwrap();
    thread::spawn(move || {
        let mut request = vec![0; 1 << 17];
        while device.read(&mut request).is_ok() {
            let operation = u32::from_ne_bytes(request[4..8].try_into().unwrap());
            // `struct fuse_attr`: a directory.
            let mut attributes = [0; 88];
            attributes[0] = 2;
            attributes[60..64].copy_from_slice(&0o40755_u32.to_ne_bytes());
            attributes[64] = 2;
            let (error, reply) = match operation {
                // FUSE_LOOKUP: `struct fuse_entry_out`, valid for no time.
                1 => (
                    0,
                    [&2_u64.to_ne_bytes()[..], &[0; 32], &attributes].concat(),
                ),
                // FUSE_GETATTR: `struct fuse_attr_out`
                3 => (0, [&[0; 16][..], &attributes].concat()),
                // FUSE_FORGET, FUSE_INTERRUPT, FUSE_BATCH_FORGET
                2 | 36 | 42 => continue,
                _ => (-(nix::errno::Errno::ENOSYS as i32), Vec::new()),
            };
            let length = 16_u32 + u32::try_from(reply.len()).unwrap();
            let head = [length.to_ne_bytes(), i32::to_ne_bytes(error)].concat();
            let _ = device.write(&[&head[..], &request[8..16], &reply].concat());
        }
    });
    Some(fuse)
}

#[test]
fn a_filesystem_with_a_mount_in_it_that_hangs_is_probed() {
    let Some(silent) = silent_daemon() else {
        return;
    };
    let Some(outer) = answering_daemon() else {
        return;
    };
    let inner = outer.path().join("dir");
    bind(&silent.path(), &inner);
    for _ in 0..4 {
        assert!(is_silent(&probed(&inner)));
    }
    // The kernel's cache decides if the outer filesystem may be the silent one: for a moment after a
    // walk it is not.
    let probes = probes_in_own_namespace();
    assert!(probes <= 2, "{probes}");
    let answer = probed(&outer.path());
    assert!(matches!(answer, Answer::Reached(_)), "{answer:?}");
    let paths = [inner, outer.path()];
    let answers = probe_side_by_side(&paths, EACH).unwrap();
    assert!(matches!(answers[1], Answer::Reached(_)), "{answers:?}");
}

/// The first probe of a filesystem hangs, and no second probe begins meanwhile.
#[test]
fn paths_of_one_filesystem_share_a_process() {
    let Some(fuse) = silent_daemon() else { return };
    let folders = [(); 4].map(|()| Folder::new());
    for folder in &folders {
        bind(&fuse.path(), folder.path());
    }
    let paths: Vec<PathBuf> = folders.iter().map(|it| it.path().to_owned()).collect();
    let answers = probe_side_by_side(&paths, EACH).unwrap();
    assert!(answers.iter().all(is_silent), "{answers:?}");
    assert_eq!(probes_in_own_namespace(), 1);
}

/// Each create reads the policy and appends to the journal.
#[test]
fn files_on_a_filesystem_that_hangs_leave_one_process() {
    let Some(fuse) = silent_daemon() else { return };
    let file = fuse.path().join("file");
    for _ in 0..3 {
        let appended = bindguard_sys::journal::append(&file, "{}");
        assert!(appended.is_err());
        // Before Linux 6.8 a small file is read as it is: docs/decisions/0017.
        if kernel() >= (6, 8) {
            let read = bindguard_sys::read_file(&file, 10).unwrap_err();
            assert_eq!(read.kind(), std::io::ErrorKind::TimedOut, "{read}");
        }
    }
    assert_eq!(probes_in_own_namespace(), 1);
}

/// The processes in the mount namespace of this test's thread. The test's main thread is in another
/// mount namespace.
fn probes_in_own_namespace() -> usize {
    let namespace_in = |folder: &Path| std::fs::read_link(folder.join("ns/mnt")).ok();
    let own = namespace_in("/proc/thread-self".as_ref());
    let names = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = names.filter(|it| it.file_name().to_string_lossy().parse::<u32>().is_ok());
    pids.filter(|pid| namespace_in(&pid.path()) == own).count()
}
