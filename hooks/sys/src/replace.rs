//! Replaces a stale mount by a current mount, so that no process sees the file underneath in
//! between.
//!
//! ```text
//!   stale                stale                 
//!   underneath   ──►     new          ──►    new
//!                        underneath          underneath
//!            attach below            detach the top
//! ```
//!
//! Stacking on top does not work: the kernel refuses to mount on a deleted file (ENOENT).
//! Unmounting first does not work either: a process that opens the path in between gets the empty
//! file that the kubelet made as a mount point.
//!
//! The same engine serves the host and containers: [`crate::enter`] makes the same calls from a
//! child in a container's mount namespace.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use bindguard_core::mount_table::{MountAttributes, MountEntry, MountId, Propagation};
use bindguard_core::spec::RequestedPropagation;
use nix::libc;
use nix::sched::{CloneFlags, unshare};
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, StatxFlags};
use rustix::io::Errno;
use rustix::mount::{MountPropagationFlags, MoveMountFlags, OpenTreeFlags};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde::{Deserialize, Serialize};

use crate::handle::{Handle, open_name, statx_of_name, unique_mount_id};
use crate::kernel::{NOTHING, adding, mount_attr, mount_setattr};
use crate::mounts::Mounts;
use crate::own_process::FaultPoint;
use crate::own_process::in_thread;
use crate::probe::answer_within;
use crate::{Failure, errno_of, failed};

pub use rustix::mount::UnmountFlags;

