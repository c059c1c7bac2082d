//! Every mountinfo and config.json captured from real kubelets is read and judged.
//!
//! The captures contain only the subpaths' own lines, so the volume's place is derived from the
//! mount's root. Each test chooses the payload that is current "today".

#![allow(
    clippy::disallowed_methods,
    reason = "a test says what it expects, and its fixtures are files"
)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use bindguard_core::evidence::{
    FileIdentity, FileKind, Observed, Reach, SubpathEvidence, SubpathMount, Target, Volume,
};
use bindguard_core::judge::{
    Finding, Lack, PathInVolume, Plan, StaleCause, Verdict, judge_host_root, judge_subpath,
};
use bindguard_core::kubelet::{Plugin, TimestampDirectory, VolumeSubpath};
use bindguard_core::mount_table::{MountEntry, MountTable};
use bindguard_core::places::{KindName, Places, SourceKind};
use bindguard_core::policy::{Policy, Scope};
use bindguard_core::spec::{RequestedPropagation, SpecView};

const SHOWN: FileIdentity = FileIdentity {
    device: 1,
    inode: 10,
    kind: FileKind::File,
};

fn captured(prefix: &str, suffix: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let nodes = fs::read_dir(root)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_dir());
    let files = nodes.flat_map(|node| {
        fs::read_dir(node)
            .unwrap()
            .map(|entry| entry.unwrap().path())
    });
    let wanted = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_str().unwrap();
        name.starts_with(prefix) && name.ends_with(suffix)
    };
    let mut found: Vec<_> = files
        .filter(wanted)
        .map(|path| (path.clone(), fs::read(&path).unwrap()))
        .collect();
    found.sort();
    assert!(!found.is_empty(), "no {prefix}*{suffix} among the fixtures");
    found
}

fn subpath(entry: &MountEntry) -> Option<VolumeSubpath> {
    VolumeSubpath::from_path(&entry.mount_point, Places::default().kubelet_roots())
}

fn judge(entry: &MountEntry, evidence: &SubpathEvidence) -> Verdict {
    judge_subpath(&subpath(entry).unwrap(), evidence)
}

/// The volume of a captured subpath, as the node had it.
fn volume(table: &MountTable, entry: &MountEntry, subpath: &VolumeSubpath) -> Observed<Volume> {
    for plugin in Plugin::all() {
        let directory = subpath.volume_directory(plugin);
        let seen = |place: PathBuf, is_mount_point| {
            Observed::Seen(Volume {
                plugin,
                directory: directory.clone(),
                device: entry.device,
                fs_type: entry.fs_type.clone(),
                place,
                is_mount_point,
                is_newer: true,
                layout: plugin.layout(),
            })
        };
        if let Some(mount) = table.stack_at(&directory).next() {
            return seen(mount.root.path.clone(), true);
        }
        let folder = format!(
            "/pods/{}/volumes/{plugin}/{}",
            subpath.pod_uid(),
            subpath.volume()
        );
        let root = entry.root.path.to_str().unwrap();
        if let Some(at) = root.find(&folder) {
            return seen(PathBuf::from(&root[..at + folder.len()]), false);
        }
    }
    Observed::Absent
}

fn evidence(table: &MountTable, entry: &MountEntry, target: Observed<Target>) -> SubpathEvidence {
    let mount = SubpathMount {
        root: entry.root.clone(),
        device: entry.device,
        fs_type: entry.fs_type.clone(),
        identity: Observed::Seen(SHOWN),
        covers_its_equal: false,
    };
    let volume = volume(table, entry, &subpath(entry).unwrap());
    SubpathEvidence {
        mount: Observed::Seen(mount),
        reach: Reach::NotNeeded,
        volume,
        target,
    }
}

/// A target of the same file, in the payload that the mount shows.
fn same_target(table: &MountTable, entry: &MountEntry) -> Observed<Target> {
    let seen = evidence(table, entry, Observed::Absent);
    let (Observed::Seen(mount), Observed::Seen(volume)) = (&seen.mount, &seen.volume) else {
        return Observed::Absent;
    };
    let timestamp = PathInVolume::from_mount(mount, volume).unwrap().timestamp;
    Observed::Seen(Target {
        timestamp,
        file: Observed::Seen(SHOWN),
    })
}

/// A target in a payload that was written since.
fn newer_target() -> Observed<Target> {
    let timestamp = TimestampDirectory::from_name("..2026_11_21_23_59_59.1".as_ref());
    Observed::Seen(Target {
        timestamp,
        file: Observed::Seen(FileIdentity { inode: 11, ..SHOWN }),
    })
}

/// Each captured subpath line of the files `mountinfo-CASE-MOMENT.txt`.
fn each_subpath(moment: &str, mut check: impl FnMut(&str, &MountTable, &MountEntry)) {
    let mut checked = 0;
    for (path, text) in captured("mountinfo-", &format!("-{moment}.txt")) {
        let table = MountTable::from_mountinfo(&text).unwrap();
        for entry in table
            .entries()
            .iter()
            .filter(|entry| subpath(entry).is_some())
        {
            check(path.to_str().unwrap(), &table, entry);
            checked += 1;
        }
    }
    assert!(checked > 10, "{checked} subpaths captured {moment}");
}

#[test]
fn every_mountinfo_is_read_and_written_back_byte_for_byte() {
    for (path, text) in captured("mountinfo-", ".txt") {
        let table = MountTable::from_mountinfo(&text)
            .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        assert_eq!(
            String::from_utf8_lossy(&table.to_mountinfo()),
            String::from_utf8_lossy(&text),
            "{}",
            path.display()
        );
    }
}

