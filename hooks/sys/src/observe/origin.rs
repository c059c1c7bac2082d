//! The origin of a subpath's bind: its volume's directory, a mount within that, or a mount of the
//! host.
//!
//! Nearly always it is the first directory that has the volume's name, and the search ends there.
//! Otherwise every directory of that name is compared with the subpath's mount, then the mounts
//! within them.

use std::rc::Rc;

use bindguard_core::error_chain;
use bindguard_core::evidence::{Observed, SubpathMount, Volume};
use bindguard_core::judge::{Fit, PathInVolume};
use bindguard_core::kubelet::{VolumeLayout, VolumeSubpath};
use bindguard_core::mount_table::{MountAttributes, MountEntry};

use crate::handle::Handle;
use crate::mounts::{MountError, Mounts};
use crate::observe::filesystem::{Filesystem, find_filesystem, find_filesystem_in};
use crate::observe::volume_directory::HeldVolumeDirectory;
use crate::target::current_payload;

/// The origin that a subpath is compared with.
#[derive(Debug)]
pub(super) struct SubpathOrigin {
    /// The volume, or the host's mount in place of the volume.
    pub(super) volume: Observed<Volume>,
    directory: Option<Rc<HeldVolumeDirectory>>,
    filesystem: Option<Filesystem>,
}

/// A subpath's mount, as the kernel reports it and as the judge receives it.
pub(super) struct Bound<'a> {
    pub(super) subpath: &'a VolumeSubpath,
    pub(super) entry: &'a MountEntry,
    pub(super) mount: &'a SubpathMount,
}

impl SubpathOrigin {
    /// A volume's folder, whatever is mounted at the subpath.
    pub(super) fn of_directory(directory: &Rc<HeldVolumeDirectory>, mounts: &Mounts) -> Self {
        Self {
            volume: directory.observe(mounts),
            directory: Some(Rc::clone(directory)),
            filesystem: None,
        }
    }

    /// No origin was found.
    pub(super) fn unknown() -> Self {
        Self {
            volume: Observed::Absent,
            directory: None,
            filesystem: None,
        }
    }

    fn unreadable(why: String) -> Self {
        Self {
            volume: Observed::Unreadable(why),
            ..Self::unknown()
        }
    }

    fn of_filesystem(found: Filesystem) -> Self {
        Self {
            volume: Observed::Seen(found.volume.clone()),
            directory: None,
            filesystem: Some(found),
        }
    }

    /// The directory that the sub path starts from.
    pub(super) fn handle(&self) -> Option<&Handle> {
        let filesystem = self
            .filesystem
            .as_ref()
            .map(|filesystem| &filesystem.handle);
        filesystem.or_else(|| self.directory.as_ref()?.handle())
    }

    /// The attributes that a bind needs, if those of this mount do not suffice.
    pub(super) fn attributes_to_keep(&self) -> Option<MountAttributes> {
        self.filesystem.as_ref()?.keep
    }

    /// The layout of the volume's files. A container may use the kubelet's layout: then the mount
    /// shows something in a payload directory, and `..data` names a payload directory. Reads the
    /// link: a server must have answered first.
    pub(super) fn layout(&self, mount: &SubpathMount, volume: &Volume) -> VolumeLayout {
        let may_be_payload = volume.layout == VolumeLayout::Plain
            && self.directory.is_some()
            && PathInVolume::from_mount(mount, volume)
                .is_ok_and(|sub_path| sub_path.begins_like_a_payload());
        let has_payload = || {
            self.handle()
                .is_some_and(|volume| current_payload(volume).is_ok())
        };
        if may_be_payload && has_payload() {
            VolumeLayout::Payload
        } else {
            volume.layout
        }
    }

    /// The folder of the volume, when the subpath was bound from that.
    pub(super) fn directory(&self) -> Option<&HeldVolumeDirectory> {
        self.directory.as_deref()
    }
}

