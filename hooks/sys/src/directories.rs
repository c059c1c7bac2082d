//! Makes and removes the directories of volumes, and makes folders and files with exact modes.
//!
//! A missing directory of a volume that containers write is made as the kubelet makes a missing
//! `subPath` (`doSafeMakeDir` in `pkg/volume/util/subpath/subpath_linux.go`): component by
//! component from the volume's root, following no symlink. So nothing that a container puts in the
//! way can lead out of the volume. New directories get the mode and owner of the volume's root.
//!
//! Folders and files of bindguard get modes that do not depend on the caller's umask. A umask of 0
//! would let every user write what root made, and a umask of 077 would keep users from programs
//! that they run.

use std::ffi::OsStr;
use std::fs::{DirBuilder, OpenOptions, Permissions};
use std::io::{ErrorKind, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};
use std::{fs, io};

use bindguard_core::kubelet::TimestampDirectory;
use rustix::fs::{AtFlags, Dir, FileType, Gid, Mode, OFlags, ResolveFlags, Uid, statat};
use rustix::io::Errno;

use crate::failure::{Failure, failed};
use crate::handle::Handle;
use crate::target::current_payload;

/// Limit of names to read in the search for links; beyond it the search fails.
const NAMES: usize = 10_000;

/// Creates `path` and its missing parents below a volume's root. Existing directories stay
/// unchanged.
///
/// # Errors
/// When something else has a name of the path, a symlink may have led there, or the kernel refuses.
pub fn make_directories(volume: &Handle, path: &Path) -> Result<(), Failure> {
    make_below(volume, path).map_err(failed(format!("make {} in", path.display()), volume.path()))
}

fn make_below(volume: &Handle, path: &Path) -> io::Result<()> {
    let mut on_the_way = vec![(PathBuf::new(), open_directory(volume, OsStr::new("."))?)];
    let mut is_missing = false;
    for component in path.components() {
        let Component::Normal(name) = component else {
            return Err(Errno::INVAL.into());
        };
        let (above, parent) = &on_the_way[on_the_way.len() - 1];
        let opened = match is_missing {
            true => Err(Errno::NOENT),
            false => open_directory(parent, name),
        };
        let directory = match opened {
            Err(Errno::NOENT) => {
                if !is_missing && let Some(link) = link_beside(&on_the_way, volume.path())? {
                    return Err(io::Error::other(format!(
                        "{} is a symlink to a directory beside it, and the subPath may be that symlink",
                        link.display()
                    )));
                }
                is_missing = true;
                open_or_make(parent, name, &on_the_way[0].1)?
            }
            opened => opened?,
        };
        let path = above.join(name);
        on_the_way.push((path, directory));
    }
    Ok(())
}

