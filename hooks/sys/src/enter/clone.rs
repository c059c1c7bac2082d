//! A new mount, attached nowhere, that is like another mount in everything but its root.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use bindguard_core::mount_table::{MountAttributes, MountEntry, Propagation};
use rustix::io::Errno;
use rustix::mount::{MountPropagationFlags, OpenTreeFlags};

use crate::handle::Handle;
use crate::mount_setattr::{mount_setattr_in_full, set_propagation_recursively};

/// A mount that is attached nowhere.
#[derive(Debug)]
pub struct NewMount(pub(super) OwnedFd);

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

/// A mount of `target` with the attributes and the propagation of `stale`, and the ids of `users`.
/// With the mounts below `target` if it is recursive; they get the propagation only.
///
/// # Errors
/// If the target is gone, or the kernel refuses.
pub fn clone_like(
    target: &Handle,
    stale: &MountEntry,
    users: Option<&File>,
    is_recursive: bool,
) -> Result<NewMount, CloneError> {
    let mut flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH;
    flags.set(OpenTreeFlags::AT_RECURSIVE, is_recursive);
    let new = rustix::mount::open_tree(target, c"", flags).map_err(|errno| match errno {
        Errno::NOENT => CloneError::TargetGone,
        errno => CloneError::Clone {
            path: target.path().to_owned(),
            source: errno.into(),
        },
    })?;
    let propagation = u64::from(type_of(&stale.propagation).bits());
    let users = users.map(AsFd::as_fd);
    let set = mount_setattr_in_full(&new, stale.attributes, propagation, users).and_then(|()| {
        match is_recursive {
            true => set_propagation_recursively(&new, propagation),
            false => Ok(()),
        }
    });
    match set {
        Ok(()) => Ok(NewMount(new)),
        Err(source) => Err(CloneError::Attributes {
            attributes: stale.attributes,
            source,
        }),
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
