//! Detects stale volume-subpaths on the host.
//!
//! A subpath is *current* if it shows the very file that the kubelet would bind today for the same
//! sub path. That path is the volume, then `..data` where the kubelet writes it, then the sub path.
//! This file derives the expected source from the evidence; [`judge`] compares it with the mount.
//! The order of the checks matters. Unreadable evidence is Unknown before it can be anything else.
//! A volume that is not mounted has no files to compare with. A missing target is reported before a
//! target that differs.

use std::ffi::OsStr;

use super::path_in_volume::NotInVolume;
use super::path_in_volume::PathInVolume;
use crate::evidence::{Observed, SubpathEvidence, SubpathMount, Volume};
use crate::kubelet::{MountedVolume, Plugin, VolumeSubpath, Writer};

use super::place::{Expected, ExpectedTarget, OnIt, Shown, judge, unreadable};
use super::reach::judge_reach;
use super::remedy::NoRemedy;
use super::verdict::{StaleCause, Unmounted, Verdict};

/// Judges a subpath.
pub fn judge_subpath(subpath: &VolumeSubpath, evidence: &SubpathEvidence) -> Verdict {
    let mount = match &evidence.mount {
        Observed::Seen(mount) => mount,
        Observed::Absent => return Verdict::Unmounted(Unmounted::Subpath),
        Observed::Unreadable(why) => {
            return judge_reach(&evidence.reach).unwrap_or_else(|| Verdict::Unknown(why.clone()));
        }
    };
    let verdict = match &evidence.volume {
        Observed::Seen(volume) => in_volume(subpath, mount, volume, evidence),
        Observed::Absent => without_remedy(mount, NoRemedy::NoVolume),
        Observed::Unreadable(why) => unreadable(&mount.root, why),
    };
    match (judge_reach(&evidence.reach), &verdict) {
        // The volume answered, so only the subpath is dead.
        (
            Some(_),
            Verdict::Stale { remedy: Ok(_), .. } | Verdict::Orphaned { .. } | Verdict::Unmounted(_),
        ) => verdict,
        (Some(dead), _) => dead,
        (None, _) => verdict,
    }
}

fn in_volume(
    subpath: &VolumeSubpath,
    mount: &SubpathMount,
    volume: &Volume,
    evidence: &SubpathEvidence,
) -> Verdict {
    if let Some(unmounted) = missing_mount(subpath, mount, volume) {
        return Verdict::Unmounted(unmounted);
    }
    match PathInVolume::from_mount(mount, volume) {
        Ok(sub_path) if shows_whole_share(mount, volume, &sub_path) => Verdict::Stale {
            cause: StaleCause::WrongRoot,
            remedy: Err(NoRemedy::WholeShare),
        },
        Ok(sub_path) if shows_file_deleted_here(mount, &sub_path) => Verdict::Stale {
            cause: StaleCause::DeletedRoot,
            remedy: Err(NoRemedy::RenamedByClient),
        },
        Ok(sub_path) if shows_volume_itself(mount, volume, &sub_path) => Verdict::Current,
        Ok(sub_path) => {
            let expected = Expected {
                directory: &volume.directory,
                device: volume.device,
                writer: volume.plugin.writer(),
                layout: volume.layout,
                sub_path,
                target: ExpectedTarget::Opened(&evidence.target),
            };
            let shown = Shown {
                device: mount.device,
                root: &mount.root,
                file: Some(&mount.identity),
                reach: &evidence.reach,
                on_it: OnIt::Nothing,
            };
            judge(&expected, &shown)
        }
        Err(why @ NotInVolume::OtherDevice { .. }) => Verdict::Stale {
            cause: StaleCause::OtherDevice,
            remedy: Err(why.into()),
        },
        Err(why @ NotInVolume::Outside { .. }) => without_remedy(mount, why.into()),
    }
}

/// The mount that the volume of a subpath lacks. Only the subpath shows that an emptyDir had the
/// medium Memory.
fn missing_mount(
    subpath: &VolumeSubpath,
    mount: &SubpathMount,
    volume: &Volume,
) -> Option<Unmounted> {
    let required = MountedVolume::of_subpath(subpath, volume.plugin);
    if volume.is_mount_point {
        let found = volume.fs_type.clone();
        let required = required.filter(|required| !required.required_mount().may_be(&found))?;
        return Some(Unmounted::Volume {
            volume: required,
            found: Some(found),
        });
    }
    let of_memory = || MountedVolume::of_memory(subpath, volume.plugin, &volume.directory);
    let lacking = required.or_else(|| volume.was_memory(mount).then(of_memory));
    lacking.map(|volume| Unmounted::Volume {
        volume,
        found: None,
    })
}

/// True for a pod's `subPath: .` of a kubelet-written volume: it is beside the payloads and never
/// changes.
fn shows_volume_itself(mount: &SubpathMount, volume: &Volume, sub_path: &PathInVolume) -> bool {
    let is_root = sub_path.timestamp.is_none() && sub_path.path.as_os_str().is_empty();
    volume.plugin.writer() == Writer::Kubelet
        && is_root
        && !mount.root.deleted
        && mount.device == volume.device
}

/// True for a share that resolves to its own root, possible after its handles went bad. On a local
/// filesystem the root is a pod's `subPath: .`; a mount that a sidecar makes within its volume has
/// a name there.
fn shows_whole_share(mount: &SubpathMount, volume: &Volume, sub_path: &PathInVolume) -> bool {
    let is_a_volumes = volume.plugin != Plugin::host_path();
    is_a_volumes && !mount.fs_type.is_local() && sub_path.path.as_os_str().is_empty()
}

