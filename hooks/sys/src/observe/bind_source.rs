//! The source of a bind, as mountinfo will show it in the container.

use std::path::{Path, PathBuf};
use std::rc::Rc;

use bindguard_core::evidence::FilePlace;
use bindguard_core::mount_table::MountEntry;

use crate::cached_path::open_without_waiting;
use crate::handle::Handle;
use crate::mounts::Mounts;

/// The mount that a bind source lies on, and the kernel's own path of the source.
#[derive(Debug)]
pub struct BindSource {
    /// The mount.
    pub mount: Rc<MountEntry>,
    /// The path, without symlinks.
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
