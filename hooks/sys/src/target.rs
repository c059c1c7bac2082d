//! Opens the file that a sub path leads to today, so that nothing in the volume can lead out of it.
//!
//! A payload is opened in two steps. The first reads `..data`; the second opens the path from
//! there, with no symlink allowed. AtomicWriter may swap the payload between the two; then both
//! steps are repeated. openat2(2) refuses paths that leave the directory, another mount in the way,
//! and magic links (CVE-2017-1002101 was a symlink in a volume).

use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use bindguard_core::evidence::FileIdentity;
use bindguard_core::kubelet::{DATA_LINK, TimestampDirectory, VolumeLayout};
use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::failure::{Failure, failed};
use crate::handle::Handle;

/// Limit of payload swaps while a target is opened. Updates without a pause needed 12.
const SWAPS: usize = 64;

/// The file that a sub path leads to.
#[derive(Debug)]
pub struct OpenedTarget {
    /// The payload directory around the file; `None` in volumes without payload directories.
    pub timestamp: Option<TimestampDirectory>,
    /// The file; `None` when nothing has that name.
    pub file: Option<Handle>,
}

/// Why a target could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// The volume has no `..data`.
    #[error("{} has no ..data", .0.display())]
    NoPayload(PathBuf),
    /// `..data` is not what AtomicWriter makes.
    #[error("..data of {} names {}, which is no payload directory", volume.display(), names.display())]
    NotAPayload {
        volume: PathBuf,
        /// The target of the link.
        names: PathBuf,
    },
    /// The payload was swapped faster than it could be opened.
    #[error("{} was updated {SWAPS} times while it was opened", .0.display())]
    Restless(PathBuf),
    /// A symlink is in the place of a file or directory.
    #[error("{} in {} is a symlink", path.display(), volume.display())]
    Symlink { volume: PathBuf, path: PathBuf },
    /// The kernel's error: ELOOP for a symlink, EXDEV for another mount or a way out of the volume.
    #[error(transparent)]
    Open(Failure),
}

/// Opens `sub_path` of a volume, below `..data` where its files lie in a payload.
///
/// # Errors
/// If the kernel refuses a step, or the volume does not have its writer's layout. A missing name is
/// no error.
pub fn open_target(
    volume: &Handle,
    sub_path: &Path,
    layout: VolumeLayout,
) -> Result<OpenedTarget, TargetError> {
    match layout {
        VolumeLayout::Plain => {
            return Ok(OpenedTarget {
                timestamp: None,
                file: below(volume, sub_path)?,
            });
        }
        VolumeLayout::Payload => {}
    }
    for _ in 0..SWAPS {
        let timestamp = current_payload(volume)?;
        // AtomicWriter makes no links within a payload, so no link below the payload's name is
        // followed.
        let file = below(volume, &Path::new(timestamp.name()).join(sub_path))?;
        // Not there: because the key is gone, or because the payload is just being removed?
        if file.is_some() || current_payload(volume)? == timestamp {
            return Ok(OpenedTarget {
                timestamp: Some(timestamp),
                file,
            });
        }
    }
    Err(TargetError::Restless(volume.path().to_owned()))
}

/// The payload directory that `..data` names now.
///
/// # Errors
/// If the volume has no `..data`, or `..data` leads elsewhere.
pub fn current_payload(volume: &Handle) -> Result<TimestampDirectory, TargetError> {
    let link = match rustix::fs::readlinkat(volume, DATA_LINK, Vec::new()) {
        Ok(link) => link,
        Err(Errno::NOENT) => return Err(TargetError::NoPayload(volume.path().to_owned())),
        Err(errno) => return Err(open_error(volume, Path::new(DATA_LINK))(errno)),
    };
    let names = OsStr::from_bytes(link.as_bytes());
    TimestampDirectory::from_name(names).ok_or_else(|| TargetError::NotAPayload {
        volume: volume.path().to_owned(),
        names: names.into(),
    })
}

/// Opens `path` below a volume's root; `None` when it is not there.
fn below(volume: &Handle, path: &Path) -> Result<Option<Handle>, TargetError> {
    let name = match path.as_os_str().is_empty() {
        true => Path::new("."),
        false => path,
    };
    let file = match open_below(volume, name, OFlags::empty()) {
        Ok(fd) => Handle::from_fd(fd, volume.path().join(path)),
        Err(Errno::NOENT | Errno::NOTDIR) => return Ok(None),
        Err(errno) => return Err(open_error(volume, path)(errno)),
    };
    match file.is_symlink() {
        Ok(false) => Ok(Some(file)),
        // With O_PATH | O_NOFOLLOW the kernel opens a final symlink itself.
        Ok(true) => Err(TargetError::Symlink {
            volume: volume.path().to_owned(),
            path: path.to_owned(),
        }),
        // The client trusted a name, and queried its server only now.
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(open_error(volume, path)(error.source)),
    }
}

/// Opens `path` below a directory; nothing can lead out of it or onto another mount.
fn open_below(directory: impl AsFd, path: &Path, more: OFlags) -> Result<OwnedFd, Errno> {
    let beneath = ResolveFlags::BENEATH | ResolveFlags::NO_XDEV;
    open_without_links(directory, path, more, beneath)
}

/// Opens a path without symlinks: openat2(2), repeated while the kernel is not sure of the result.
pub(crate) fn open_without_links(
    directory: impl AsFd,
    path: &Path,
    more: OFlags,
    resolve: ResolveFlags,
) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC | more;
    let resolve = resolve | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    loop {
        // EAGAIN: something was renamed somewhere during the walk, and the kernel cannot be sure of
        // the result.
        match rustix::fs::openat2(&directory, path, flags, Mode::empty(), resolve) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            other => return other,
        }
    }
}

fn open_error<E: Into<std::io::Error>>(
    volume: &Handle,
    path: &Path,
) -> impl FnOnce(E) -> TargetError {
    let failed = failed(format!("open {} in", path.display()), volume.path());
    move |source| TargetError::Open(failed(source))
}

/// The payload directory that `..data` of a kubelet-written volume named when it was read, open
/// while several names in it are looked up.
#[derive(Debug)]
pub(crate) struct Payload {
    pub(crate) timestamp: TimestampDirectory,
    directory: OwnedFd,
}

impl Payload {
    /// Opens the current payload of a volume. `None` if that fails;
    /// [`open_target`](crate::open_target) reports the reason.
    pub(crate) fn hold(volume: &Handle) -> Option<Self> {
        let timestamp = current_payload(volume).ok()?;
        let directory = open_below(volume, Path::new(timestamp.name()), OFlags::DIRECTORY).ok()?;
        Some(Self {
            timestamp,
            directory,
        })
    }

    /// The identity of a key of the `volume`, read without opening it. `None` for a key that is
    /// gone or is being removed with its payload, a path of several names, a symlink, and a mount.
    pub(crate) fn key(&self, key: &Path, volume: &Handle) -> Option<FileIdentity> {
        if key.file_name()? != key.as_os_str() {
            return None;
        }
        volume.identity_on_same_mount(&self.directory, key)
    }
}
