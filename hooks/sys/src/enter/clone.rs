//! A new mount, attached nowhere, that is like another mount in everything but its root.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use bindguard_core::mount_table::MountEntry;
use rustix::mount::OpenTreeFlags;

use super::job::type_of;
use super::process::HeldProcess;
use crate::handle::Handle;
use crate::mount_setattr::mount_setattr_in_full;

/// Why there is no new mount.
#[derive(Debug, thiserror::Error)]
pub enum CloneError {
    /// The file was removed: the volume changed again.
    #[error("the current file was removed meanwhile")]
    TargetGone,
    /// The kernel refused to clone it.
    #[error("clone the mount of {}", path.display())]
    Clone {
        /// The file.
        path: std::path::PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// It cannot get the attributes of the mount that it is to replace.
    #[error("give the new mount the attributes {attributes:?}")]
    Attributes {
        /// The attributes of the stale mount, as mountinfo has them.
        attributes: std::ffi::OsString,
        /// The error.
        #[source]
        source: io::Error,
    },
}

/// A mount of `target` with the attributes, the propagation and the idmapping of `stale`, a mount of the process's namespace.
///
/// # Errors
/// If the target is gone, or the kernel refuses.
pub fn clone_like(target: &Handle, stale: &MountEntry, process: &HeldProcess) -> Result<OwnedFd, CloneError> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    let new = rustix::mount::open_tree(target, c"", flags).map_err(|errno| match errno {
        rustix::io::Errno::NOENT => CloneError::TargetGone,
        errno => CloneError::Clone { path: target.path().to_owned(), source: errno.into() },
    })?;
    let failed = |source| CloneError::Attributes { attributes: stale.options.clone(), source };
    let namespace = match stale.attributes.is_idmapped() {
        true => Some(process.user_namespace().map_err(|error| failed(io::Error::other(error)))?),
        false => None,
    };
    let propagation = u64::from(type_of(&stale.propagation).bits());
    let idmap = namespace.as_ref().map(AsFd::as_fd);
    mount_setattr_in_full(&new, stale.attributes, propagation, idmap).map_err(failed)?;
    Ok(new)
}
