//! The files on the host that the mounts of a container should show: those of a pod's volumes,
//! volumes that were mounted anew, host-root binds, or single files that a container engine bound.

use bindguard_core::mount_table::{MountEntry, MountTable};
use bindguard_core::refresh::{KeptMounts, NestedBind, SpecBind, SubpathInContainer};
use bindguard_sys::replace::CloneSettings;
use bindguard_sys::{Handle, OpenedTarget};

use super::outcome::NotReplaced;

/// The source of a bind that is nested in a volume.
#[derive(Debug)]
pub struct OpenedNested {
    /// The source.
    pub file: Handle,
    /// The container's mount of the bind. If that mount is gone, the mount that a runtime would make.
    pub like: MountEntry,
    /// The settings of the new mount.
    pub settings: CloneSettings,
}

/// Files on the host, open while containers are refreshed.
pub trait CurrentFiles {
    /// The mounts of a container that show the files, judged at this moment.
    fn shown_in(&self, table: &MountTable) -> Vec<SubpathInContainer>;

    /// The binds of the container's spec that were mounted in a refreshed directory and are gone.
    fn missing_in(&self, _table: &MountTable) -> Vec<SpecBind> {
        Vec::new()
    }

    /// Probes the sources of these stale mounts together, for the next opens: each silent source
    /// takes time.
    fn probe_sources(&self, _stale: &[&SubpathInContainer]) {}

    /// Called before a mount of this file replaces the stale mount.
    ///
    /// # Errors
    /// If the stale mount must stay, because a later refresh would not know the new mount.
    fn note_replacement(
        &self,
        _stale: &SubpathInContainer,
        _file: &Handle,
    ) -> Result<(), NotReplaced> {
        Ok(())
    }

    /// Called after a new mount has replaced a stale mount, with the container's current table.
    fn note_attached(&self, _new: &SubpathInContainer, _table: &MountTable) {}

    /// The settings of the new mount in place of a stale mount.
    fn clone_settings(&self, _stale: &SubpathInContainer) -> CloneSettings {
        CloneSettings::default()
    }

    /// The mounts below a stale mount that go with that mount, by the container's table; `None` if
    /// a mount is replaced only without mounts below.
    ///
    /// # Errors
    /// If a mount below must not be lost.
    fn mounts_below(
        &self,
        _stale: &SubpathInContainer,
        _table: &MountTable,
    ) -> Result<Option<KeptMounts>, NotReplaced> {
        Ok(None)
    }

    /// Opens the source of a bind that is nested in a stale mount, for a new mount, and records the
    /// place of that source.
    ///
    /// # Errors
    /// If the bind must stay as it is; [`NotReplaced::Changed`] if this value lacks the bind.
    fn open_nested(&self, _nested: &NestedBind) -> Result<OpenedNested, NotReplaced> {
        Err(NotReplaced::Changed)
    }

    /// Opens the file or directory that a stale mount should show now. `None` if the mount does not
    /// show files of this kind.
    fn open_current(&self, stale: &SubpathInContainer)
    -> Option<Result<OpenedTarget, NotReplaced>>;
}

/// Several kinds of files of a container. No mount shows files of two kinds.
impl CurrentFiles for Vec<&dyn CurrentFiles> {
    fn shown_in(&self, table: &MountTable) -> Vec<SubpathInContainer> {
        self.iter().flat_map(|kind| kind.shown_in(table)).collect()
    }

    fn missing_in(&self, table: &MountTable) -> Vec<SpecBind> {
        self.iter()
            .flat_map(|kind| kind.missing_in(table))
            .collect()
    }

    fn clone_settings(&self, stale: &SubpathInContainer) -> CloneSettings {
        let mut settings = self.iter().map(|kind| kind.clone_settings(stale));
        settings
            .find(|settings| *settings != CloneSettings::default())
            .unwrap_or_default()
    }

    fn mounts_below(
        &self,
        stale: &SubpathInContainer,
        table: &MountTable,
    ) -> Result<Option<KeptMounts>, NotReplaced> {
        let below = self.iter().map(|kind| kind.mounts_below(stale, table));
        let mut known = below.filter(|below| !matches!(below, Ok(None)));
        known.next().unwrap_or(Ok(None))
    }

    fn open_nested(&self, nested: &NestedBind) -> Result<OpenedNested, NotReplaced> {
        let mut kinds = self.iter().map(|kind| kind.open_nested(nested));
        let is_other_kind = |opened: &Result<_, _>| matches!(opened, Err(NotReplaced::Changed));
        kinds
            .find(|opened| !is_other_kind(opened))
            .unwrap_or(Err(NotReplaced::Changed))
    }

    fn probe_sources(&self, stale: &[&SubpathInContainer]) {
        self.iter().for_each(|kind| kind.probe_sources(stale));
    }

    fn note_replacement(
        &self,
        stale: &SubpathInContainer,
        file: &Handle,
    ) -> Result<(), NotReplaced> {
        self.iter()
            .try_for_each(|kind| kind.note_replacement(stale, file))
    }

    fn note_attached(&self, new: &SubpathInContainer, table: &MountTable) {
        for kind in self {
            kind.note_attached(new, table);
        }
    }

    fn open_current(
        &self,
        stale: &SubpathInContainer,
    ) -> Option<Result<OpenedTarget, NotReplaced>> {
        self.iter().find_map(|kind| kind.open_current(stale))
    }
}
