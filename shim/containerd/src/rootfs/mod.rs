//! The container's root filesystem: what the snapshotter asks to be mounted, on `rootfs` in the bundle.
//!
//! Usually one overlay. All of it is mounted on a thread of its own, and a failure takes what was mounted down again. No
//! mount table is read here, neither to mount nor to unmount: with ten thousand mounts on a node that is what costs.

mod mount_options;
mod overlay;

use std::{
    fs::DirBuilder,
    io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use containerd_shim_protos::types::mount::Mount;
use nix::{
    errno::Errno,
    mount::{MntFlags, MsFlags, umount2},
};

use crate::aside::aside;
use mount_options::MountOptions;

/// How often a busy root filesystem is tried before it is only detached.
const BUSY_TRIES: u32 = 10;
const BUSY_PAUSE: Duration = Duration::from_millis(20);

/// A root filesystem that could not be put up or taken down.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RootfsError {
    /// The directory to mount on.
    #[error("make the mount point {path}")]
    MountPoint {
        /// Where.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// An option of a kind this shim cannot apply.
    #[error("mount option {option:?} of {source_path} is not supported")]
    Option {
        /// The option.
        option: String,
        /// The mount's source.
        source_path: String,
    },
    /// mount(2) failed.
    #[error("failed to mount rootfs component: mount {kind} {source_path} on {target}")]
    Mount {
        /// The filesystem's type.
        kind: String,
        /// What.
        source_path: String,
        /// Where.
        target: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// umount(2) failed.
    #[error("unmount {target}")]
    Unmount {
        /// What.
        target: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// There was no thread to do it.
    #[error("work on {target} aside from the event loop")]
    Aside {
        /// What.
        target: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

/// Mounts all, in order, or nothing.
pub(crate) async fn mount(mounts: Vec<Mount>, rootfs: PathBuf) -> Result<(), RootfsError> {
    if mounts.is_empty() {
        return Ok(());
    }
    let target = rootfs.clone();
    aside(move || mount_all(&mounts, &rootfs)).await.map_err(|source| RootfsError::Aside { target, source })?
}

/// Takes down whatever is mounted there; nothing mounted is fine.
pub(crate) async fn unmount(rootfs: PathBuf) -> Result<(), RootfsError> {
    let target = rootfs.clone();
    aside(move || unmount_all(&rootfs)).await.map_err(|source| RootfsError::Aside { target, source })?
}

fn mount_all(mounts: &[Mount], rootfs: &Path) -> Result<(), RootfsError> {
    make_directory(rootfs)?;
    for mount in mounts {
        if let Err(error) = mount_one(mount, rootfs) {
            if let Err(left) = unmount_all(rootfs) {
                tracing::warn!(error = %left, "a half mounted root filesystem stays");
            }
            return Err(error);
        }
    }
    Ok(())
}

fn make_directory(path: &Path) -> Result<(), RootfsError> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o711)
        .create(path)
        .map_err(|source| RootfsError::MountPoint { path: path.to_owned(), source })
}

fn mount_one(mount: &Mount, rootfs: &Path) -> Result<(), RootfsError> {
    let target = rootfs.join(mount.target.trim_start_matches('/'));
    let options = MountOptions::parse(&mount.options)
        .map_err(|option| RootfsError::Option { option, source_path: mount.source.clone() })?;
    let failed = |source: io::Error| RootfsError::Mount {
        kind: mount.type_.clone(),
        source_path: mount.source.clone(),
        target: target.clone(),
        source,
    };
    if !options.is_remount_only() {
        overlay::mount_maybe_long(mount, &target, &options).map_err(failed)?;
    }
    if !options.propagation.is_empty() {
        call(None, &target, None, options.propagation, None).map_err(failed)?;
    }
    // The kernel ignores every other flag of a new bind: read-only takes a second call.
    let read_only_bind = MsFlags::MS_BIND | MsFlags::MS_RDONLY;
    if options.flags.contains(read_only_bind) {
        call(None, &target, None, options.flags | MsFlags::MS_REMOUNT, None).map_err(failed)?;
    }
    Ok(())
}

/// mount(2).
fn call(source: Option<&str>, target: &Path, kind: Option<&str>, flags: MsFlags, data: Option<&str>) -> io::Result<()> {
    Ok(nix::mount::mount(source, target, kind, flags, data)?)
}

fn unmount_all(rootfs: &Path) -> Result<(), RootfsError> {
    let mut busy = 0;
    loop {
        let lazy = if busy > BUSY_TRIES { MntFlags::MNT_DETACH } else { MntFlags::empty() };
        match umount2(rootfs, lazy | MntFlags::UMOUNT_NOFOLLOW) {
            // There may be another one underneath.
            Ok(()) => {}
            // EINVAL: nothing is mounted there (any more).
            Err(Errno::EINVAL | Errno::ENOENT) => return Ok(()),
            Err(Errno::EBUSY) if busy <= BUSY_TRIES => {
                busy += 1;
                thread::sleep(BUSY_PAUSE);
            }
            Err(errno) => return Err(RootfsError::Unmount { target: rootfs.to_owned(), source: errno.into() }),
        }
    }
}
