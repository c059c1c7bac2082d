//! Payload directories that the kubelet could not remove because of a swap.
//!
//! Between attaching and detaching, a current file is the mount point of the stale mount above, and
//! unlinking a mount point fails with EBUSY. An AtomicWriter that removes its old payload in that
//! moment fails, and never tries again. So the guard that bound from a payload removes it when it
//! is no longer current, as the kubelet intended.

use std::ffi::OsStr;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use bindguard_core::kubelet::TimestampDirectory;
use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;

use crate::handle::Handle;
use crate::target::current_payload;

/// Why a stranded payload is still there.
#[derive(Debug, thiserror::Error)]
#[error("remove the stranded payload {}", path.display())]
pub struct StrandedError {
    pub path: PathBuf,
    #[source]
    pub source: io::Error,
}

/// Removes a payload that `..data` named once and names no longer. `..data` never goes back to an
/// earlier directory, so the kubelet has removed it, is removing it, or failed to. The payload that
/// `..data` names stays: a file of the payload may have been created again. Nothing is removed if
/// `..data` cannot be read.
///
/// # Errors
/// When something cannot be removed. What is gone already is no error.
pub fn remove_payload(volume: &Handle, payload: &TimestampDirectory) -> Result<(), StrandedError> {
    if !current_payload(volume).is_ok_and(|current| current != *payload) {
        return Ok(());
    }
    remove_tree(volume, Path::new(payload.name())).map_err(|errno| StrandedError {
        path: volume.path().join(payload.name()),
        source: errno.into(),
    })
}

/// As `rm -r`: removes symlinks without following them, and skips missing files.
fn remove_tree(parent: impl AsFd, name: &Path) -> Result<(), Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = match rustix::fs::openat(&parent, name, flags, Mode::empty()) {
        Ok(directory) => directory,
        Err(Errno::NOENT) => return Ok(()),
        Err(errno) => return Err(errno),
    };
    for entry in rustix::fs::Dir::read_from(&directory)? {
        let entry = entry?;
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        if entry.file_type() == FileType::Directory {
            remove_tree(&directory, Path::new(OsStr::from_bytes(name.to_bytes())))?;
        } else {
            gone(rustix::fs::unlinkat(&directory, name, AtFlags::empty()))?;
        }
    }
    gone(rustix::fs::unlinkat(&parent, name, AtFlags::REMOVEDIR))
}

fn gone(removed: Result<(), Errno>) -> Result<(), Errno> {
    match removed {
        Err(Errno::NOENT) => Ok(()),
        other => other,
    }
}