/// Opens a directory, and creates a missing directory.
fn open_or_make(parent: &OwnedFd, name: &OsStr, like: &OwnedFd) -> Result<OwnedFd, Errno> {
    let is_new = match rustix::fs::mkdirat(parent, name, Mode::RWXU) {
        Ok(()) => true,
        Err(Errno::EXIST) => false,
        Err(errno) => return Err(errno),
    };
    let directory = open_directory(parent, name)?;
    if is_new {
        let like = rustix::fs::fstat(like)?;
        let owner = Some(Uid::from_raw(like.st_uid));
        let group = Some(Gid::from_raw(like.st_gid));
        rustix::fs::chownat(&directory, "", owner, group, AtFlags::EMPTY_PATH)?;
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

/// Finds a link that leads away from the existing directories on the way to a missing directory,
/// to another name in one of these directories. `volume` is the path of the volume's root.
///
/// A pod's `subPath` may be a symlink: `current`, which leads to `releases/42`. The kubelet follows
/// the link and binds `releases/42`, and the mount shows only `releases/42`. A deployment may
/// remove `releases/42`, or a folder in it, and point `current` at `releases/43`. Then a kubelet
/// would bind `releases/43`. So a missing directory is not made again if a link on the way leads to
/// a sibling of the directory or of a parent. A link that was removed, or lies elsewhere in the
/// volume, is not found.
fn link_beside(on_the_way: &[(PathBuf, OwnedFd)], volume: &Path) -> Result<Option<PathBuf>, Errno> {
    let mut names = 0;
    for (path, directory) in on_the_way {
        for entry in Dir::read_from(directory)? {
            let entry = entry?;
            names += 1;
            if names > NAMES {
                return Err(Errno::TOOBIG);
            }
            if !matches!(entry.file_type(), FileType::Symlink | FileType::Unknown) {
                continue;
            }
            let target = match rustix::fs::readlinkat(directory, entry.file_name(), Vec::new()) {
                Ok(target) => target,
                // It is no link, or went away.
                Err(Errno::INVAL | Errno::NOENT) => continue,
                Err(errno) => return Err(errno),
            };
            let target = Path::new(OsStr::from_bytes(target.as_bytes()));
            let Some(target) = within(volume, path, target) else {
                continue;
            };
            let (Some(above), Some(name)) = (target.parent(), target.file_name()) else {
                continue;
            };
            let parent = on_the_way.iter().find(|(known, _)| known == above);
            let is_on_the_way = on_the_way.iter().any(|(known, _)| *known == target);
            let Some((_, parent)) = parent.filter(|_| !is_on_the_way) else {
                continue;
            };
            // The target may be missing, as a release that is put in place later. A file is nothing
            // that a directory was bound through.
            let found = statat(parent, name, AtFlags::SYMLINK_NOFOLLOW);
            let is_file = |mode| FileType::from_raw_mode(mode) == FileType::RegularFile;
            if !found.is_ok_and(|found| is_file(found.st_mode)) {
                let link = OsStr::from_bytes(entry.file_name().to_bytes());
                return Ok(Some(path.join(link)));
            }
        }
    }
    Ok(None)
}

/// The target of a link in a directory of the volume, as a path within the volume; `None` if it is
/// outside.
fn within(volume: &Path, directory: &Path, target: &Path) -> Option<PathBuf> {
    let (mut path, target) = match target.is_absolute() {
        true => (PathBuf::new(), target.strip_prefix(volume).ok()?),
        false => (directory.to_owned(), target),
    };
    for component in target.components() {
        match component {
            Component::Normal(name) => path.push(name),
            Component::ParentDir => path.pop().then_some(())?,
            Component::CurDir => {}
            Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    Some(path)
}

/// Removes a payload that `..data` named once and names no longer. `..data` never goes back to an
/// earlier directory, so the kubelet has removed it, is removing it, or failed to. The payload that
/// `..data` names stays: a file of the payload may have been created again. Nothing is removed if
/// `..data` cannot be read.
///
/// # Errors
/// When something cannot be removed. What is gone already is no error.
pub fn remove_payload(volume: &Handle, payload: &TimestampDirectory) -> Result<(), Failure> {
    // Between attaching and detaching, a current file is the mount point of the stale mount above,
    // and unlinking a mount point fails with EBUSY. An AtomicWriter that removes its old payload in
    // that moment fails, and never tries again. So the guard that bound from a payload removes it
    // when it is no longer current, as the kubelet intended.
    if !current_payload(volume).is_ok_and(|current| current != *payload) {
        return Ok(());
    }
    let path = volume.path().join(payload.name());
    remove_tree(volume, Path::new(payload.name()))
        .map_err(failed("remove the stranded payload", &path))
}

/// As `rm -r`: removes symlinks without following them, and skips missing files.
fn remove_tree(parent: impl AsFd, name: &Path) -> Result<(), Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = match rustix::fs::openat(&parent, name, flags, Mode::empty()) {
        Ok(directory) => directory,
        Err(Errno::NOENT) => return Ok(()),
        Err(errno) => return Err(errno),
    };
    for entry in Dir::read_from(&directory)? {
        let entry = entry?;
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        let removed = match entry.file_type() {
            FileType::Directory => {
                remove_tree(&directory, Path::new(OsStr::from_bytes(name.to_bytes())))
            }
            _ => rustix::fs::unlinkat(&directory, name, AtFlags::empty()),
        };
        if removed != Err(Errno::NOENT) {
            removed?;
        }
    }
    match rustix::fs::unlinkat(&parent, name, AtFlags::REMOVEDIR) {
        Err(Errno::NOENT) => Ok(()),
        removed => removed,
    }
}

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
mod links_beside_tests {
    use super::*;

    #[test]
    fn a_link_is_followed_by_its_words() {
        let leads = |directory: &str, target: &str| {
            within("/v".as_ref(), directory.as_ref(), target.as_ref())
                .map(|path| path.display().to_string())
        };
        assert_eq!(leads("", "releases/43").as_deref(), Some("releases/43"));
        assert_eq!(
            leads("a", "../releases/./43").as_deref(),
            Some("releases/43")
        );
        assert_eq!(leads("a", "/v/releases/43").as_deref(), Some("releases/43"));
        assert_eq!((leads("", "../etc"), leads("a", "/etc")), (None, None));
    }
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
