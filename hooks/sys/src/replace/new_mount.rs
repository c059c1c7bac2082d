//! A new mount that is attached nowhere: the first step of `mount --bind`.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use bindguard_core::mount_table::{MountAttributes, MountEntry, Propagation};
use bindguard_core::spec::RequestedPropagation;
use nix::libc;
use rustix::io::Errno;
use rustix::mount::{MountPropagationFlags, OpenTreeFlags};

use crate::failure::{Failure, failed};
use crate::fault::{self, FaultPoint};
use crate::handle::{Handle, unique_mount_id};
use crate::mount_setattr::{NOTHING, adding, mount_attr, mount_setattr};
use crate::mounts::Mounts;

/// A mount that is attached nowhere.
#[derive(Debug)]
pub struct NewMount {
    pub(crate) mount: OwnedFd,
}

/// The settings of a new mount from its spec: the stale mount does not show them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CloneSettings {
    /// The mounts below the source come along, with these denials. `None` for the top mount alone.
    pub below: Option<MountAttributes>,
    /// The denials of the spec, besides those of the stale mount.
    pub denied: Option<MountAttributes>,
    /// The spec has no option for a flag: the flags of the host's mount stay. Else the runtime
    /// cleared the flags that the stale mount lacks.
    pub leaves_flags: bool,
    /// The propagation of the spec. A slave becomes private once its master is unmounted, and the
    /// container may have changed the propagation of the stale mount.
    pub requested: RequestedPropagation,
}

impl CloneSettings {
    /// True if the mounts below the source come along.
    pub fn is_recursive(&self) -> bool {
        self.below.is_some()
    }
}

