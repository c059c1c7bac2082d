//! Creates a directory again that is missing in a volume which containers write.
//!
//! It follows the kubelet's code for a missing `subPath` (`doSafeMakeDir` in
//! `pkg/volume/util/subpath/subpath_linux.go`). It opens component by component from the volume's
//! root and follows no symlink. So nothing that a container puts in the way can lead out of the
//! volume. New directories get the mode and owner of the volume's root.

use std::ffi::OsStr;
use std::fs::{DirBuilder, OpenOptions, Permissions};
use std::io::{ErrorKind, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};
use std::{fs, io};

use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::handle::Handle;
use crate::target::OnTheWay;

/// Why a directory was not made.
#[derive(Debug, thiserror::Error)]
pub enum DirectoriesError {
    /// The kernel refused, or something else is in the way.
    #[error("make {} in {}", path.display(), volume.display())]
    Make {
        volume: PathBuf,
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
        volume: PathBuf,
        path: PathBuf,
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

// New folders and files, with modes that do not depend on the caller's umask.
//
// A umask of 0 would let every user write what root made, and a umask of 077 would keep users from
// programs that they run.

/// Creates a folder and the missing folders above it, each with this mode. An existing folder keeps
/// its mode.
///
/// # Errors
/// The kernel's, and `NotADirectory` if a file is in the way.
pub fn make_folders(folder: &Path, mode: u32) -> io::Result<()> {
    match DirBuilder::new().mode(mode).create(folder) {
        Ok(()) => fs::set_permissions(folder, Permissions::from_mode(mode)),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            match fs::metadata(folder)?.is_dir() {
                true => Ok(()),
                false => Err(ErrorKind::NotADirectory.into()),
            }
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {
            make_folders(folder.parent().ok_or(error)?, mode)?;
            make_folders(folder, mode)
        }
        Err(error) => Err(error),
    }
}

/// Creates a file with this content and this mode, instead of a file that a killed process left.
/// Follows no link.
///
/// # Errors
/// The kernel's.
pub fn write_new_file(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let mut create = OpenOptions::new();
    create.write(true).create_new(true).mode(0o600);
    let mut file = match create.open(path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            fs::remove_file(path)?;
            create.open(path)?
        }
        opened => opened?,
    };
    file.write_all(bytes)?;
    file.set_permissions(Permissions::from_mode(mode))
}

#[cfg(test)]
mod new_files_tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::os::unix::fs::symlink;

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn modes_are_exact_and_links_are_not_followed() {
        let place = tempfile::tempdir().unwrap();
        let (outer, inner) = (place.path().join("outer"), place.path().join("outer/inner"));
        // the usual umask takes these bits
        make_folders(&inner, 0o777).unwrap();
        assert_eq!((mode(&outer), mode(&inner)), (0o777, 0o777));
        make_folders(&inner, 0o700).unwrap();
        assert_eq!(mode(&inner), 0o777, "an existing folder keeps its mode");

        let (file, link) = (inner.join("file"), inner.join("link"));
        write_new_file(&file, b"one", 0o666).unwrap();
        assert_eq!(mode(&file), 0o666);
        symlink(&file, &link).unwrap();
        write_new_file(&link, b"two", 0o600).unwrap();
        assert!(link.symlink_metadata().unwrap().is_file());
        assert_eq!(fs::read(&file).unwrap(), b"one");
        let below_a_file = make_folders(&file.join("below"), 0o755).unwrap_err();
        assert_eq!(below_a_file.kind(), ErrorKind::NotADirectory);
    }
}
