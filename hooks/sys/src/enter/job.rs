//! One replacement, with everything that the child needs to do it without the heap.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use bindguard_core::mount_table::{MountEntry, MountId};
use rustix::mount::MountPropagationFlags;

use super::clone::{NewMount, type_of};

/// A stale mount of a container, by the lines of its mount table, and the mount to put in its
/// place.
#[derive(Debug)]
pub struct Replacement<'a> {
    /// The stale mount.
    pub stale: &'a MountEntry,
    /// The mount that it is mounted on.
    pub parent: Option<&'a MountEntry>,
    /// The new mount, attached nowhere; `None` if it lies beneath the stale one already.
    pub new: Option<NewMount>,
}

/// The same for the child.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) mount_point: CString,
    pub(super) stale: MountId,
    pub(super) new: Option<NewMount>,
    pub(super) propagation: MountPropagationFlags,
    pub(super) parent: Option<Parent>,
}

/// The mount that the stale one is on, and the folder of the mount point there.
#[derive(Debug)]
pub(super) struct Parent {
    pub(super) id: MountId,
    pub(super) mount_point: CString,
    pub(super) folder: CString,
    pub(super) name: CString,
    pub(super) is_shared: bool,
    /// Its propagation as it is and shall be again.
    pub(super) propagation: MountPropagationFlags,
}

impl Job {
    /// `None` for a path that is no C string, which the kernel never prints.
    pub(super) fn of(replacement: Replacement<'_>) -> Option<Self> {
        let Replacement { stale, parent, new } = replacement;
        let on_another = parent.filter(|parent| parent.mount_point != stale.mount_point);
        Some(Self {
            mount_point: c_string(&stale.mount_point)?,
            stale: stale.id,
            new,
            propagation: type_of(&stale.propagation),
            parent: on_another.and_then(|parent| Parent::of(parent, &stale.mount_point)),
        })
    }
}

impl Parent {
    fn of(parent: &MountEntry, mount_point: &Path) -> Option<Self> {
        Some(Self {
            id: parent.id,
            mount_point: c_string(&parent.mount_point)?,
            folder: c_string(mount_point.parent()?)?,
            name: c_string(Path::new(mount_point.file_name()?))?,
            is_shared: parent.propagation.peer_group.is_some(),
            propagation: type_of(&parent.propagation),
        })
    }
}

fn c_string(path: &Path) -> Option<CString> {
    CString::new(path.as_os_str().as_bytes()).ok()
}
