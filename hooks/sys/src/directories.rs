//! Making a directory again that vanished from a volume which containers write.
//!
//! As the kubelet does for a `subPath` that is not there (`doSafeMakeDir` in `pkg/volume/util/subpath/subpath_linux.go`):
//! one component after the other from the volume's root, each opened without following a symlink, so that nothing that a
//! container puts in the way can lead out of the volume. What is made gets the mode and owner of the volume's root.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::handle::Handle;

/// Why a directory could not be made.
#[derive(Debug, thiserror::Error)]
#[error("make {} in {}", path.display(), volume.display())]
pub struct DirectoriesError {
    /// The volume.
    pub volume: PathBuf,
    /// The path within it.
    pub path: PathBuf,
    /// The kernel's answer: ENOTDIR or ELOOP when something else is in the way.
    #[source]
    pub source: io::Error,
}

/// Makes `path` below a volume's root, and what is missing above it. What is there already stays as it is.
///
/// # Errors
/// When something else has one of the names, or the kernel refuses.
pub fn make_directories(volume: &Handle, path: &Path) -> Result<(), DirectoriesError> {
    let failed = |errno: Errno| DirectoriesError {
        volume: volume.path().to_owned(),
        path: path.to_owned(),
        source: errno.into(),
    };
    let root = open_directory(volume, OsStr::new(".")).map_err(failed)?;
    let mut names = path.components().map(|component| match component {
        Component::Normal(name) => Ok(name),
        Component::Prefix(_) | Component::RootDir | Component::CurDir | Component::ParentDir => Err(Errno::INVAL),
    });
    let made = names.try_fold(None::<OwnedFd>, |parent, name| {
        let parent = parent.as_ref().map_or(root.as_fd(), AsFd::as_fd);
        make_below(parent, name?, root.as_fd()).map(Some)
    });
    made.map(drop).map_err(failed)
}

/// One directory, made if need be, and held.
fn make_below(parent: impl AsFd, name: &OsStr, like: impl AsFd) -> Result<OwnedFd, Errno> {
    let is_new = match rustix::fs::mkdirat(&parent, name, Mode::RWXU) {
        Ok(()) => true,
        Err(Errno::EXIST) => false,
        Err(errno) => return Err(errno),
    };
    let directory = open_directory(&parent, name)?;
    if is_new {
        let like = rustix::fs::fstat(&like)?;
        let (owner, group) = (rustix::fs::Uid::from_raw(like.st_uid), rustix::fs::Gid::from_raw(like.st_gid));
        rustix::fs::chownat(&directory, "", Some(owner), Some(group), AtFlags::EMPTY_PATH)?;
        // After the owner: chown(2) takes set-group-ID away.
        rustix::fs::fchmod(&directory, Mode::from_raw_mode(like.st_mode))?;
    }
    Ok(directory)
}

fn open_directory(parent: impl AsFd, name: &OsStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    // One name and O_NOFOLLOW: only a mount in the way could lead elsewhere.
    rustix::fs::openat2(parent, name, flags, Mode::empty(), ResolveFlags::NO_XDEV)
}
