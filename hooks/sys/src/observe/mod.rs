//! Observes bind sources: the kernel's facts about them, as the plain data that `bindguard-core`
//! judges.
//!
//! First every source is opened: an open descriptor keeps the kernel from reusing the mount id.
//! Then the kernel reports each handle's mount.

mod origin;
mod subpath;
mod volume_directory;

use std::path::{Path, PathBuf};
use std::rc::Rc;

use bindguard_core::error_chain;
use bindguard_core::evidence::{FilePlace, HostMount, Observed};
use bindguard_core::mount_table::MountEntry;

use crate::failure::Failure;
use crate::handle::Handle;
use crate::mounts::{MountOf, Mounts};
use crate::read_file::open_without_waiting;

pub use crate::observe::subpath::{HeldSubpath, children, is_listed, list_subpaths};
pub use crate::observe::volume_directory::{
    HeldVolume, HeldVolumeDirectories, Volumes, list_volumes,
};

/// The evidence from an error to open something.
fn unreadable<T>(error: &Failure) -> Observed<T> {
    match error.is_not_found() {
        true => Observed::Absent,
        false => Observed::Unreadable(error_chain(&error)),
    }
}

/// The mount that a file is on, or the evidence that there is none.
fn mount_of<T>(file: &Result<Handle, Failure>, mounts: &Mounts) -> Result<MountOf, Observed<T>> {
    let handle = file.as_ref().map_err(unreadable)?;
    mounts
        .mount_of(handle)
        .map_err(|error| Observed::Unreadable(error_chain(&error)))
}

/// The mount at a path, or the evidence that there is none.
fn mount_at<T>(file: &Result<Handle, Failure>, mounts: &Mounts) -> Result<MountOf, Observed<T>> {
    match mount_of(file, mounts)? {
        mount if mount.is_mount_point => Ok(mount),
        _ => Err(Observed::Absent),
    }
}

// The source of a bind, as mountinfo will show it in the container.

/// The mount that a bind source lies on, and the kernel's own path of the source.
#[derive(Debug)]
pub struct BindSource {
    pub mount: Rc<MountEntry>,
    pub path: PathBuf,
}

impl BindSource {
    /// The source behind an open handle. `None` if the kernel reports neither mount nor path, or if
    /// the file is deleted.
    pub fn of(handle: &Handle, mounts: &Mounts) -> Option<Self> {
        let mount = mounts.mount_of(handle).ok()?.entry;
        let path = handle.resolved_path().ok()?;
        let is_deleted = path.as_os_str().as_encoded_bytes().ends_with(b" (deleted)");
        (path.is_absolute() && !is_deleted).then_some(Self { mount, path })
    }

    /// Opens the source at a path. `None` as for [`Self::of`], or if a server would have to answer.
    pub fn open_without_waiting(path: &Path) -> Option<(Handle, Self)> {
        let earlier = Mounts::default();
        let handle = open_without_waiting(path, |handle| earlier.is_local(handle)).ok()?;
        let handle = handle.unqueried();
        let source = Self::of(&handle, &earlier.for_newly_opened())?;
        Some((handle, source))
    }

    /// The place of the source in its filesystem.
    pub fn place(&self) -> Option<FilePlace> {
        Some(FilePlace {
            device: self.mount.device,
            path: self.mount.place_in_filesystem(&self.path)?,
        })
    }
}

// The mount that a host-root bind would be made from.

/// Observes the mount of an open source.
pub fn observe_host_mount(
    source: &Result<Handle, Failure>,
    mounts: &Mounts,
) -> Observed<HostMount> {
    match mount_of(source, mounts) {
        Ok(mount) => Observed::Seen(HostMount {
            passes_umounts_on: mount.entry.propagation.passes_umounts_on(),
            mount_point: mount.entry.mount_point.clone(),
        }),
        Err(unseen) => unseen,
    }
}
