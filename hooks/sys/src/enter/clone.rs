//! A new mount, attached nowhere, that is like another mount in everything but its root.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bindguard_core::mount_table::{MountAttributes, MountEntry, Propagation};
use rustix::io::Errno;
use rustix::mount::{MountFlags, MountPropagationFlags, OpenTreeFlags};

use super::namespace::ContainerNamespace;
use crate::fault;
use crate::handle::Handle;
use crate::mount_setattr::mount_setattr_in_full;
use crate::swap::remount_flags;

/// A mount that is attached nowhere.
#[derive(Debug)]
pub struct NewMount {
    pub(super) mount: OwnedFd,
    /// The attributes that it has yet to get by a remount: Linux 5.10 and 5.11 give them only to an
    /// attached mount.
    pub(super) lacks: Option<MountFlags>,
}

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
    #[error("give the new mount the attributes {attributes}")]
    Attributes {
        /// The attributes of the stale mount.
        attributes: MountAttributes,
        /// The error.
        #[source]
        source: io::Error,
    },
}

/// A mount of `target` with the attributes and the propagation of `stale`, a mount of this
/// namespace, and the ids of `users`.
///
/// # Errors
/// If the target is gone, or the kernel refuses.
pub fn clone_like(
    target: &Handle,
    stale: &MountEntry,
    namespace: &ContainerNamespace,
    users: Option<&File>,
) -> Result<NewMount, CloneError> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH;
    let new = rustix::mount::open_tree(target, c"", flags).map_err(|errno| match errno {
        Errno::NOENT => CloneError::TargetGone,
        errno => CloneError::Clone {
            path: target.path().to_owned(),
            source: errno.into(),
        },
    })?;
    let failed = |source| CloneError::Attributes {
        attributes: stale.attributes,
        source,
    };
    let propagation = u64::from(type_of(&stale.propagation).bits());
    match set_attributes(&new, stale, propagation, users.map(AsFd::as_fd)) {
        Ok(()) => Ok(NewMount {
            mount: new,
            lacks: None,
        }),
        Err(error) if can_remount(&error, stale, namespace) => Ok(NewMount {
            mount: new,
            lacks: Some(remount_flags(stale.attributes)),
        }),
        Err(error) => Err(failed(error)),
    }
}

/// The propagation type that mount(2) sets: mount_namespaces(7).
pub(super) fn type_of(propagation: &Propagation) -> MountPropagationFlags {
    match propagation {
        Propagation {
            unbindable: true, ..
        } => MountPropagationFlags::UNBINDABLE,
        Propagation {
            peer_group: Some(_),
            ..
        } => MountPropagationFlags::SHARED,
        Propagation {
            master: Some(_), ..
        } => MountPropagationFlags::DOWNSTREAM,
        _ => MountPropagationFlags::PRIVATE,
    }
}

fn set_attributes(
    new: &OwnedFd,
    stale: &MountEntry,
    propagation: u64,
    idmap: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    if fault::denies_setattr() {
        return Err(Errno::NOSYS.into());
    }
    mount_setattr_in_full(new, stale.attributes, propagation, idmap)
}

/// Without mount_setattr(2) the mount can get its attributes in a helper namespace. A mount that
/// arrives from there in another user namespace is locked, and the stale one on it cannot be
/// detached.
fn can_remount(error: &io::Error, stale: &MountEntry, namespace: &ContainerNamespace) -> bool {
    let is_missing = Errno::from_io_error(error) == Some(Errno::NOSYS);
    is_missing && !stale.attributes.is_idmapped() && !namespace.has_own_users()
}
