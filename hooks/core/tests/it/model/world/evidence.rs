//! The evidence that a reader of the model gets: the kernel's answers about its mounts and files.

use bindguard_core::evidence::{
    FileIdentity, Observed, Reach, SubpathEvidence, SubpathMount, Target, Volume,
};
use bindguard_core::judge::PathInVolume;
use bindguard_core::mount_table::{Device, FsType, MountRoot};

use super::{Bound, DISK, Storage, Veiled, World};

impl World {
    /// The evidence that is available without the pod's `subPath`.
    pub fn evidence(&self) -> SubpathEvidence {
        let unreadable = || "EIO".to_owned();
        let mount = self
            .stack
            .last()
            .map_or(Observed::Absent, |top| Observed::Seen(self.mount(top)));
        let volume = self.volume();
        let target = match (&mount, &volume) {
            (Observed::Seen(_), Observed::Seen(_)) if self.is_dead(self.device) => {
                Observed::Unreadable(unreadable())
            }
            (Observed::Seen(mount), Observed::Seen(volume)) => self.target(mount, volume),
            _ => Observed::Absent,
        };
        let mut evidence = SubpathEvidence {
            mount,
            reach: self.reach(),
            volume,
            target,
        };
        match (self.veiled, &mut evidence) {
            (Some(Veiled::Mount), evidence) => evidence.mount = Observed::Unreadable(unreadable()),
            (Some(Veiled::Volume), evidence) => {
                evidence.volume = Observed::Unreadable(unreadable())
            }
            (Some(Veiled::Target), evidence) => {
                evidence.target = Observed::Unreadable(unreadable())
            }
            (
                Some(Veiled::Identity),
                SubpathEvidence {
                    mount: Observed::Seen(mount),
                    ..
                },
            ) => {
                mount.identity = Observed::Unreadable(unreadable());
            }
            (
                Some(Veiled::File),
                SubpathEvidence {
                    target: Observed::Seen(target),
                    ..
                },
            ) => {
                target.file = Observed::Unreadable(unreadable());
            }
            (Some(Veiled::Identity | Veiled::File) | None, _) => {}
        }
        evidence
    }

    /// The answer to a probe, if a probe is due.
    fn reach(&self) -> Reach {
        let refused = |number, words: &str| Reach::Refused {
            number,
            words: words.to_owned(),
        };
        match self.stack.last() {
            Some(top) if self.is_dead(top.device) => {
                refused(107, "Transport endpoint is not connected")
            }
            Some(top) if top.is_forgotten => refused(116, "Stale file handle"),
            Some(_) if self.storage == Storage::Server => Reach::Alive,
            Some(_) | None => Reach::NotNeeded,
        }
    }

    fn fs_type(&self, device: u32) -> FsType {
        let name = match self.storage {
            Storage::Memory if device != DISK => "tmpfs",
            Storage::Server if device != DISK => "fuse.bindfs",
            Storage::Node | Storage::Memory | Storage::Disk | Storage::Server | Storage::Host => {
                "ext4"
            }
        };
        FsType(name.into())
    }

    fn mount(&self, top: &Bound) -> SubpathMount {
        SubpathMount {
            root: MountRoot {
                path: top.root.clone(),
                deleted: top.deleted,
            },
            device: Device {
                major: 0,
                minor: top.device,
            },
            fs_type: self.fs_type(top.device),
            identity: Observed::Seen(seen_on(top.file, top.device)),
            covers_its_equal: self.stack.len() > 1,
        }
    }

    fn volume(&self) -> Observed<Volume> {
        let (directory, place, is_mount_point) = match self.storage {
            // The folder is unknown: for a deleted root, the evidence has the host's mount of that
            // disk instead.
            Storage::Host if self.stack.last().is_some_and(|top| top.deleted) => {
                ("/", "/".into(), true)
            }
            Storage::Host => return Observed::Absent,
            Storage::Node | Storage::Memory | Storage::Disk | Storage::Server => (
                "/var/lib/kubelet/pods/u/volumes/p/v",
                self.place(),
                self.is_mounted,
            ),
        };
        Observed::Seen(Volume {
            plugin: self.plugin,
            directory: directory.into(),
            device: Device {
                major: 0,
                minor: self.device,
            },
            fs_type: self.fs_type(self.device),
            place,
            is_mount_point,
            is_newer: true,
            layout: self.plugin.layout(),
        })
    }

    fn target(&self, mount: &SubpathMount, volume: &Volume) -> Observed<Target> {
        let Ok(sub_path) = PathInVolume::from_mount(mount, volume) else {
            return Observed::Absent;
        };
        let Some(at) = self.place_of(&self.in_volume(&sub_path)) else {
            return Observed::Absent;
        };
        let file = self.files.get(&at).map_or(Observed::Absent, |file| {
            Observed::Seen(seen_on(*file, self.device))
        });
        Observed::Seen(Target {
            timestamp: self.data.clone(),
            file,
        })
    }
}

/// The file, on the device that its filesystem has now.
pub(super) fn seen_on(file: FileIdentity, device: u32) -> FileIdentity {
    FileIdentity {
        device: u64::from(device),
        ..file
    }
}
