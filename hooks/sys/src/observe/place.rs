//! A path, held together with the folder that it is in.

use std::path::Path;

use bindguard_core::evidence::Observed;
use bindguard_core::mount_table::{MountEntry, MountTable};

use crate::handle::{Handle, HandleError};

/// A path and the folder that it is in: it is a mount point when the two are on different mounts.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) itself: Handle,
    folder: Handle,
}

impl Place {
    /// Takes hold of both.
    pub(super) fn hold(path: &Path) -> Result<Self, HandleError> {
        let folder = path.parent().unwrap_or(path);
        Ok(Self { folder: Handle::of(folder)?, itself: Handle::of(path)? })
    }

    /// The mount that the path is on, and whether the path is that mount's mount point.
    pub(super) fn mount_in<'t>(&self, table: &'t MountTable) -> Result<(&'t MountEntry, bool), String> {
        let id = self.itself.mount_id().map_err(|error| error.in_full())?;
        let folder = self.folder.mount_id().map_err(|error| error.in_full())?;
        let entry = table.mount(id).ok_or_else(|| format!("mount {} is not in the mount table", id.0))?;
        Ok((entry, id != folder))
    }
}

/// What an error to hold something says of it.
pub(super) fn unreadable<T>(error: &HandleError) -> Observed<T> {
    if error.is_not_found() { Observed::Absent } else { Observed::Unreadable(error.in_full()) }
}
