//! The file that a sub path of a volume leads to today: opened, made, or removed with its payload.
//! Nothing in the volume can lead out of it.
//!
//! A payload is opened in two steps. The first reads `..data`; the second opens the path from
//! there, with no symlink allowed. AtomicWriter may swap the payload between the two; then both
//! steps are repeated. openat2(2) refuses paths that leave the directory, another mount in the way,
//! and magic links (CVE-2017-1002101 was a symlink in a volume).
//!
//! A missing directory of a volume that containers write is made as the kubelet makes a missing
//! `subPath` (`doSafeMakeDir` in `pkg/volume/util/subpath/subpath_linux.go`): component by
//! component from the volume's root. New directories get the mode and owner of the volume's root.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use bindguard_core::evidence::FileIdentity;
use bindguard_core::kubelet::{DATA_LINK, TimestampDirectory, VolumeLayout};
use rustix::fs::{AtFlags, Dir, FileType, Gid, Mode, OFlags, ResolveFlags, Uid, statat};
use rustix::io::Errno;

use crate::handle::Handle;
use crate::{Failure, failed};

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
    if layout == VolumeLayout::Plain {
        return Ok(OpenedTarget {
            timestamp: None,
            file: below(volume, sub_path)?,
        });
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
    let name = if path.as_os_str().is_empty() {
        Path::new(".")
    } else {
        path
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

fn open_error<E: Into<io::Error>>(volume: &Handle, path: &Path) -> impl FnOnce(E) -> TargetError {
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
        let opened = if is_missing {
            Err(Errno::NOENT)
        } else {
            open_directory(parent, name)
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
    let (mut path, target) = if target.is_absolute() {
        (PathBuf::new(), target.strip_prefix(volume).ok()?)
    } else {
        (directory.to_owned(), target)
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
    // that moment fails, and never tries again. So a guard removes the payload from which it bound,
    // once the payload is no longer current, as the kubelet intended.
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
