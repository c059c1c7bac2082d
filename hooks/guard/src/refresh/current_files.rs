//! The files on the host that the mounts of a container should show: those of a pod's volumes, or
//! single files that a container engine bound.

use bindguard_core::mount_table::MountTable;
use bindguard_core::refresh::{SpecBind, SubpathInContainer};
use bindguard_sys::replace::CloneSettings;
use bindguard_sys::{Handle, OpenedTarget};

use super::outcome::NotReplaced;

/// Files on the host, open while containers are refreshed.
pub trait CurrentFiles {
    /// The mounts of a container that show them, each with its state at this moment.
    fn shown_in(&self, table: &MountTable) -> Vec<SubpathInContainer>;

    /// The binds of the container's spec that were mounted in one of them and are gone.
    fn missing_in(&self, _table: &MountTable) -> Vec<SpecBind> {
        Vec::new()
    }

    /// Called before a mount of this file replaces the stale one.
    fn note_replacement(&self, _stale: &SubpathInContainer, _file: &Handle) {}

    /// The settings of the new mount in place of a stale one.
    fn clone_settings(&self, _stale: &SubpathInContainer) -> CloneSettings {
        CloneSettings::default()
    }

    /// Opens the file or directory that a stale mount should show now. `None` for a directory or
    /// volume that this value does not hold.
    fn open_current(&self, stale: &SubpathInContainer)
    -> Option<Result<OpenedTarget, NotReplaced>>;
}
