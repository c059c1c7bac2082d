//! Mount tables captured from real kubelets, without any file of the node. Deleted sources are
//! certainly stale, and no verdict is possible on existing sources.

#![allow(clippy::disallowed_methods, reason = "the fixtures are files")]

use std::fs;
use std::path::{Path, PathBuf};

use bindguard_core::mount_table::MountTable;
use bindguard_core::places::Places;
use bindguard_core::policy::Policy;
use bindguard_operator::pods::Pods;
use bindguard_operator::survey_recorded;

fn captured() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../core/tests/fixtures");
    let nodes = fs::read_dir(root)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_dir());
    let files = nodes.flat_map(|node| {
        fs::read_dir(node)
            .unwrap()
            .map(|entry| entry.unwrap().path())
    });
    let mut tables: Vec<_> = files
        .filter(|path| {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            name.starts_with("mountinfo-")
                && (name.ends_with("-after.txt") || name.ends_with("-before.txt"))
        })
        .collect();
    tables.sort();
    tables
}

#[test]
fn deleted_roots_are_found_in_a_mount_table_alone() {
    let nothing = tempfile::tempdir().unwrap();
    let mut stale = 0;
    for path in captured() {
        let table = MountTable::from_mountinfo(&fs::read(&path).unwrap()).unwrap();
        let report = survey_recorded(
            &Policy::default(),
            &Places::default(),
            &Pods::default(),
            &table,
            nothing.path(),
            |_| true,
        );
        // The kubelet's own mounts are no foreign ones.
        assert_eq!(report.mounts_below_emptydir, []);
        for bind in &report.binds {
            let entry = table.stack_at(bind.bind.source()).last().unwrap();
            let expected = if entry.root.deleted {
                "stale"
            } else {
                "unknown"
            };
            assert_eq!(
                bind.bind.verdict().as_str(),
                expected,
                "{} of {}: {:?}",
                entry.mount_point.display(),
                path.display(),
                bind
            );
            assert_eq!(bind.origin.is_some(), entry.root.deleted);
            stale += usize::from(entry.root.deleted);
        }
    }
    assert!(stale > 10, "only {stale} stale subpaths among the fixtures");
}

/// A line that cannot be read may be a mount on any subpath, or a volume's mount.
#[test]
fn nothing_is_certain_while_a_line_cannot_be_read() {
    let node = tempfile::tempdir().unwrap();
    let volume = "var/lib/kubelet/pods/u/volumes/kubernetes.io~nfs/data";
    fs::create_dir_all(node.path().join(volume)).unwrap();
    for path in captured() {
        let text = [fs::read(&path).unwrap(), b"7 1 zero /x /y\n".to_vec()].concat();
        let table = MountTable::from_mountinfo_in_part(&text);
        let report = survey_recorded(
            &Policy::default(),
            &Places::default(),
            &Pods::default(),
            &table,
            node.path(),
            |_| true,
        );
        assert!(
            report
                .binds
                .iter()
                .any(|bind| bind.bind.source().ends_with(volume))
        );
        for bind in &report.binds {
            assert_eq!(bind.bind.verdict().as_str(), "unknown", "{bind:?}");
            assert!(bind.origin.is_none());
        }
        let problems = report.problems.join("\n");
        assert!(problems.contains("`7 1 zero /x /y`"), "{problems}");
    }
}

const STALE: &str = "271 1 8:1 /data/kubelet/pods/u/volumes/kubernetes.io~configmap/c/..2026_01_01_00_00_00.1/f//deleted /data/kubelet/pods/u/volume-subpaths/c/app/0 rw - ext4 /dev/sda1 rw\n";

/// Many nodes have their kubelet's folder on another disk, behind a link.
#[test]
fn a_kubelet_root_behind_a_symlink_is_read_below_the_directory() {
    let text = format!("1 0 8:1 / / rw - ext4 /dev/sda1 rw\n{STALE}");
    let table = MountTable::from_mountinfo(text.as_bytes()).unwrap();
    for (link, target) in [
        ("var/lib/kubelet", "/data/kubelet"),
        ("var/lib", "../data"),
        ("var/lib/kubelet", "../../data/./kubelet"),
    ] {
        let node = tempfile::tempdir().unwrap();
        let volume = "data/kubelet/pods/u/volumes/kubernetes.io~nfs/n";
        fs::create_dir_all(node.path().join(volume)).unwrap();
        fs::create_dir_all(
            node.path()
                .join("data/kubelet/pods/u/volume-subpaths/c/app/0"),
        )
        .unwrap();
        fs::create_dir_all(node.path().join(link).parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(target, node.path().join(link)).unwrap();
        let places = Places {
            kubelet_roots: vec!["/var/lib/kubelet".into(), "/data/kubelet".into()],
            ..Places::default()
        };
        let (policy, pods) = (Policy::default(), Pods::default());
        let report = survey_recorded(&policy, &places, &pods, &table, node.path(), |_| true);
        let found: Vec<_> = report
            .binds
            .iter()
            .map(|bind| (bind.bind.verdict().as_str(), bind.bind.source().to_owned()))
            .collect();
        let root = Path::new("/var/lib/kubelet/pods/u");
        assert_eq!(
            found,
            [
                ("stale", root.join("volume-subpaths/c/app/0")),
                ("unmounted", root.join("volumes/kubernetes.io~nfs/n")),
            ],
            "{link}: {report:?}"
        );
        assert_eq!(report.problems, [] as [&str; 0]);
    }
}
