//! A volume-subpath, its volume, and what its sub path leads to today.

use bindguard_core::evidence::{Observed, SubpathEvidence, SubpathMount, Target, Volume};
use bindguard_core::kubelet::{Plugin, SubPath, VolumeSubpath};

use crate::handle::{Handle, HandleError};
use crate::mounts::Mounts;
use crate::observe::unreadable;
use crate::target::{TargetError, open_target};

/// A subpath and its volume, held so that they stay what they are while they are looked at.
#[derive(Debug)]
pub struct HeldSubpath {
    itself: Result<Handle, HandleError>,
    volume: Option<PayloadVolume>,
}

#[derive(Debug)]
struct PayloadVolume {
    plugin: Plugin,
    directory: Result<Handle, HandleError>,
}

impl HeldSubpath {
    /// Takes hold of a subpath and of its volume.
    pub fn hold(subpath: &VolumeSubpath) -> Self {
        Self { itself: Handle::of(&subpath.path()), volume: PayloadVolume::hold(subpath) }
    }

    /// The subpath itself, for whoever wants to mend it.
    pub fn handle(&self) -> Option<&Handle> {
        self.itself.as_ref().ok()
    }

    /// The volume's directory.
    pub fn volume(&self) -> Option<&Handle> {
        self.volume.as_ref().and_then(|volume| volume.directory.as_ref().ok())
    }

    /// Looks at both.
    pub fn observe(&self, mounts: &Mounts) -> SubpathEvidence {
        let mount = self.mount(mounts);
        let volume = match &self.volume {
            Some(volume) => volume.observe(mounts),
            None => Observed::Absent,
        };
        let target = match (&mount, &volume) {
            (Observed::Seen(mount), Observed::Seen(volume)) => self.target(mount, volume),
            _ => Observed::Absent,
        };
        SubpathEvidence { mount, volume, target }
    }

    fn mount(&self, mounts: &Mounts) -> Observed<SubpathMount> {
        let handle = match &self.itself {
            Ok(handle) => handle,
            Err(error) => return unreadable(error),
        };
        let mount = match mounts.mount_of(handle) {
            Ok(mount) if mount.is_mount_point => mount,
            Ok(_) => return Observed::Absent,
            Err(why) => return Observed::Unreadable(why),
        };
        let identity = if mount.entry.fs_type.is_local() {
            handle.identity().map_or_else(|error| unreadable(&error), Observed::Seen)
        } else {
            Observed::Unreadable(format!("{} is not asked", mount.entry.fs_type.0))
        };
        Observed::Seen(SubpathMount {
            covers_its_equal: mount.covers_its_equal(),
            root: mount.entry.root,
            device: mount.entry.device,
            fs_type: mount.entry.fs_type,
            identity,
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
        Plugin::ALL.into_iter().find_map(|plugin| match Handle::of(&subpath.volume_directory(plugin)) {
            Err(error) if error.is_not_found() => None,
            directory => Some(Self { plugin, directory }),
        })
    }

    fn observe(&self, mounts: &Mounts) -> Observed<Volume> {
        let handle = match &self.directory {
            Ok(handle) => handle,
            Err(error) => return unreadable(error),
        };
        let (mount, resolved) = match (mounts.mount_of(handle), handle.resolved_path()) {
            (Ok(mount), Ok(resolved)) => (mount, resolved),
            (Err(why), _) => return Observed::Unreadable(why),
            (_, Err(error)) => return Observed::Unreadable(format!("resolve {}: {error}", handle.path().display())),
        };
        let Some(place) = mount.entry.place_in_filesystem(&resolved) else {
            let (path, mount_point) = (resolved.display(), mount.entry.mount_point.display());
            return Observed::Unreadable(format!("{path} is not below {mount_point}, where its mount is"));
        };
        Observed::Seen(Volume {
            plugin: self.plugin,
            directory: handle.path().to_owned(),
            device: mount.entry.device,
            fs_type: mount.entry.fs_type,
            place,
            is_mount_point: mount.is_mount_point,
        })
    }
}