/// Why there is no new mount.
#[derive(Debug, thiserror::Error)]
pub enum CloneError {
    /// The file was removed: the volume changed again.
    #[error("the current file was removed meanwhile")]
    TargetGone,
    /// The filesystem of the target cannot be idmapped, unlike that of the mount that it is to
    /// replace.
    #[error("{} is on a filesystem that cannot be idmapped", path.display())]
    NotIdmappable { path: PathBuf },
    /// The kernel refused to clone it, or to give it the attributes of the mount that it is to
    /// replace.
    #[error(transparent)]
    Failed(#[from] Failure),
}

/// A mount of `target` with the attributes of the mount that it is opened on, or those to `keep`.
///
/// # Errors
/// If the target is gone, or the kernel refuses.
pub fn clone_mount(target: &Handle, keep: Option<MountAttributes>) -> Result<NewMount, CloneError> {
    let mount = cloned(target, OpenTreeFlags::empty())?;
    fault::reach(FaultPoint::Cloned);
    if let Some(attributes) = keep {
        mount_setattr(&mount, 0, &adding(attributes)).map_err(without(attributes))?;
    }
    Ok(NewMount { mount })
}

/// A mount of `target` with the attributes and the propagation of `stale`, the ids of `users`, and
/// the settings of its spec. What the host denies by `ro` or `nosymfollow` stays denied.
///
/// # Errors
/// If the target is gone, or the kernel refuses.
pub fn clone_like(
    target: &Handle,
    stale: &MountEntry,
    users: Option<&File>,
    settings: CloneSettings,
) -> Result<NewMount, CloneError> {
    let below = match settings.is_recursive() {
        true => OpenTreeFlags::AT_RECURSIVE,
        false => OpenTreeFlags::empty(),
    };
    let mount = cloned(target, below)?;
    let kept = kept_propagation(target, stale, settings.requested);
    let first = kept.unwrap_or(MountPropagationFlags::PRIVATE);
    let propagation = u64::from(first.bits());
    let attributes = match settings.denied {
        Some(denied) => stale.attributes.with_denied_by(denied),
        None => stale.attributes,
    };
    let mut locked = mount_attr {
        propagation,
        ..adding(attributes)
    };
    let unmapped = locked;
    if let Some(users) = users {
        locked.attr_set |= libc::MOUNT_ATTR_IDMAP;
        locked.userns_fd = users.as_raw_fd() as u64;
    }
    let mut request = locked;
    if !settings.leaves_flags {
        // Never `ro`: the host may have made the new mount read-only.
        request.attr_clr |= attributes.allowed().bits();
    }
    let mut set = mount_setattr(&mount, 0, &request);
    if errno_in(&set) == Some(Errno::PERM) {
        // A flag is locked: as for a runtime, the flags of the host's mount stay.
        request = locked;
        set = mount_setattr(&mount, 0, &request);
    }
    // mount_setattr(2) has the same error for each wrong argument: without the ids the call
    // succeeds.
    let unmapped = mount_attr {
        attr_clr: request.attr_clr,
        ..unmapped
    };
    if errno_in(&set) == Some(Errno::INVAL)
        && users.is_some()
        && mount_setattr(&mount, 0, &unmapped).is_ok()
    {
        return Err(CloneError::NotIdmappable {
            path: target.path().to_owned(),
        });
    }
    set.map_err(without(attributes))?;
    if let Some(denied) = settings.below {
        let below = mount_attr {
            attr_set: denied.bits(),
            propagation,
            ..NOTHING
        };
        mount_setattr(&mount, libc::AT_RECURSIVE, &below).map_err(without(attributes))?;
    }
    if kept.is_none() {
        let shared = mount_attr {
            propagation: libc::MS_SHARED,
            ..NOTHING
        };
        mount_setattr(&mount, 0, &shared).map_err(without(attributes))?;
    }
    Ok(NewMount { mount })
}

fn errno_in(result: &io::Result<()>) -> Option<Errno> {
    result.as_ref().err().and_then(Errno::from_io_error)
}

fn without(attributes: MountAttributes) -> impl FnOnce(io::Error) -> Failure {
    let act = format!("give the new mount the attributes {attributes}");
    failed(act, Path::new(""))
}

/// The relation of a new mount to the peer group of the target; `None` for a shared mount in a new
/// peer group. A clone starts as a peer of the host's mount.
///
/// Keeps a relation between the stale mount and the host only if the runtime made that relation:
/// the spec requests it, or the stale mount is in the target's peer group. A container may have
/// made its private mount shared or slave: a new mount with the same type would connect the
/// container to the host.
fn kept_propagation(
    target: &Handle,
    stale: &MountEntry,
    requested: RequestedPropagation,
) -> Option<MountPropagationFlags> {
    use MountPropagationFlags as Flags;
    let may_be_slave = match requested {
        RequestedPropagation::RecursiveSlave => return Some(Flags::DOWNSTREAM),
        RequestedPropagation::Unbindable if stale.propagation.unbindable => {
            return Some(Flags::UNBINDABLE);
        }
        RequestedPropagation::Private | RequestedPropagation::Unbindable => {
            return Some(Flags::PRIVATE);
        }
        RequestedPropagation::Slave => true,
        RequestedPropagation::Nothing | RequestedPropagation::Shared => false,
    };
    // `None` if the host's mount is private or unknown.
    let of_target = || {
        let mount = Mounts::default().mount_of(target).ok()?;
        mount.entry.propagation.peer_group
    };
    match propagation_type(&stale.propagation) {
        Flags::SHARED if stale.propagation.peer_group == of_target() => Some(Flags::SHARED),
        Flags::SHARED => None,
        Flags::DOWNSTREAM if !may_be_slave && stale.propagation.master != of_target() => {
            Some(Flags::PRIVATE)
        }
        other => Some(other),
    }
}

impl NewMount {
    /// The id that the kernel never reuses. `None` before Linux 6.8.
    pub fn unique_id(&self) -> Option<u64> {
        unique_mount_id(&self.mount)
    }
}

/// open_tree(2)
fn cloned(target: &Handle, below: OpenTreeFlags) -> Result<OwnedFd, CloneError> {
    copy(target, below).map_err(|errno| match errno {
        Errno::NOENT => CloneError::TargetGone,
        errno => failed("clone the mount of", target.path())(errno).into(),
    })
}

/// A copy of the mount of an open file, with that file as its root.
pub(crate) fn copy_of(file: impl AsFd) -> Result<OwnedFd, Errno> {
    copy(file, OpenTreeFlags::empty())
}

/// The same with the mounts below.
pub(crate) fn tree_of(file: impl AsFd) -> Result<OwnedFd, Errno> {
    copy(file, OpenTreeFlags::AT_RECURSIVE)
}

fn copy(file: impl AsFd, below: OpenTreeFlags) -> Result<OwnedFd, Errno> {
    let flags = below
        | OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH;
    rustix::mount::open_tree(file, c"", flags)
}

/// The propagation type that mount(2) sets: mount_namespaces(7).
pub(crate) fn propagation_type(propagation: &Propagation) -> MountPropagationFlags {
    if propagation.unbindable {
        MountPropagationFlags::UNBINDABLE
    } else if propagation.peer_group.is_some() {
        MountPropagationFlags::SHARED
    } else if propagation.master.is_some() {
        MountPropagationFlags::DOWNSTREAM
    } else {
        MountPropagationFlags::PRIVATE
    }
}