// A new mount that is attached nowhere: the first step of `mount --bind`.

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
    pub denied: MountAttributes,
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
    let mount = cloned(target, false)?;
    FaultPoint::Cloned.reach();
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
    let mount = cloned(target, settings.is_recursive())?;
    let kept = kept_propagation(target, stale, settings.requested);
    let first = kept.unwrap_or(MountPropagationFlags::PRIVATE);
    let propagation = u64::from(first.bits());
    let attributes = stale.attributes.with_denied_by(settings.denied);
    let mut locked = mount_attr {
        propagation,
        ..adding(attributes)
    };
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
    if set == Err(Errno::PERM) {
        // A flag is locked: as for a runtime, the flags of the host's mount stay.
        request = locked;
        set = mount_setattr(&mount, 0, &request);
    }
    if set == Err(Errno::INVAL) && users.is_some() {
        // mount_setattr(2) has the same error for each wrong argument: without the ids the call
        // succeeds.
        let unmapped = mount_attr {
            attr_set: request.attr_set & !libc::MOUNT_ATTR_IDMAP,
            userns_fd: 0,
            ..request
        };
        if mount_setattr(&mount, 0, &unmapped).is_ok() {
            return Err(CloneError::NotIdmappable {
                path: target.path().to_owned(),
            });
        }
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

fn without(attributes: MountAttributes) -> impl FnOnce(Errno) -> Failure {
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

fn cloned(target: &Handle, below: bool) -> Result<OwnedFd, CloneError> {
    copy_of(target, below).map_err(|errno| match errno {
        Errno::NOENT => CloneError::TargetGone,
        errno => failed("clone the mount of", target.path())(errno).into(),
    })
}

/// A copy of the mount of an open file, with that file as its root: open_tree(2). `below`: the
/// mounts below come along.
pub(crate) fn copy_of(file: impl AsFd, below: bool) -> Result<OwnedFd, Errno> {
    let mut flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH;
    flags.set(OpenTreeFlags::AT_RECURSIVE, below);
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

// `MOVE_MOUNT_BENEATH`, Linux 6.5 and newer: the kernel's own way, see move_mount(2).

/// Attaches a new mount directly below `stale`, the mount on top.
///
/// Until `stale` is detached, the new file is its mount point, and every unlink of it fails with
/// EBUSY. Detach at once.
///
/// # Errors
/// [`ReplaceError::is_target_gone`] when the file was removed meanwhile,
/// [`ReplaceError::is_not_possible`] on older kernels.
pub fn attach_beneath(new: &NewMount, stale: impl AsFd) -> Result<(), ReplaceError> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH
        | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH
        | MoveMountFlags::MOVE_MOUNT_BENEATH;
    rustix::mount::move_mount(&new.mount, c"", stale, c"", flags).map_err(at(Step::AttachBeneath))
}

// Detaches a mount by an open descriptor.

/// Detaches the very mount that `mount` was opened on, at any position in a stack. `MNT_DETACH` of
/// umount2(2) keeps the mount for processes with open files; a plain umount of a stale mount in use
/// is EBUSY.
///
/// # Errors
/// The kernel's errors, except for a mount that is already detached.
pub fn detach(mount: &Handle) -> Result<(), ReplaceError> {
    detach_link(&mount.magic_path())
}

/// Detaches exactly the mount to which the link of a descriptor in `/proc` leads.
pub(crate) fn detach_link(link: &Path) -> Result<(), ReplaceError> {
    match rustix::mount::unmount(link, UnmountFlags::DETACH) {
        // EINVAL: the kubelet removed the file beneath, and the kernel detached the mount for that.
        Ok(()) | Err(Errno::INVAL) => Ok(()),
        Err(errno) => Err(ReplaceError::Failed(Step::Detach, errno)),
    }
}

// The steps of a replacement, and their errors, as they are passed from the child in a container.

/// A step of a replacement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[cfg_attr(test, derive(strum::VariantArray))]
pub enum Step {
    #[error("opening /proc/self/fd")]
    OpenProc,
    /// `setns(2)`
    #[error("entering the container's mount namespace")]
    Enter,
    /// `openat2(2)` of the mount point.
    #[error("opening the mount point")]
    OpenMountPoint,
    /// `statx(2)` of the stale mount and of the new mount.
    #[error("comparing the types of the old and the current file")]
    CompareTypes,
    /// `openat2(2)` of the parent folder.
    #[error("opening the folder of the mount point")]
    OpenFolder,
    /// `openat2(2)` of the mount that the folder is on.
    #[error("opening the parent mount")]
    OpenParent,
    /// `move_mount(2)` with `MOVE_MOUNT_BENEATH`.
    #[error("attaching the new mount beneath the stale one")]
    AttachBeneath,
    /// The container's parent mount becomes shared for a moment.
    #[error("making the parent mount shared")]
    ShareParent,
    /// `open_tree(2)` of the folder.
    #[error("copying the parent mount")]
    CopyFolder,
    /// `unshare(2)`
    #[error("making a mount namespace for the copy")]
    Unshare,
    /// The mounts of that namespace become private.
    #[error("making the mounts of that namespace private")]
    MakePrivate,
    /// The copy is attached in that namespace.
    #[error("attaching the copy of the parent mount")]
    AttachCopy,
    /// `mount_setattr(2)` of a mount in a tree.
    #[error("giving the new mount its attributes")]
    SetAttributes,
    /// The new mount is attached in the copy, and propagates.
    #[error("attaching the new mount to the copy")]
    AttachNew,
    /// The mounts in the copy are compared with those before.
    #[error("comparing the mounts of the copy")]
    CompareCopy,
    /// `setns(2)` back into the container.
    #[error("returning to the container's mount namespace")]
    Return,
    /// The parent's propagation is set as it was.
    #[error("restoring the propagation of the parent mount")]
    RestoreParent,
    /// The stale mount and the mounts below leave their peer groups.
    #[error("making the stale mounts private")]
    MakeStalePrivate,
    /// A tree of new mounts is attached in a mount namespace of its own.
    #[error("attaching the new mounts in a namespace of their own")]
    AttachTree,
    /// `move_mount(2)` in that tree.
    #[error("attaching the nested mount")]
    AttachNested,
    /// `open_tree(2)` of that tree.
    #[error("copying the new mounts")]
    CopyTree,
    /// `umount2(2)` of a name.
    #[error("unmounting the mount")]
    Unmount,
    /// `umount2(2)` with `MNT_DETACH`.
    #[error("detaching the stale mount")]
    Detach,
    /// The new mount's propagation is set.
    #[error("setting the propagation of the new mount")]
    SetPropagation,
    /// The folder of the mount point is copied, writable.
    #[error("copying the folder of the mount point")]
    CopyForTouch,
    /// `utimensat(2)` of the file beneath the mount.
    #[error("touching the file beneath the mount")]
    Touch,
}

/// Why a mount was not attached or detached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum ReplaceError {
    /// Another repairer of the same mount attached a mount at the same moment.
    #[error("another repairer attached a mount at the same time")]
    Overtaken,
    /// The mount point does not show the mount of the mount table.
    #[error("another mount has its place in the container")]
    OtherMount,
    /// The type of the current file differs from the old file's.
    #[error("the current file has another type than the old one")]
    OtherType,
    #[error("{0}")]
    Failed(
        Step,
        #[source]
        #[serde(with = "errno")]
        Errno,
    ),
}

/// An error number as serde passes it.
mod errno {
    use rustix::io::Errno;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(errno: &Errno, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_i32(errno.raw_os_error())
    }

    pub(super) fn deserialize<'d, D: Deserializer<'d>>(from: D) -> Result<Errno, D::Error> {
        i32::deserialize(from).map(Errno::from_raw_os_error)
    }
}

impl ReplaceError {
    /// The error of a kernel without `MOVE_MOUNT_BENEATH`.
    pub const NO_BENEATH: Self = Self::Failed(Step::AttachBeneath, Errno::INVAL);

    /// True if the kernel, or this mount, does not allow the step.
    pub fn is_not_possible(self) -> bool {
        let Self::Failed(_, errno) = self else {
            return false;
        };
        matches!(
            errno,
            Errno::INVAL | Errno::NOSYS | Errno::PERM | Errno::OPNOTSUPP
        )
    }

    /// True if the new file was removed before it was attached: the volume changed again.
    pub fn is_target_gone(self) -> bool {
        matches!(
            self,
            Self::Failed(Step::AttachBeneath | Step::AttachNew, Errno::NOENT)
        )
    }
}

pub(crate) fn at(step: Step) -> impl Fn(Errno) -> ReplaceError {
    move |errno| ReplaceError::Failed(step, errno)
}

/// A unique id that is greater than the id of every mount of this moment, and less than the id of
/// every later mount. `None` before Linux 6.8, and without the right to mount.
pub fn next_mount_id() -> Option<u64> {
    // A new mount that is attached nowhere.
    let proc = Handle::of("/proc".as_ref()).ok()?;
    let copy = Handle::from_fd(copy_of(&proc, false).ok()?, "/proc".into());
    copy.unique_mount_id()
}

// The way for kernels before 6.5: let propagation put the new mount below the stale mount.
//
// A mount that propagates to an occupied mount point goes *below* the mount there
// (`attach_recursive_mnt` in the kernel's `fs/namespace.c`). So the new mount is attached to a
// copy of the parent mount in which the place is free. The copy is a peer of the parent only if
// the parent is shared. With a private parent nothing arrives, and the caller must check before it
// detaches anything.
//
// The copy lives in a mount namespace of its own, which takes the copy along when it ends: that
// umount does not propagate. On the host a thread has that namespace.
//
// As a peer, the copy also receives the mount of another repairer. A new mount on top would
// propagate into the volume, because both mounts show the volume's file. Then the new mount is
// detached at once, with its propagated copies. In a container a lock keeps other repairers away.

/// A copy of the mount of a folder: a peer, if that mount is shared.
#[derive(Debug)]
pub(crate) struct FolderCopy(OwnedFd);

impl FolderCopy {
    /// A copy that is attached nowhere.
    pub(crate) fn of(folder: impl AsFd) -> Result<Self, ReplaceError> {
        copy_of(folder, false)
            .map(Self)
            .map_err(at(Step::CopyFolder))
    }

    /// Attaches it in the private mount namespace of the calling thread.
    pub(crate) fn attach(&self) -> Result<(), ReplaceError> {
        attach_as_root(&self.0).map_err(at(Step::AttachCopy))
    }

    /// Attaches a new mount at a name in the folder, from where it propagates.
    pub(crate) fn attach_new(&self, new: &NewMount, name: &OsStr) -> Result<(), ReplaceError> {
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
        rustix::mount::move_mount(&new.mount, c"", &self.0, name, flags)
            .map_err(at(Step::AttachNew))
    }

    /// Attaches by the ordinary move_mount(2): sound only if the place has no mount before and
    /// during the call.
    fn attach_directly(&self, new: &NewMount, name: &OsStr) -> Result<(), ReplaceError> {
        let copy = self.mount_of(OsStr::new("."))?.1;
        if self.mount_of(name)?.1 != copy {
            return Err(ReplaceError::Overtaken);
        }
        self.attach_new(new, name)?;
        let (attached, _) = self.mount_of(name)?;
        let parent = Mounts::from_mountinfo()
            .mount_of(&attached)
            .ok()
            .and_then(|mount| mount.parent);
        if parent.is_some_and(|parent| parent.id == copy) {
            return Ok(());
        }
        detach(&attached)?;
        Err(ReplaceError::Overtaken)
    }

    /// The top of the mounts at a name in the folder.
    fn mount_of(&self, name: &OsStr) -> Result<(Handle, MountId), ReplaceError> {
        let opened = open_name(&self.0, name, OFlags::empty()).map_err(at(Step::AttachNew))?;
        let handle = Handle::from_fd(opened, PathBuf::from(name));
        let id = handle
            .mount_id()
            .map_err(|error| at(Step::CompareCopy)(errno_of(&error.source)))?;
        Ok((handle, id))
    }
}

/// Attaches a new mount of the host so that it arrives below the mount at `name`. `folder` is the
/// folder of that mount point, on the stale mount's parent.
///
/// The call can succeed although the mount did not arrive: check the table.
///
/// # Errors
/// When the namespace or the copy cannot be made, or another repairer is at work.
pub fn attach_tucked(new: &NewMount, folder: &Handle, name: &OsStr) -> Result<(), ReplaceError> {
    let copy = FolderCopy::of(folder)?;
    in_thread("tuck", || {
        enter_private_mounts()?;
        FaultPoint::NamespaceUnshared.reach();
        copy.attach()?;
        FaultPoint::CopyAttached.reach();
        copy.attach_directly(new, name)?;
        FaultPoint::Tucked.reach();
        Ok(())
    })
    .map_err(|error| at(Step::Unshare)(errno_of(&error)))?
}

/// Attaches a mount in the private mount namespace of the calling thread, without a walk along a
/// path.
pub(crate) fn attach_as_root(mount: &OwnedFd) -> Result<(), Errno> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    rustix::mount::move_mount(mount, c"", CWD, c"/", flags)
}