impl Bound<'_> {
    /// Finds the origin. `first` is the first directory that has the volume's name.
    pub(super) fn origin(
        &self,
        first: Option<&Rc<HeldVolumeDirectory>>,
        mounts: &Mounts,
    ) -> SubpathOrigin {
        match first {
            Some(first) if self.fit(&first.observe(mounts)) == Some(Fit::Holds) => {
                self.held_by(first, mounts)
            }
            Some(first) => self.search(first, mounts),
            // The volume may lie anywhere on the host: only a file that is gone can be detected.
            None if self.mount.root.deleted || !self.mount.fs_type.is_local() => {
                find_filesystem(self.entry, mounts)
                    .map_or_else(SubpathOrigin::unknown, SubpathOrigin::of_filesystem)
            }
            None => SubpathOrigin::unknown(),
        }
    }

    /// The directory that contains the mount's root, or a mount of the same filesystem within it,
    /// recognized by its attributes. If none has the same attributes, those of the volume's mount
    /// changed since, and the kubelet binds from that mount.
    fn held_by(&self, directory: &Rc<HeldVolumeDirectory>, mounts: &Mounts) -> SubpathOrigin {
        let has_its_attributes = directory
            .mount(mounts)
            .is_none_or(|mount| mount.attributes == self.entry.attributes);
        let within = match has_its_attributes {
            true => Ok(None),
            false => self.mounted_within(directory, mounts),
        };
        match within {
            Ok(Some(within)) if within.keep.is_none() => SubpathOrigin::of_filesystem(within),
            Ok(_) => SubpathOrigin::of_directory(directory, mounts),
            Err(error) => SubpathOrigin::unreadable(error_chain(&error)),
        }
    }

    /// The mount that a sidecar made within the volume, if the subpath was bound from it.
    fn mounted_within(
        &self,
        directory: &HeldVolumeDirectory,
        mounts: &Mounts,
    ) -> Result<Option<Filesystem>, MountError> {
        let handle = directory.handle();
        let found = handle
            .and_then(|handle| handle.resolved_path().ok())
            .and_then(|volume| find_filesystem_in(&volume, self.entry, mounts));
        if found.is_none() {
            mounts.complete_table()?;
        }
        Ok(found)
    }

    fn search(&self, first: &Rc<HeldVolumeDirectory>, mounts: &Mounts) -> SubpathOrigin {
        let directories: Vec<Rc<HeldVolumeDirectory>> = match HeldVolumeDirectory::all(self.subpath)
        {
            Ok(all) if all.len() > 1 => all.into_iter().map(Rc::new).collect(),
            // It is open and observed already.
            Ok(_) => vec![Rc::clone(first)],
            Err(error) => {
                return SubpathOrigin::unreadable(error.to_string());
            }
        };
        // Some were opened after the last reading of the mount table.
        let mounts = &mounts.for_newly_opened();
        let holds =
            |it: &&Rc<HeldVolumeDirectory>| self.fit(&it.observe(mounts)) == Some(Fit::Holds);
        if let Some(directory) = directories.iter().find(holds) {
            return self.held_by(directory, mounts);
        }
        for directory in &directories {
            match self.mounted_within(directory, mounts) {
                Ok(Some(within)) => return SubpathOrigin::of_filesystem(within),
                Ok(None) => {}
                Err(error) => return SubpathOrigin::unreadable(error_chain(&error)),
            }
        }
        self.likeliest(&directories, mounts)
    }

    /// The directory that fits best, if none contains the mount's root: the volume is not mounted,
    /// or was mounted again.
    fn likeliest(&self, directories: &[Rc<HeldVolumeDirectory>], mounts: &Mounts) -> SubpathOrigin {
        let origins = directories.iter().map(|directory| {
            let origin = SubpathOrigin::of_directory(directory, mounts);
            let volume = self.with_age(origin.volume, directory, mounts);
            let fit = self.fit(&volume);
            (fit, SubpathOrigin { volume, ..origin })
        });
        let mut origins: Vec<(Option<Fit>, SubpathOrigin)> = origins.collect();
        // A directory that could not be read has no fit and sorts first: it may be the origin.
        origins.sort_by_key(|(fit, _)| *fit);
        let is_ambiguous = match &origins[..] {
            [(Some(Fit::MountedAnew | Fit::NotMounted), _), ..] => {
                origins[1..].iter().any(|(fit, _)| *fit == origins[0].0)
            }
            _ => false,
        };
        let likeliest = origins
            .into_iter()
            .next()
            .map(|(_, origin)| origin)
            .unwrap_or_else(SubpathOrigin::unknown);
        match is_ambiguous {
            true => SubpathOrigin {
                volume: Observed::Unreadable(
                    "several volumes of its name may be its own".to_owned(),
                ),
                ..likeliest
            },
            false => likeliest,
        }
    }

    fn fit(&self, volume: &Observed<Volume>) -> Option<Fit> {
        match volume {
            Observed::Seen(volume) => Some(Fit::of(self.mount, volume)),
            Observed::Absent | Observed::Unreadable(_) => None,
        }
    }

    /// Adds the order of the volume's mount and the subpath's, if it makes a difference.
    fn with_age(
        &self,
        volume: Observed<Volume>,
        directory: &HeldVolumeDirectory,
        mounts: &Mounts,
    ) -> Observed<Volume> {
        let volume = match volume {
            Observed::Seen(volume) if Fit::of(self.mount, &volume) == Fit::MountedAnew => volume,
            other => return other,
        };
        let Some(mount) = directory.mount(mounts) else {
            return Observed::Unreadable("the mount of its volume could not be found".to_owned());
        };
        match mounts.is_newer(&mount, self.entry) {
            Ok(is_newer) => Observed::Seen(Volume { is_newer, ..volume }),
            Err(error) => Observed::Unreadable(error_chain(&error)),
        }
    }
}
