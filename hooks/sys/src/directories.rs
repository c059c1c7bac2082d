//! Creates a directory again that is missing in a volume which containers write.
//!
//! It follows the kubelet's code for a missing `subPath` (`doSafeMakeDir` in
//! `pkg/volume/util/subpath/subpath_linux.go`). It opens component by component from the volume's
//! root and follows no symlink. So nothing that a container puts in the way can lead out of the
//! volume. New directories get the mode and owner of the volume's root.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::handle::Handle;
use crate::links_beside::OnTheWay;

/// Why a directory was not made.
#[derive(Debug, thiserror::Error)]
pub enum DirectoriesError {
    /// The kernel refused, or something else is in the way.
    #[error("make {} in {}", path.display(), volume.display())]
    Make {
        /// The volume.
        volume: PathBuf,
        /// The path within it.
        path: PathBuf,
        /// The kernel's error: ENOTDIR or ELOOP when something else is in the way.
        #[source]
        source: io::Error,
    },
    /// The pod's `subPath` may be a symlink, which leads elsewhere by now.
    #[error(
        "make {} in {}: {} is a symlink to a directory beside it, and the subPath may be that symlink",
        path.display(), volume.display(), link.display()
    )]
    Linked {
        /// The volume.
        volume: PathBuf,
        /// The path within it.
        path: PathBuf,
        /// The symlink.
        link: PathBuf,
    },
}

/// Creates `path` and its missing parents below a volume's root. Existing directories stay
/// unchanged.
///
/// # Errors
/// When something else has a name of the path, a symlink may have led there, or the kernel refuses.
pub fn make_directories(volume: &Handle, path: &Path) -> Result<(), DirectoriesError> {
    let volume_path = || volume.path().to_owned();
    let failed = |errno: Errno| DirectoriesError::Make {
        volume: volume_path(),
        path: path.to_owned(),
        source: errno.into(),
    };
    let mut names = path.components().map(|component| match component {
        Component::Normal(name) => Ok(name),
        Component::Prefix(_) | Component::RootDir | Component::CurDir | Component::ParentDir => {
            Err(Errno::INVAL)
        }
    });
    let (there, missing) = on_the_way(volume, &mut names).map_err(failed)?;
    let Some(missing) = missing else {
        return Ok(());
    };
    if let Some(link) = there.link_beside(volume.path()).map_err(failed)? {
        return Err(DirectoriesError::Linked {
            volume: volume_path(),
            path: path.to_owned(),
            link,
        });
    }
    let root = open_directory(volume, OsStr::new(".")).map_err(failed)?;
    let made = [Ok(missing)]
        .into_iter()
        .chain(names)
        .try_fold(None::<OwnedFd>, |parent, name| {
            let parent = parent
                .as_ref()
                .or(there.deepest())
                .map_or(root.as_fd(), AsFd::as_fd);
            make_below(parent, name?, root.as_fd()).map(Some)
        });
    made.map(drop).map_err(failed)
}

/// Opens the existing directories of a path, name by name, and returns the first missing name.
fn on_the_way<'n>(
    volume: &Handle,
    names: &mut impl Iterator<Item = Result<&'n OsStr, Errno>>,
) -> Result<(OnTheWay, Option<&'n OsStr>), Errno> {
    let (mut there, mut path) = (OnTheWay::default(), PathBuf::new());
    there.push(path.clone(), open_directory(volume, OsStr::new("."))?);
    for name in names {
        let name = name?;
        let opened = there.deepest().map(|parent| open_directory(parent, name));
        match opened {
            Some(Ok(directory)) => {
                path.push(name);
                there.push(path.clone(), directory);
            }
            Some(Err(Errno::NOENT)) | None => return Ok((there, Some(name))),
            Some(Err(errno)) => return Err(errno),
        }
    }
    Ok((there, None))
}

/// Opens a directory, and creates a missing directory.
fn make_below(parent: impl AsFd, name: &OsStr, like: impl AsFd) -> Result<OwnedFd, Errno> {
    let is_new = match rustix::fs::mkdirat(&parent, name, Mode::RWXU) {
        Ok(()) => true,
        Err(Errno::EXIST) => false,
        Err(errno) => return Err(errno),
    };
    let directory = open_directory(&parent, name)?;
    if is_new {
        let like = rustix::fs::fstat(&like)?;
        let (owner, group) = (
            rustix::fs::Uid::from_raw(like.st_uid),
            rustix::fs::Gid::from_raw(like.st_gid),
        );
        rustix::fs::chownat(
            &directory,
            "",
            Some(owner),
            Some(group),
            AtFlags::EMPTY_PATH,
        )?;
        // After the owner: chown(2) takes set-group-ID away.
        rustix::fs::fchmod(&directory, Mode::from_raw_mode(like.st_mode))?;
    }
    Ok(directory)
}

/// Opens one name: neither a symlink is followed nor a mount entered, a bind of the same filesystem
/// included.
fn open_directory(parent: impl AsFd, name: &OsStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat2(parent, name, flags, Mode::empty(), ResolveFlags::NO_XDEV)
}