/// Moves the calling thread into a mount namespace.
pub(crate) fn enter_mounts(namespace: impl AsFd) -> Result<(), Errno> {
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Mount))
}

/// Moves the calling thread into a mount namespace of its own, whose mounts are private: otherwise a
/// mount on one of them would propagate to the namespace before.
pub(crate) fn enter_private_mounts() -> Result<(), ReplaceError> {
    unshare(CloneFlags::CLONE_NEWNS)
        .map_err(|errno| at(Step::Unshare)(Errno::from_raw_os_error(errno as i32)))?;
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    rustix::mount::mount_change(c"/", private).map_err(at(Step::MakePrivate))
}

// Unmounts one mount within a time limit.
//
// A umount may wait for a silent server, so a separate process calls umount(2). A plain umount(2)
// fails with EBUSY while a process uses the mount. The mount's id is compared before: another mount
// may have its place by then.

/// Unmounts the mount with this id within a time limit. `mount_point` is the kernel's name of its
/// place: no symlink is followed. `how`: empty, so that a mount in use stays; or `DETACH`, so that
/// the mount goes with all mounts on it, and programs that use the mount keep it.
///
/// # Errors
/// `ResourceBusy` if the mount is in use. If it is not there any more, or does not answer.
pub fn unmount_within(
    limit: Duration,
    mount_point: &Path,
    id: MountId,
    how: UnmountFlags,
) -> io::Result<()> {
    let unmounted = answer_within(limit, mount_point, || {
        unmount(mount_point, id, UnmountFlags::NOFOLLOW | how)?;
        Ok(Vec::new())
    });
    match unmounted {
        Ok(_) => Ok(()),
        // Another mount, or none.
        Err(error)
            if matches!(
                Errno::from_io_error(&error),
                Some(Errno::STALE | Errno::NOENT)
            ) =>
        {
            Err(io::Error::other("another mount is there now"))
        }
        Err(error) if error.raw_os_error().is_none() && error.kind() == io::ErrorKind::TimedOut => {
            Err(io::Error::other("umount(2) did not return in time"))
        }
        Err(error) => Err(error),
    }
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
    let found = statx_of_name(&above, name, StatxFlags::MNT_ID)?;
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
