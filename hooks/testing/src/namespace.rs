//! A mount namespace of the calling thread's own: it ends with the thread and takes every mount
//! along.

use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};

/// Moves this thread into a namespace of its own whose `/` is shared or private. `false`, with a
/// printed reason, without privilege.
pub fn enter(shared: bool) -> bool {
    if let Err(errno) = unshare(CloneFlags::CLONE_NEWNS) {
        skipped(&format!(
            "unshare(CLONE_NEWNS) says {errno}: this needs CAP_SYS_ADMIN"
        ));
        return false;
    }
    change("/", MsFlags::MS_PRIVATE | MsFlags::MS_REC);
    if shared {
        change("/", MsFlags::MS_SHARED | MsFlags::MS_REC);
    }
    true
}

/// The same with a shared `/`, as systemd sets it up.
pub fn own_namespace() -> bool {
    enter(true)
}

/// Prints past the test runner's capture of `eprintln!`.
pub fn skipped(why: &str) {
    let _ = writeln!(io::stderr(), "SKIPPED: {why}");
}

/// True on a kernel without listmount(2) and statmount(2).
pub fn is_before_linux_6_8() -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let version: Vec<u32> = release
        .split(['.', '-'])
        .map_while(|number| number.parse().ok())
        .collect();
    version < vec![6, 8]
}

/// `mount --bind`
pub fn bind(from: &Path, to: &Path) {
    mount(Some(from), to, None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
}

/// Mounts an empty tmpfs.
pub fn mount_tmpfs(place: &Path) {
    let (kind, none) = (Some("tmpfs"), MsFlags::empty());
    mount(kind, place, kind, none, None::<&str>).unwrap();
}

/// `umount`. A process that another test forks has copies of this test's descriptors for a moment:
/// the mount is busy then.
pub fn unmount(place: &Path) {
    for _ in 0..1000 {
        match umount2(place, MntFlags::empty()) {
            Err(Errno::EBUSY) => sleep(Duration::from_millis(10)),
            ended => return ended.unwrap(),
        }
    }
    panic!("{} stays busy", place.display());
}

/// The mount table of this thread, line by line.
pub fn mounts_of_host() -> Vec<String> {
    let table = fs::read_to_string("/proc/thread-self/mountinfo").unwrap();
    table.lines().map(str::to_owned).collect()
}

fn change(path: &str, flags: MsFlags) {
    mount(None::<&str>, path, None::<&str>, flags, None::<&str>).unwrap();
}
