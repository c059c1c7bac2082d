//! Reads the mounts of a namespace without processes: a thread enters it, reads, and ends.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::thread;

use nix::sched::{CloneFlags, setns, unshare};
use rustix::fs::{Mode, OFlags};

/// The mount table of the namespace that a file refers to, read by a thread that enters it.
pub(super) fn table_of_namespace(file: &Path) -> Result<Vec<u8>, String> {
    let failed = |what: &str, error: &dyn std::fmt::Display| format!("{what} {}: {error}", file.display());
    let enter = || -> Result<Vec<u8>, String> {
        let namespace = File::open(file).map_err(|error| failed("open", &error))?;
        // Open the thread's own directory before: inside, there may be no /proc.
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let own = rustix::fs::open("/proc/thread-self", flags, Mode::empty()).map_err(|e| failed("look into", &e))?;
        // setns(2) refuses a thread that shares its root directory with others.
        unshare(CloneFlags::CLONE_FS).map_err(|errno| failed("enter", &errno))?;
        setns(&namespace, CloneFlags::CLONE_NEWNS).map_err(|errno| failed("enter", &errno))?;
        let mountinfo = rustix::fs::openat(&own, "mountinfo", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        let mut bytes = Vec::new();
        File::from(mountinfo.map_err(|e| failed("read the mounts of", &e))?)
            .read_to_end(&mut bytes)
            .map_err(|error| failed("read the mounts of", &error))?;
        Ok(bytes)
    };
    thread::scope(|scope| scope.spawn(enter).join().unwrap_or_else(|_| Err(failed("enter", &"the thread panicked"))))
}
