//! mount(2) and umount(2), as mount(8) makes them.

use std::fs::create_dir_all;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};

/// Mounts a tmpfs.
pub fn tmpfs(target: impl AsRef<Path>, options: &str) -> Result<()> {
    let target = target.as_ref();
    mount(
        Some("tmpfs"),
        target,
        Some("tmpfs"),
        MsFlags::empty(),
        Some(options),
    )
    .with_context(|| format!("mount a tmpfs on {}", target.display()))
}

/// Makes what is written below `target` from now on land in `upper`, an empty folder; the machine's
/// own stays as it is.
pub fn own_copy(target: impl AsRef<Path>, upper: &Path) -> Result<()> {
    own_copy_at(target.as_ref(), target.as_ref(), upper)
}

/// Shows the files of `source` at `target`, a folder, with what is written there landing in
/// `upper`.
pub fn own_copy_at(source: &Path, target: &Path, upper: &Path) -> Result<()> {
    let doing = || format!("mount an overlay on {}", target.display());
    let (changes, work) = (upper.join("changes"), upper.join("work"));
    [changes.as_path(), &work, target]
        .into_iter()
        .try_for_each(create_dir_all)
        .with_context(doing)?;
    let options = format!(
        "lowerdir={},upperdir={},workdir={}",
        source.display(),
        changes.display(),
        work.display()
    );
    mount(
        Some("overlay"),
        target,
        Some("overlay"),
        MsFlags::empty(),
        Some(options.as_str()),
    )
    .with_context(doing)
}

/// Binds `source` over `target`, without submounts.
pub fn bind(source: impl AsRef<Path>, target: impl AsRef<Path>) -> Result<()> {
    let (source, target) = (source.as_ref(), target.as_ref());
    mount(
        Some(source),
        target,
        None::<&str>,
        MsFlags::MS_BIND,
        None::<&str>,
    )
    .with_context(|| format!("bind {} over {}", source.display(), target.display()))
}

/// Makes a mount private, without the mounts below it.
pub fn private(target: impl AsRef<Path>) -> Result<()> {
    let target = target.as_ref();
    mount(
        None::<&str>,
        target,
        None::<&str>,
        MsFlags::MS_PRIVATE,
        None::<&str>,
    )
    .with_context(|| format!("make {} private", target.display()))
}

/// Far longer than a child needs from fork to exec, on a busy machine too.
const BUSY_TIMEOUT: Duration = Duration::from_secs(20);

const BUSY_INTERVAL: Duration = Duration::from_millis(5);

/// Takes away the topmost mount on `target`, as umount(8) does: a busy mount stays.
///
/// Stories share a process, and a child of a parallel story has all descriptors of the process
/// until its exec. A mount with an open file is busy until then, so EBUSY is final only after
/// [`BUSY_TIMEOUT`]. The kubelet retries too.
pub fn unmount(target: impl AsRef<Path>) -> Result<()> {
    let target = target.as_ref();
    let deadline = Instant::now() + BUSY_TIMEOUT;
    loop {
        match umount2(target, MntFlags::UMOUNT_NOFOLLOW) {
            Err(Errno::EBUSY) if Instant::now() < deadline => thread::sleep(BUSY_INTERVAL),
            done => return done.with_context(|| format!("umount {}", target.display())),
        }
    }
}
