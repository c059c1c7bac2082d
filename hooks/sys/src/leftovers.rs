//! Removes the leftovers of an ended pod: a mount by a plain umount(2), and empty directories by
//! rmdir(2).
//!
//! A plain umount fails with EBUSY while a process uses the mount, so nothing in use is lost. A
//! umount may wait for a silent server, so a separate process calls umount(2). The walk over the
//! directories never enters a mount and never follows a symlink. It removes no file, as the kubelet
//! (`RemoveDirsOneFilesystem` in `pkg/util/removeall/removeall.go`).

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bindguard_core::mount_table::MountId;
use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags, StatxFlags};
use rustix::io::Errno;

use crate::directories::open_directory;
use crate::hanging_probes::answer_within;

pub use rustix::mount::UnmountFlags;

/// A container may nest directories without end, and each level needs a descriptor.
const MAX_DEPTH: usize = 64;

/// The number of files that are named.
const MAX_NAMED_FILES: usize = 8;

/// Why a mount was not unmounted.
#[derive(Debug, thiserror::Error)]
pub enum UnmountError {
    /// A process uses it.
    #[error("a process uses the mount (EBUSY)")]
    Busy,
    /// The mount point shows a different mount, or is no longer a mount point.
    #[error("another mount is there now")]
    Changed,
    /// A server did not answer.
    #[error("umount(2) did not return in time")]
    Silent,
    /// The kernel's error.
    #[error(transparent)]
    Failed(#[from] io::Error),
}

/// Unmounts the mount with this id within a time limit. `mount_point` is the kernel's name of its
/// place: no symlink is followed. `how`: empty, so that a mount in use stays; or `DETACH`, so that
/// the mount goes with all mounts on it, and programs that use the mount keep it.
///
/// # Errors
/// If the mount is in use, is not there any more, or does not answer.
pub fn unmount_within(
    limit: Duration,
    mount_point: &Path,
    id: MountId,
    how: UnmountFlags,
) -> Result<(), UnmountError> {
    let unmounted = answer_within(limit, mount_point, || {
        unmount(mount_point, id, UnmountFlags::NOFOLLOW | how)?;
        Ok(Vec::new())
    });
    let Err(error) = unmounted else { return Ok(()) };
    Err(match Errno::from_io_error(&error) {
        Some(Errno::BUSY) => UnmountError::Busy,
        Some(Errno::STALE | Errno::NOENT) => UnmountError::Changed,
        None if error.kind() == io::ErrorKind::TimedOut => UnmountError::Silent,
        _ => UnmountError::Failed(error),
    })
}

/// An open descriptor of the mount would make the mount busy. So the process goes into the
/// directory above, and names the mount point by its last component. `ESTALE`: the mount's id
/// differs.
fn unmount(mount_point: &Path, id: MountId, how: UnmountFlags) -> Result<(), Errno> {
    let (Some(above), Some(name)) = (mount_point.parent(), mount_point.file_name()) else {
        return Err(Errno::INVAL);
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let above = rustix::fs::openat2(CWD, above, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)?;
    let at = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT | AtFlags::STATX_DONT_SYNC;
    let found = rustix::fs::statx(&above, name, at, StatxFlags::MNT_ID)?;
    if found.stx_mnt_id != u64::from(id.0) {
        return Err(Errno::STALE);
    }
    rustix::process::fchdir(&above)?;
    let unmounted = rustix::mount::unmount(name, how);
    // An exiting process closes its pipe before it leaves its directory, whose mount may be the next
    // one to unmount.
    rustix::process::chdir("/")?;
    unmounted
}

/// The empty directories below a folder.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct EmptyDirectories {
    /// Directories without a file below them, the deepest first.
    pub empty: Vec<PathBuf>,
    /// The first files, symlinks and other objects that keep a directory.
    pub files: Vec<PathBuf>,
    /// The number of these files.
    pub file_count: usize,
    /// Errors of reading and removing.
    pub problems: Vec<String>,
}

/// Finds the empty directories of `folder`, itself included, and removes them if `remove` is true.
/// Mounts are not entered.
pub fn empty_directories(folder: &Path, remove: bool) -> EmptyDirectories {
    let mut found = EmptyDirectories::default();
    let (Some(above), Some(name)) = (folder.parent(), folder.file_name()) else {
        return found;
    };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    match rustix::fs::openat2(CWD, above, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS) {
        Ok(above) => {
            let mut walk = Walk {
                remove,
                found: &mut found,
            };
            walk.is_removed(&above, name, folder, 0);
        }
        Err(errno) => found.problems.push(format!(
            "open {}: {}",
            above.display(),
            io::Error::from(errno)
        )),
    }
    found
}

struct Walk<'f> {
    remove: bool,
    found: &'f mut EmptyDirectories,
}

impl Walk<'_> {
    /// True if the directory is removed, or would be.
    fn is_removed(&mut self, above: impl AsFd, name: &OsStr, path: &Path, depth: usize) -> bool {
        let children = match open_directory(&above, name)
            .and_then(|open| children(&open).map(|names| (open, names)))
        {
            Ok(children) => children,
            Err(Errno::NOENT) => return true,
            Err(Errno::XDEV) => return false,
            Err(errno) => {
                self.problem("read", path, errno);
                return false;
            }
        };
        let (open, names) = children;
        let mut is_empty = true;
        for (child, is_directory) in names {
            let path = path.join(&child);
            if is_directory && depth < MAX_DEPTH {
                is_empty &= self.is_removed(&open, &child, &path, depth + 1);
            } else {
                is_empty = false;
                self.file(path);
            }
        }
        drop(open);
        is_empty && self.remove(above, name, path)
    }

    fn remove(&mut self, above: impl AsFd, name: &OsStr, path: &Path) -> bool {
        if self.remove {
            match rustix::fs::unlinkat(above, name, AtFlags::REMOVEDIR) {
                Ok(()) => {}
                Err(Errno::NOENT) => return true,
                Err(errno) => {
                    self.problem("remove", path, errno);
                    return false;
                }
            }
        }
        self.found.empty.push(path.to_owned());
        true
    }

    fn file(&mut self, path: PathBuf) {
        self.found.file_count += 1;
        if self.found.files.len() < MAX_NAMED_FILES {
            self.found.files.push(path);
        }
    }

    fn problem(&mut self, what: &str, path: &Path, errno: Errno) {
        let error = io::Error::from(errno);
        self.found
            .problems
            .push(format!("{what} {}: {error}", path.display()));
    }
}

fn children(directory: &OwnedFd) -> Result<Vec<(OsString, bool)>, Errno> {
    let mut children = Vec::new();
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        let name = OsStr::from_bytes(entry.file_name().to_bytes());
        if name == "." || name == ".." {
            continue;
        }
        let kind = match entry.file_type() {
            // Filesystems without types in their directories.
            FileType::Unknown => {
                let found = rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)?;
                FileType::from_raw_mode(found.st_mode)
            }
            kind => kind,
        };
        children.push((name.to_owned(), kind == FileType::Directory));
    }
    Ok(children)
}
