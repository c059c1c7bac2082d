mod fit_tests {
    use crate::evidence::Observed;
    use crate::judge::*;
    use crate::kubelet::{Plugin, VolumeLayout};
    use crate::mount_table::{Device, FsType, MountRoot};

    const OWN: Device = Device { major: 8, minor: 1 };
    const OTHER: Device = Device { major: 0, minor: 9 };

    /// A mount and a folder of a volume; a mount point with `newer` if it is newer than the mount.
    fn fit(plugin: &str, mount: (&str, Device, &str), newer: Option<bool>) -> Fit {
        let (fs_type, device, root) = mount;
        let mount = SubpathMount {
            root: MountRoot {
                path: root.into(),
                deleted: false,
            },
            device,
            fs_type: FsType(fs_type.to_owned()),
            identity: Observed::Absent,
            covers_its_equal: false,
        };
        let of_volume = match newer {
            Some(_) => "nfs4",
            None => "ext4",
        };
        let volume = Volume {
            plugin: Plugin::from_folder(plugin.as_ref()).expect("a plugin"),
            directory: "/volume".into(),
            device: OWN,
            fs_type: FsType(of_volume.to_owned()),
            place: "/place".into(),
            is_mount_point: newer.is_some(),
            is_newer: newer.unwrap_or(true),
            layout: VolumeLayout::Plain,
        };
        Fit::of(&mount, &volume)
    }

    #[test]
    fn a_mount_fits_the_volume_that_holds_it_or_held_it() {
        let config_map = "kubernetes.io~configmap";
        let empty_dir = "kubernetes.io~empty-dir";
        let nfs = "kubernetes.io~nfs";
        for (plugin, mount, newer, expected) in [
            (config_map, ("ext4", OWN, "/place/x"), None, Fit::Holds),
            (config_map, ("ext4", OWN, "/placex"), None, Fit::None),
            (config_map, ("ext4", OTHER, "/place/x"), None, Fit::None),
            (config_map, ("tmpfs", OTHER, "/x"), None, Fit::None),
            (empty_dir, ("tmpfs", OTHER, "/x"), None, Fit::NotMounted),
            (empty_dir, ("tmpfs", OWN, "/x"), None, Fit::None),
            (empty_dir, ("ext4", OTHER, "/x"), None, Fit::None),
            (empty_dir, ("tmpfs", OTHER, "/x"), Some(false), Fit::None),
            (nfs, ("nfs4", OTHER, "/x"), None, Fit::NotMounted),
            (nfs, ("ext4", OTHER, "/x"), None, Fit::None),
            (nfs, ("nfs4", OTHER, "/x"), Some(true), Fit::MountedAnew),
            (nfs, ("nfs4", OTHER, "/x"), Some(false), Fit::None),
            (nfs, ("ext4", OTHER, "/x"), Some(true), Fit::None),
        ] {
            let found = fit(plugin, mount, newer);
            assert_eq!(found, expected, "{plugin} {mount:?} {newer:?}");
        }
    }
}

mod reach_tests {
    use crate::judge::*;

    #[test]
    fn a_path_that_is_not_there_is_not_dead() {
        let refused = |number| {
            judge_reach(&Reach::Refused {
                number,
                words: String::new(),
            })
        };
        assert_eq!((refused(2), refused(13), refused(20)), (None, None, None));
        assert!(refused(107).is_some() && refused(116).is_some());
        assert_eq!(
            (
                judge_reach(&Reach::NotProbed),
                judge_reach(&Reach::NotNeeded)
            ),
            (Some(Verdict::NotProbed), None)
        );
    }
}

mod path_in_volume_tests {
    use crate::judge::*;

    #[test]
    fn a_payload_is_recognized_by_the_first_name_alone() {
        for (path, expected) in [
            ("..2026_11_21_05_10_00.1/app.conf", true),
            ("app.conf", false),
            ("x/..2026_11_21_05_10_00.1", false),
            ("", false),
        ] {
            let path = PathInVolume {
                timestamp: None,
                path: path.into(),
            };
            assert_eq!(path.begins_like_a_payload(), expected, "{path:?}");
        }
    }
}

