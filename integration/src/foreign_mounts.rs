//! Mounts that a container makes in its own mount namespace, as a container with a user namespace
//! can.

use std::fs::{self, File};
use std::path::Path;
use std::thread;

use anyhow::{Context, Result, anyhow};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};
use nix::unistd::chdir;

use crate::mount_calls::tmpfs;

/// Makes this many binds below names of 250 newlines each, in the mount namespace of a process.
/// mountinfo prints a newline as four bytes: 3,000 binds are 78 MB of text.
pub fn make_long_mounts(pid: u32, count: usize) -> Result<()> {
    let namespace =
        File::open(format!("/proc/{pid}/ns/mnt")).context("open a container's mount namespace")?;
    // A separate thread, which stays in the container's namespace until its end.
    let made = thread::spawn(move || {
        unshare(CloneFlags::CLONE_FS).context("unshare the file system context")?;
        setns(&namespace, CloneFlags::CLONE_NEWNS)
            .context("enter a container's mount namespace")?;
        make(count)
    });
    made.join()
        .map_err(|_| anyhow!("the thread in the container panicked"))?
}

fn make(count: usize) -> Result<()> {
    let (place, name) = (Path::new("/many"), "\n".repeat(250));
    fs::create_dir_all(place).context("make a folder in the container")?;
    tmpfs("/many", "mode=755")?;
    chdir(place).context("enter the folder in the container")?;
    // The kernel accepts no longer path at once.
    for _ in 0..13 {
        fs::create_dir(&name).context("make a folder with a long name")?;
        chdir(name.as_str()).context("enter a folder with a long name")?;
    }
    for number in 0..count {
        let place = number.to_string();
        fs::create_dir(&place).context("make a mount point")?;
        mount(
            Some("."),
            place.as_str(),
            None::<&str>,
            MsFlags::MS_BIND,
            None::<&str>,
        )
        .context("bind a folder")?;
    }
    Ok(())
}
