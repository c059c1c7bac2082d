//! The files on the host that the mounts of a container should show: those of a pod's volumes,
//! volumes that were mounted anew, host-root binds, or single files that a container engine bound.

use bindguard_core::mount_table::{MountEntry, MountTable};
use bindguard_core::refresh::{KeptMounts, NestedBind, SpecBind, SubpathInContainer};
use bindguard_sys::Handle;
use bindguard_sys::replace::{CloneSettings, NewMount};

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

    /// True if a mount shows files of this kind.
    fn has(&self, stale: &SubpathInContainer) -> bool;

    /// The binds of the container's spec that were mounted in a refreshed directory and are gone.
    fn missing_in(&self, _table: &MountTable) -> Vec<SpecBind> {
        Vec::new()
    }

    /// Probes the sources of these stale mounts together, for the next opens: each silent source
    /// takes time.
    fn probe_sources(&self, _stale: &[&SubpathInContainer]) {}

    /// Called before the new mount of this file is attached beneath the stale mount.
    ///
    /// # Errors
    /// If the stale mount must stay, because a later refresh would not know the new mount.
    fn note_replacement(
        &self,
        _stale: &SubpathInContainer,
        _file: &Handle,
        _new: &NewMount,
    ) -> Result<(), NotReplaced> {
        Ok(())
    }

    /// Called before the stale mount is detached, if the mount beneath is not the mount of
    /// [`Self::note_replacement`]: propagation attaches a copy.
    ///
    /// # Errors
    /// As there.
    fn note_arrived(
        &self,
        _stale: &SubpathInContainer,
        _beneath: &MountEntry,
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
    /// If the bind must stay as it is.
    fn open_nested(
        &self,
        _stale: &SubpathInContainer,
        _nested: &NestedBind,
    ) -> Result<OpenedNested, NotReplaced> {
        Err(NotReplaced::Changed)
    }

    /// Opens the file or directory that a stale mount should show now.
    ///
    /// # Errors
    /// [`NotReplaced::KeyGone`] if there is none, or if the mount must stay.
    fn open_current(&self, stale: &SubpathInContainer) -> Result<Handle, NotReplaced>;
}

/// Several kinds of files of a container. No mount shows files of two kinds.
#[derive(Default)]
pub struct FileKinds<'a>(pub Vec<&'a dyn CurrentFiles>);

impl<'a> FileKinds<'a> {
    fn of(&self, stale: &SubpathInContainer) -> Option<&'a dyn CurrentFiles> {
        self.0.iter().copied().find(|kind| kind.has(stale))
    }
}

impl CurrentFiles for FileKinds<'_> {
    fn shown_in(&self, table: &MountTable) -> Vec<SubpathInContainer> {
        let kinds = self.0.iter();
        kinds.flat_map(|kind| kind.shown_in(table)).collect()
    }

    fn has(&self, stale: &SubpathInContainer) -> bool {
        self.of(stale).is_some()
    }

    fn missing_in(&self, table: &MountTable) -> Vec<SpecBind> {
        let kinds = self.0.iter();
        kinds.flat_map(|kind| kind.missing_in(table)).collect()
    }

    fn probe_sources(&self, stale: &[&SubpathInContainer]) {
        self.0.iter().for_each(|kind| kind.probe_sources(stale));
    }

    fn note_replacement(
        &self,
        stale: &SubpathInContainer,
        file: &Handle,
        new: &NewMount,
    ) -> Result<(), NotReplaced> {
        self.of(stale)
            .map_or(Ok(()), |kind| kind.note_replacement(stale, file, new))
    }

    fn note_arrived(
        &self,
        stale: &SubpathInContainer,
        beneath: &MountEntry,
    ) -> Result<(), NotReplaced> {
        self.of(stale)
            .map_or(Ok(()), |kind| kind.note_arrived(stale, beneath))
    }

    fn note_attached(&self, new: &SubpathInContainer, table: &MountTable) {
        if let Some(kind) = self.of(new) {
            kind.note_attached(new, table);
        }
    }

    fn clone_settings(&self, stale: &SubpathInContainer) -> CloneSettings {
        self.of(stale)
            .map(|kind| kind.clone_settings(stale))
            .unwrap_or_default()
    }

    fn mounts_below(
        &self,
        stale: &SubpathInContainer,
        table: &MountTable,
    ) -> Result<Option<KeptMounts>, NotReplaced> {
        self.of(stale)
            .map_or(Ok(None), |kind| kind.mounts_below(stale, table))
    }

    fn open_nested(
        &self,
        stale: &SubpathInContainer,
        nested: &NestedBind,
    ) -> Result<OpenedNested, NotReplaced> {
        let kind = self.of(stale).ok_or(NotReplaced::Changed)?;
        kind.open_nested(stale, nested)
    }

    fn open_current(&self, stale: &SubpathInContainer) -> Result<Handle, NotReplaced> {
        let kind = self.of(stale).ok_or(NotReplaced::KeyGone)?;
        kind.open_current(stale)
    }
}