mod subpath_tests {
    use crate::judge::*;
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
                is_mount_point: plugin.mount.is_some(),
                is_newer: true,
                layout: match plugin.writer {
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

mod volume_tests {
    use crate::judge::*;
    use std::path::Path;

    use crate::mount_table::FsType;

    #[test]
    fn a_volume_is_judged_by_the_mount_on_its_directory() {
        let path = "/var/lib/kubelet/pods/u/volumes/kubernetes.io~nfs/data";
        let roots = [Path::new("/var/lib/kubelet")];
        let volume = MountedVolume::from_path(Path::new(path), roots).unwrap();
        let mount = |fs_type: &str, deleted| {
            Observed::Seen(VolumeMount {
                fs_type: FsType(fs_type.to_owned()),
                deleted,
            })
        };
        let deleted = || without_repair(StaleCause::DeletedRoot, NoRemedy::MountedByDriver);
        let unmounted = |found: Option<&str>| {
            Verdict::Unmounted(Unmounted::Volume {
                volume: volume.clone(),
                found: found.map(|fs_type| FsType(fs_type.to_owned())),
            })
        };
        for (mount, expected, of_plain) in [
            (mount("nfs4", false), Verdict::Current, Verdict::Current),
            (mount("nfs4", true), deleted(), deleted()),
            (
                mount("ext4", false),
                unmounted(Some("ext4")),
                Verdict::Current,
            ),
            (Observed::Absent, unmounted(None), Verdict::Current),
        ] {
            assert_eq!(judge_volume(&volume, &mount), expected, "{mount:?}");
            assert_eq!(judge_plain_volume(&mount), of_plain, "{mount:?}");
        }
    }
}

mod host_root_tests {
    use crate::judge::*;

    #[test]
    fn a_shared_root_stays_for_a_shared_bind_only() {
        let host = Observed::Seen(HostMount {
            mount_point: "/".into(),
            passes_umounts_on: true,
        });
        for (rootfs, any_shared, is_edited) in [
            ("shared", true, false),
            ("shared", false, true),
            ("rprivate", true, true),
            ("rslave", false, false),
        ] {
            let rootfs = RootfsPropagation::Set(rootfs.to_owned());
            let requested = RequestedPropagation::Private;
            let verdict = judge_host_root(requested, true, None, &rootfs, any_shared, &host);
            let Verdict::Pinning(pinning) = verdict else {
                panic!("{rootfs:?}: {verdict:?}");
            };
            assert_eq!(pinning.rootfs, is_edited, "{rootfs:?} {any_shared}");
        }
    }
}

mod place_tests {
    use crate::judge::*;

    const OLD: &str = "..2026_11_21_05_10_00.1";
    const NEW: &str = "..2026_11_21_05_20_00.2";

    /// The verdict on a mount of a file in the payload `shown`, with `on_it` on the mount. A new
    /// bind would show the payload `current`.
    fn judged(shown: &str, current: &str, on_it: OnIt) -> Verdict {
        let timestamp = |name: &str| TimestampDirectory::from_name(name.as_ref()).unwrap();
        let (device, current) = (Device { major: 8, minor: 1 }, timestamp(current));
        let expected = Expected {
            directory: Path::new("/volume"),
            device,
            writer: Writer::Kubelet,
            layout: VolumeLayout::Payload,
            sub_path: PathInVolume {
                timestamp: Some(timestamp(shown)),
                path: "app.conf".into(),
            },
            target: ExpectedTarget::InPayload(&current),
        };
        let root = MountRoot::from_kernel(format!("/v/{shown}/app.conf").as_bytes());
        let shown = Shown {
            device,
            root: &root,
            file: None,
            reach: &Reach::NotNeeded,
            on_it,
        };
        judge(&expected, &shown)
    }

    #[test]
    fn mounts_on_a_mount_keep_it_from_being_replaced() {
        assert!(matches!(
            judged(OLD, NEW, OnIt::Nothing),
            Verdict::Stale { remedy: Ok(_), .. }
        ));
        assert!(matches!(
            judged(OLD, NEW, OnIt::Inside),
            Verdict::Stale {
                remedy: Err(NoRemedy::Occupied),
                ..
            }
        ));
        assert_eq!(judged(OLD, NEW, OnIt::Cover), Verdict::Foreign);
        assert_eq!(judged(NEW, NEW, OnIt::Inside), Verdict::Current);
    }
}