/// True for a file deleted or replaced on this node while in use: the NFS client gave it a name
/// that no pod requests.
fn shows_file_deleted_here(mount: &SubpathMount, sub_path: &PathInVolume) -> bool {
    let name = sub_path.path.file_name().and_then(OsStr::to_str);
    let number = name
        .and_then(|name| name.strip_prefix(".nfs"))
        .filter(|_| mount.fs_type.has_root_in_source());
    number.is_some_and(|number| {
        number.len() == 24 && number.bytes().all(|digit| digit.is_ascii_hexdigit())
    })
}

/// A subpath whose volume cannot be compared: a deleted root is certain, and bindguard does not
/// judge anything else.
fn without_remedy(mount: &SubpathMount, why: NoRemedy) -> Verdict {
    if mount.root.deleted {
        Verdict::Stale {
            cause: StaleCause::DeletedRoot,
            remedy: Err(why),
        }
    } else {
        Verdict::Foreign
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    use crate::evidence::{FileIdentity, FileKind, Reach, Target};
    use crate::judge::Lack;
    use crate::kubelet::VolumeLayout;
    use crate::mount_table::{Device, FsType, MountRoot};

    const DEVICE: Device = Device { major: 8, minor: 1 };

    fn file(inode: u64, kind: FileKind) -> Observed<FileIdentity> {
        Observed::Seen(FileIdentity {
            device: 1,
            inode,
            kind,
        })
    }

    /// The verdict on a subpath that shows `root` as a file or directory of this `kind`, in a
    /// volume at `/place`.
    fn judged(
        plugin: &str,
        fs_type: &str,
        root: &str,
        kind: FileKind,
        target: Observed<FileIdentity>,
    ) -> Verdict {
        let path = Path::new("/var/lib/kubelet/pods/u/volume-subpaths/v/app/0");
        let subpath = VolumeSubpath::from_path(path, [Path::new("/var/lib/kubelet")]).unwrap();
        let plugin = Plugin::from_folder(plugin.as_ref()).unwrap();
        let evidence = SubpathEvidence {
            mount: Observed::Seen(SubpathMount {
                root: MountRoot::from_kernel(root.as_bytes()),
                device: DEVICE,
                fs_type: FsType(fs_type.to_owned()),
                identity: file(1, kind),
                covers_its_equal: false,
            }),
            reach: Reach::NotNeeded,
            volume: Observed::Seen(Volume {
                plugin,
                directory: "/volume".into(),
                device: DEVICE,
                fs_type: FsType(fs_type.to_owned()),
                place: "/place".into(),
                is_mount_point: plugin.required_mount().is_some(),
                is_newer: true,
                layout: match plugin.writer() {
                    Writer::Kubelet => VolumeLayout::Payload,
                    Writer::Containers => VolumeLayout::Plain,
                },
            }),
            target: Observed::Seen(Target {
                timestamp: None,
                file: target,
            }),
        };
        judge_subpath(&subpath, &evidence)
    }

    const CONFIG_MAP: &str = "kubernetes.io~configmap";
    const EMPTY_DIR: &str = "kubernetes.io~empty-dir";
    const NFS: &str = "kubernetes.io~nfs";

    #[test]
    fn a_volume_itself_is_current_unless_it_is_a_share() {
        let judged = |plugin, fs_type, root| {
            let kind = FileKind::Directory;
            judged(plugin, fs_type, root, kind, file(1, kind))
        };
        assert_eq!(judged(EMPTY_DIR, "ext4", "/place"), Verdict::Current);
        assert_eq!(judged(CONFIG_MAP, "tmpfs", "/place"), Verdict::Current);
        assert_eq!(judged(NFS, "nfs4", "/place/x"), Verdict::Current);
        assert_eq!(
            judged(NFS, "nfs4", "/place"),
            Verdict::Stale {
                cause: StaleCause::WrongRoot,
                remedy: Err(NoRemedy::WholeShare),
            }
        );
        assert!(matches!(
            judged(CONFIG_MAP, "tmpfs", "/place//deleted"),
            Verdict::Stale { .. }
        ));
    }

    #[test]
    fn only_a_directory_that_containers_wrote_is_made_again() {
        for (plugin, fs_type, kind, cause, is_remade) in [
            (
                EMPTY_DIR,
                "ext4",
                FileKind::Directory,
                StaleCause::Replaced,
                true,
            ),
            (
                EMPTY_DIR,
                "ext4",
                FileKind::File,
                StaleCause::Replaced,
                false,
            ),
            (
                CONFIG_MAP,
                "tmpfs",
                FileKind::Directory,
                StaleCause::Placeholder,
                false,
            ),
        ] {
            let verdict = judged(plugin, fs_type, "/place/x", kind, Observed::Absent);
            let Verdict::Orphaned {
                cause: found,
                lacks,
                remake,
            } = verdict
            else {
                panic!("{plugin}: {verdict:?}");
            };
            assert_eq!((found, remake.is_some()), (cause, is_remade), "{plugin}");
            assert_eq!(lacks, Lack::Key("x".into()));
        }
    }

    #[test]
    fn a_name_that_changed_its_kind_is_orphaned() {
        for (shown, found, directory) in [
            (FileKind::File, FileKind::Directory, true),
            (FileKind::Directory, FileKind::File, false),
        ] {
            let verdict = judged(EMPTY_DIR, "ext4", "/place/x", shown, file(2, found));
            let path = "x".into();
            assert_eq!(
                verdict,
                Verdict::Orphaned {
                    cause: StaleCause::Replaced,
                    lacks: Lack::OtherKind { path, directory },
                    remake: None,
                }
            );
        }
    }
}
