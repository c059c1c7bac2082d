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

mod new_mount;
mod tuck;

use std::os::fd::AsFd;
use std::path::Path;

use rustix::io::Errno;
use rustix::mount::{MoveMountFlags, UnmountFlags};
use serde::{Deserialize, Serialize};

use crate::handle::Handle;
use crate::named_variants::named_variants;

pub use crate::replace::new_mount::{CloneError, CloneSettings, NewMount, clone_like, clone_mount};
pub(crate) use crate::replace::new_mount::{copy_of, propagation_type, tree_of};
pub use crate::replace::tuck::attach_tucked;
pub(crate) use crate::replace::tuck::{FolderCopy, enter_private_mounts};

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

named_variants! {
    /// A step of a replacement.
    #[derive(Serialize, Deserialize)]
    Step,
    words,
    OpenProc = "opening /proc/self/fd",
    /// `setns(2)`
    Enter = "entering the container's mount namespace",
    /// `openat2(2)` of the mount point.
    OpenMountPoint = "opening the mount point",
    /// `statx(2)` of the stale mount and of the new mount.
    CompareTypes = "comparing the types of the old and the current file",
    /// `openat2(2)` of the parent folder.
    OpenFolder = "opening the folder of the mount point",
    /// `openat2(2)` of the mount that the folder is on.
    OpenParent = "opening the parent mount",
    /// `move_mount(2)` with `MOVE_MOUNT_BENEATH`.
    AttachBeneath = "attaching the new mount beneath the stale one",
    /// The container's parent mount becomes shared for a moment.
    ShareParent = "making the parent mount shared",
    /// `open_tree(2)` of the folder.
    CopyFolder = "copying the parent mount",
    /// `unshare(2)`
    Unshare = "making a mount namespace for the copy",
    /// The mounts of that namespace become private.
    MakePrivate = "making the mounts of that namespace private",
    /// The copy is attached in that namespace.
    AttachCopy = "attaching the copy of the parent mount",
    /// `mount_setattr(2)` of a mount in a tree.
    SetAttributes = "giving the new mount its attributes",
    /// The new mount is attached in the copy, and propagates.
    AttachNew = "attaching the new mount to the copy",
    /// The mounts in the copy are compared with those before.
    CompareCopy = "comparing the mounts of the copy",
    /// `setns(2)` back into the container.
    Return = "returning to the container's mount namespace",
    /// The parent's propagation is set as it was.
    RestoreParent = "restoring the propagation of the parent mount",
    /// The stale mount and the mounts below leave their peer groups.
    MakeStalePrivate = "making the stale mounts private",
    /// A tree of new mounts is attached in a mount namespace of its own.
    AttachTree = "attaching the new mounts in a namespace of their own",
    /// `move_mount(2)` in that tree.
    AttachNested = "attaching the nested mount",
    /// `open_tree(2)` of that tree.
    CopyTree = "copying the new mounts",
    /// `umount2(2)` of a name.
    Unmount = "unmounting the mount",
    /// `umount2(2)` with `MNT_DETACH`.
    Detach = "detaching the stale mount",
    /// The new mount's propagation is set.
    SetPropagation = "setting the propagation of the new mount",
    /// The folder of the mount point is copied, writable.
    CopyForTouch = "copying the folder of the mount point",
    /// `utimensat(2)` of the file beneath the mount.
    Touch = "touching the file beneath the mount",
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
    #[error("{}", .0.words())]
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

    /// True if a process uses the mount, or a mount is on it.
    pub fn is_busy(self) -> bool {
        self == Self::Failed(Step::Unmount, Errno::BUSY)
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
    let copy = Handle::from_fd(copy_of(&proc).ok()?, "/proc".into());
    copy.unique_mount_id().ok()?
}
