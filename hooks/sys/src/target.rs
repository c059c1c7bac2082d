//! Opens the file that a sub path leads to today, so that nothing in the volume can lead out of it.
//!
//! A payload is opened in two steps. The first reads `..data`; the second opens the path from
//! there, with no symlink allowed. AtomicWriter may swap the payload between the two; then both
//! steps are repeated. openat2(2) refuses paths that leave the directory, another mount in the way,
//! and magic links (CVE-2017-1002101 was a symlink in a volume).

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use bindguard_core::evidence::FileIdentity;
use bindguard_core::kubelet::{DATA_LINK, TimestampDirectory, VolumeLayout};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, statat};
use rustix::io::Errno;

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
    #[error("open {} in {}", path.display(), volume.display())]
    Open {
        volume: PathBuf,
        path: PathBuf,
        /// Its error: ELOOP for a symlink, EXDEV for another mount or a way out of the volume.
        #[source]
        source: io::Error,
    },
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
        VolumeLayout::Plain => Ok(OpenedTarget {
            timestamp: None,
            file: below(volume, sub_path)?,
        }),
        VolumeLayout::Payload => in_payload(volume, sub_path),
    }
}

fn in_payload(volume: &Handle, sub_path: &Path) -> Result<OpenedTarget, TargetError> {
    for _ in 0..SWAPS {
        let timestamp = current_payload(volume)?;
        // AtomicWriter makes no links within a payload, so no link below the payload's name is
        // followed.
        if let Some(file) = below(volume, &Path::new(timestamp.name()).join(sub_path))? {
            return Ok(OpenedTarget {
                timestamp: Some(timestamp),
                file: Some(file),
            });
        }
        // Not there: because the key is gone, or because the payload is just being removed?
        if current_payload(volume)? == timestamp {
            return Ok(OpenedTarget {
                timestamp: Some(timestamp),
                file: None,
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
        Err(errno) => return Err(open_error(volume, Path::new(DATA_LINK), errno)),
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
        Err(errno) => return Err(open_error(volume, path, errno)),
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
        Err(error) => {
            let (volume, path) = (volume.path().to_owned(), path.to_owned());
            Err(TargetError::Open {
                volume,
                path,
                source: error.into_io(),
            })
        }
    }
}

/// Opens `path` below a directory; nothing can lead out of it or onto another mount.
pub(crate) fn open_below(
    directory: impl AsFd,
    path: &Path,
    more: OFlags,
) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC | more;
    let beneath = ResolveFlags::BENEATH
        | ResolveFlags::NO_SYMLINKS
        | ResolveFlags::NO_MAGICLINKS
        | ResolveFlags::NO_XDEV;
    open_resolved(directory, path, flags, beneath)
}

/// openat2(2), repeated while the kernel is not sure of the result.
pub(crate) fn open_resolved(
    directory: impl AsFd,
    path: &Path,
    flags: OFlags,
    resolve: ResolveFlags,
) -> Result<OwnedFd, Errno> {
    loop {
        // EAGAIN: something was renamed somewhere during the walk, and the kernel cannot be sure of
        // the result.
        match rustix::fs::openat2(&directory, path, flags, Mode::empty(), resolve) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            other => return other,
        }
    }
}

fn open_error(volume: &Handle, path: &Path, errno: Errno) -> TargetError {
    TargetError::Open {
        volume: volume.path().to_owned(),
        path: path.to_owned(),
        source: errno.into(),
    }
}

// A payload of a kubelet-written volume, open while several names in it are looked up.

/// The payload directory that `..data` of a volume named when it was read.
#[derive(Debug)]
pub(crate) struct Payload {
    timestamp: TimestampDirectory,
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

    pub(crate) fn timestamp(&self) -> &TimestampDirectory {
        &self.timestamp
    }

    /// The identity of a key of the `volume`, read without opening it. `None` for a key that is
    /// gone or is being removed with its payload, a path of several names, a symlink, and a mount.
    pub(crate) fn key(&self, key: &Path, volume: &Handle) -> Option<FileIdentity> {
        let is_one_name = key.file_name().is_some_and(|name| name == key.as_os_str());
        is_one_name
            .then(|| volume.identity_on_same_mount(&self.directory, key))
            .flatten()
    }
}

// Symlinks that may have led to a directory which is gone.
//
// A pod's `subPath` may be a symlink: `current`, which leads to `releases/42`. The kubelet follows
// the link and binds `releases/42`, and the mount shows only `releases/42`. A deployment may
// remove `releases/42`, or a folder in it, and point `current` at `releases/43`. Then a kubelet
// would bind `releases/43`. So a missing directory is not made again if a link on the way leads to
// a sibling of the directory or of a parent.
//
// A link that was removed, or lies elsewhere in the volume, is not found.

/// Limit of names to read; beyond it the search fails.
const NAMES: usize = 10_000;

/// The existing directories on the way to a missing directory, with their paths within the volume.
#[derive(Debug, Default)]
pub(crate) struct OnTheWay(Vec<(PathBuf, OwnedFd)>);

impl OnTheWay {
    /// Adds a directory below the deepest directory.
    pub(crate) fn push(&mut self, path: PathBuf, directory: OwnedFd) {
        self.0.push((path, directory));
    }

    /// The directory that was added last.
    pub(crate) fn deepest(&self) -> Option<&OwnedFd> {
        self.0.last().map(|(_, directory)| directory)
    }

    /// Finds a link that leads away from the path, to another name in a directory on the way.
    /// `volume` is the path of the volume's root.
    ///
    /// # Errors
    /// getdents(2)'s and readlink(2)'s; `E2BIG` when there are too many names to read.
    pub(crate) fn link_beside(&self, volume: &Path) -> Result<Option<PathBuf>, Errno> {
        let mut names = 0;
        for (path, directory) in &self.0 {
            for entry in Dir::read_from(directory)? {
                let entry = entry?;
                names += 1;
                if names > NAMES {
                    return Err(Errno::TOOBIG);
                }
                if !matches!(entry.file_type(), FileType::Symlink | FileType::Unknown) {
                    continue;
                }
                let target = match rustix::fs::readlinkat(directory, entry.file_name(), Vec::new())
                {
                    Ok(target) => target,
                    // It is no link, or went away.
                    Err(Errno::INVAL | Errno::NOENT) => continue,
                    Err(errno) => return Err(errno),
                };
                let target = Path::new(OsStr::from_bytes(target.as_bytes()));
                if within(volume, path, target).is_some_and(|target| self.are_left_for(&target)) {
                    return Ok(Some(
                        path.join(OsStr::from_bytes(entry.file_name().to_bytes())),
                    ));
                }
            }
        }
        Ok(None)
    }

    /// True if `target` is an entry directly below a watched directory. The entry may be missing,
    /// as a release that is put in place later. A file is nothing that a directory was bound
    /// through.
    fn are_left_for(&self, target: &Path) -> bool {
        let held = |path: &Path| {
            self.0
                .iter()
                .find(|(known, _)| known == path)
                .map(|(_, directory)| directory)
        };
        let Some((parent, name)) = target.parent().and_then(held).zip(target.file_name()) else {
            return false;
        };
        let kind = || {
            Some(FileType::from_raw_mode(
                statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)
                    .ok()?
                    .st_mode,
            ))
        };
        held(target).is_none() && kind() != Some(FileType::RegularFile)
    }
}

/// The target of a link in a directory of the volume, as a path within the volume; `None` if it is
/// outside.
fn within(volume: &Path, directory: &Path, target: &Path) -> Option<PathBuf> {
    let (mut path, target) = match target.strip_prefix(volume) {
        Ok(below) if target.is_absolute() => (PathBuf::new(), below),
        _ if target.is_absolute() => return None,
        _ => (directory.to_owned(), target),
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
