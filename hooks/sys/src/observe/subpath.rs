//! A volume-subpath, its volume, and what its sub path leads to today.

use bindguard_core::evidence::{Observed, SubpathEvidence, SubpathMount, Target, Volume};
use bindguard_core::kubelet::{Plugin, SubPath, VolumeSubpath};
use bindguard_core::mount_table::MountTable;

use crate::handle::{Handle, HandleError};
use crate::observe::place::{Place, unreadable};
use crate::target::{TargetError, open_target};

/// A subpath and its volume, held so that their mounts stay what the mount table says they are.
#[derive(Debug)]
pub struct HeldSubpath {
    place: Result<Place, HandleError>,
    volume: Option<PayloadVolume>,
}

#[derive(Debug)]
struct PayloadVolume {
    plugin: Plugin,
    place: Result<Place, HandleError>,
}

impl HeldSubpath {
    /// Takes hold of a subpath and of its volume.
    pub fn hold(subpath: &VolumeSubpath) -> Self {
        Self { place: Place::hold(&subpath.path()), volume: PayloadVolume::hold(subpath) }
    }

    /// The subpath itself, for whoever wants to mend it.
    pub fn handle(&self) -> Option<&Handle> {
        self.place.as_ref().ok().map(|place| &place.itself)
    }

    /// The volume's directory.
    pub fn volume(&self) -> Option<&Handle> {
        self.volume.as_ref().and_then(|volume| volume.place.as_ref().ok()).map(|place| &place.itself)
    }

    /// Looks both up in a mount table that was read after they were held.
    pub fn observe(&self, table: &MountTable) -> SubpathEvidence {
        let mount = self.mount(table);
        let volume = match &self.volume {
            Some(volume) => volume.observe(table),
            None => Observed::Absent,
        };
        let target = match (&mount, &volume) {
            (Observed::Seen(mount), Observed::Seen(volume)) => self.target(mount, volume),
            _ => Observed::Absent,
        };
        SubpathEvidence { mount, volume, target }
    }

    fn mount(&self, table: &MountTable) -> Observed<SubpathMount> {
        let place = match &self.place {
            Ok(place) => place,
            Err(error) => return unreadable(error),
        };
        let entry = match place.mount_in(table) {
            Ok((entry, true)) => entry,
            Ok((_, false)) => return Observed::Absent,
            Err(why) => return Observed::Unreadable(why),
        };
        let identity = if entry.fs_type.is_local() {
            place.itself.identity().map_or_else(|error| unreadable(&error), Observed::Seen)
        } else {
            Observed::Unreadable(format!("{} is not asked", entry.fs_type.0))
        };
        Observed::Seen(SubpathMount {
            root: entry.root.clone(),
            device: entry.device,
            fs_type: entry.fs_type.clone(),
            identity,
            covers_its_equal: table.covers_its_equal(entry),
        })
    }

    fn target(&self, mount: &SubpathMount, volume: &Volume) -> Observed<Target> {
        // Without a sub path there is nothing to look for, and the judge says why. A server is never asked.
        let (Ok(sub_path), Some(handle)) = (SubPath::from_mount(mount, volume), self.volume()) else {
            return Observed::Absent;
        };
        if !volume.fs_type.is_local() {
            return Observed::Unreadable(format!("its volume is on a {} filesystem", volume.fs_type.0));
        }
        let opened = match open_target(handle, &sub_path.path, volume.plugin.writer()) {
            Ok(opened) => opened,
            Err(TargetError::NoPayload(_)) => return Observed::Absent,
            Err(error) => return Observed::Unreadable(error.in_full()),
        };
        let file = match opened.file.as_ref().map(Handle::identity) {
            Some(Ok(identity)) => Observed::Seen(identity),
            Some(Err(error)) => unreadable(&error),
            None => Observed::Absent,
        };
        Observed::Seen(Target { timestamp: opened.timestamp, file })
    }
}

impl PayloadVolume {
    /// The volume of a subpath: the plugin whose folder holds one of its name. A pod's volume names are unique.
    fn hold(subpath: &VolumeSubpath) -> Option<Self> {
        Plugin::ALL.into_iter().find_map(|plugin| match Place::hold(&subpath.volume_directory(plugin)) {
            Err(error) if error.is_not_found() => None,
            place => Some(Self { plugin, place }),
        })
    }

    fn observe(&self, table: &MountTable) -> Observed<Volume> {
        let place = match &self.place {
            Ok(place) => place,
            Err(error) => return unreadable(error),
        };
        let (entry, is_mount_point) = match place.mount_in(table) {
            Ok(found) => found,
            Err(why) => return Observed::Unreadable(why),
        };
        let directory = place.itself.path();
        let resolved = match place.itself.resolved_path() {
            Ok(resolved) => resolved,
            Err(error) => return Observed::Unreadable(format!("resolve {}: {error}", directory.display())),
        };
        match MountTable::place_in_filesystem(entry, &resolved) {
            Some(place) => Observed::Seen(Volume {
                plugin: self.plugin,
                directory: directory.to_owned(),
                device: entry.device,
                fs_type: entry.fs_type.clone(),
                place,
                is_mount_point,
            }),
            None => Observed::Unreadable(format!(
                "{} is not below {}, where its mount is",
                resolved.display(),
                entry.mount_point.display()
            )),
        }
    }
}