#[test]
fn before_an_update_every_subpath_is_current_or_foreign() {
    each_subpath("before", |file, table, entry| {
        let verdict = judge(entry, &evidence(table, entry, same_target(table, entry)));
        let expected = if file.contains("hostpath") {
            Verdict::Foreign
        } else {
            Verdict::Current
        };
        assert_eq!(verdict, expected, "{file}");
    });
}

#[test]
fn after_an_update_every_deleted_root_is_stale_and_its_sub_path_is_known() {
    each_subpath("after", |file, table, entry| {
        assert!(entry.root.deleted, "{file}");
        let seen = evidence(table, entry, newer_target());
        let Verdict::Stale {
            cause: StaleCause::DeletedRoot,
            remedy,
        } = judge(entry, &seen)
        else {
            panic!("{file}: {:?}", judge(entry, &seen));
        };
        match remedy {
            Err(_) => assert!(file.contains("hostpath"), "{file}: no remedy"),
            Ok(remedy) => {
                let name = remedy.sub_path.path.file_name().unwrap().to_str().unwrap();
                assert!(
                    entry.root.path.ends_with(&remedy.sub_path.path) && !name.starts_with("..2"),
                    "{file}: {name}"
                );
            }
        }
    });
}

#[test]
fn after_an_update_a_subpath_whose_key_is_gone_is_orphaned() {
    let gone = || match newer_target() {
        Observed::Seen(target) => Observed::Seen(Target {
            file: Observed::Absent,
            ..target
        }),
        other => other,
    };
    each_subpath("after", |file, table, entry| {
        let verdict = judge(entry, &evidence(table, entry, gone()));
        let orphaned = matches!(
            &verdict,
            Verdict::Orphaned {
                cause: StaleCause::DeletedRoot,
                lacks: Lack::Key(_),
                ..
            }
        );
        assert!(orphaned || file.contains("hostpath"), "{file}: {verdict:?}");
    });
}

#[test]
fn the_directory_that_a_kubelet_binds_for_a_removed_key_is_orphaned() {
    let mut seen = 0;
    for (file, text) in captured("mountinfo-keydel", "-restarted.txt") {
        let table = MountTable::from_mountinfo(&text).unwrap();
        let gone = Observed::Seen(Target {
            timestamp: None,
            file: Observed::Absent,
        });
        let verdict = judge(
            &table.entries()[0],
            &evidence(&table, &table.entries()[0], gone),
        );
        assert!(
            matches!(
                verdict,
                Verdict::Orphaned {
                    cause: StaleCause::Placeholder,
                    ..
                }
            ),
            "{}: {verdict:?}",
            file.display()
        );
        seen += 1;
    }
    assert!(seen >= 2);
}

#[test]
fn every_config_is_a_spec_but_the_one_that_was_cut_off() {
    let mut kinds = BTreeMap::new();
    for (path, json) in captured("config-", ".json") {
        let view = match SpecView::from_bytes(&json) {
            Ok(view) => view,
            Err(error) => {
                assert!(json.is_empty(), "{}: {error}", path.display());
                continue;
            }
        };
        assert_eq!(view.edited(&[]).unwrap(), json, "{}", path.display());
        for bind in view.binds() {
            let kind = SourceKind::from_path(bind.source(), &Places::default(), Scope::default());
            let name = path.file_name().unwrap().to_str().unwrap();
            assert!(
                kind != SourceKind::HostRoot || name.contains("hostroot"),
                "{}: {}",
                path.display(),
                bind.source().display()
            );
            *kinds.entry(kind.name()).or_insert(0) += 1;
        }
        assert!(
            path.to_str().unwrap().contains("-pause")
                || view
                    .annotation("io.kubernetes.cri.container-name")
                    .is_some()
        );
    }
    assert!(
        kinds[&KindName::Subpath] > 50
            && kinds[&KindName::HostRoot] > 4
            && kinds[&KindName::Foreign] > 100,
        "{kinds:?}"
    );
}

#[test]
fn a_captured_host_root_bind_is_made_rslave_once() {
    use bindguard_core::evidence::HostMount;
    let host = Observed::Seen(HostMount {
        mount_point: "/".into(),
        passes_umounts_on: true,
    });
    let findings = |view: &SpecView<'_>| -> Vec<Finding> {
        let roots = view
            .binds()
            .iter()
            .filter(|bind| bind.source() == Path::new("/"));
        let judged = roots.map(|bind| Finding {
            bind: Some(bind.index),
            source: bind.source().into(),
            destination: Some(bind.destination().into()),
            kind: SourceKind::HostRoot,
            verdict: judge_host_root(
                bind.propagation,
                bind.is_recursive,
                None,
                &view.rootfs_propagation,
                false,
                &host,
            ),
        });
        judged.collect()
    };
    let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/seeds/spec");
    let not_recursive = fs::read(seeds.join("nonrecursive-host-root.json")).unwrap();
    let view = SpecView::from_bytes(&not_recursive).unwrap();
    assert_eq!(findings(&view)[0].verdict, Verdict::Current);
    for (path, json) in captured("config-hostroot", ".json") {
        let view = SpecView::from_bytes(&json).unwrap();
        let plan = Plan::from_findings(&findings(&view), &Policy::default());
        let root_binds = || {
            view.binds()
                .iter()
                .filter(|bind| bind.source() == Path::new("/"))
        };
        let requested_rprivate =
            root_binds().any(|bind| bind.propagation == RequestedPropagation::Private);
        assert_eq!(!plan.is_empty(), requested_rprivate, "{}", path.display());
        let edited = view.edited(&plan.edits).unwrap();
        let again = SpecView::from_bytes(&edited).unwrap();
        assert!(
            Plan::from_findings(&findings(&again), &Policy::default()).is_empty(),
            "{}",
            path.display()
        );
    }
}
