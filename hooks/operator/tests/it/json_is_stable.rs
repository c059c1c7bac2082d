//! Programs get exactly what docs/json.md and docs/journal.md show: a key or a value that is
//! renamed fails here.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use bindguard_core::identity::{Identity, PodName};
use bindguard_core::judge::{
    self, Finding, PathInVolume, Remedy, StaleCause, Verdict, VerdictName,
};
use bindguard_core::kubelet::{VolumeLayout, Writer};
use bindguard_core::mount_table::MountTable;
use bindguard_core::places::{KindName, Places, SourceKind};
use bindguard_core::policy::Scope;
use bindguard_core::report::{
    BindReport, MountResult, Outcome, PlannedAction, RefreshedMount, Report,
};
use bindguard_operator::doctor::{DoctorReport, Point, PointStatus, host_root};
use bindguard_operator::holders::{HeldMount, Holder, HoldersReport, ReleaseCommand};
use bindguard_operator::namespaces::{Checked, HeldBy};
use bindguard_operator::node_report::{ISSUE, NodeBind, NodeReport, Note, Origin};
use bindguard_operator::old_binds::{BindKind, OldBinds, OldFiles, PinnedMounts};
use bindguard_operator::pods::{ContainerState, MountInVolume, PodContainer};
use serde::Serialize;

/// The `json` block below a heading of the document.
fn shown(heading: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/json.md");
    let text = fs::read_to_string(path).unwrap();
    let (_, below) = text.split_once(&format!("\n## {heading}\n")).unwrap();
    let (_, block) = below.split_once("```json\n").unwrap();
    block.split("\n```").next().unwrap().to_owned()
}

fn pod(namespace: &str, name: &str) -> PodName {
    let some = |word: &str| Some(word.to_owned());
    PodName {
        uid: some("eea5c325"),
        namespace: some(namespace),
        name: some(name),
    }
}

fn stale() -> NodeReport {
    let source = "/var/lib/kubelet/pods/eea5c325/volume-subpaths/conf/app/0";
    let sub_path = PathInVolume {
        timestamp: None,
        path: "app.conf".into(),
    };
    let (writer, layout, method) = (
        Writer::Kubelet,
        VolumeLayout::Payload,
        judge::RepairMethod::Rebind,
    );
    let remedy = Remedy {
        volume: "/volume".into(),
        sub_path,
        writer,
        layout,
        method,
    };
    let finding = Finding {
        bind: None,
        source: source.into(),
        destination: None,
        kind: SourceKind::from_path(source.as_ref(), &Places::default(), Scope::default()),
        verdict: Verdict::Stale {
            cause: StaleCause::DeletedRoot,
            remedy: Ok(remedy),
        },
    };
    let bind = BindReport {
        finding,
        outcome: Some(Outcome::Planned {
            action: PlannedAction::Rebind,
        }),
    };
    let container = PodContainer {
        id: "bb344d713010".to_owned(),
        name: Some("app".to_owned()),
        state: Some(ContainerState::Exited),
        attempt: Some(4),
        pod: PodName::default(),
        guarded: None,
        shim_version: None,
    };
    let origin = Origin {
        issue: ISSUE,
        original_source:
            "/pods/eea5c325/volumes/kubernetes.io~configmap/conf/..2026_11_21_05_10_00.123456789/app.conf//deleted"
                .to_owned(),
        original_destination: source.into(),
    };
    let bind = NodeBind {
        bind,
        pod: Some(pod("default", "web")),
        container: Some(container),
        origin: Some(origin),
        guarded: Some(true),
        notes: vec![Note::Guarded],
        command: Some(format!("bindguard repair {source}")),
    };
    NodeReport {
        binds: vec![bind],
        old_files: vec![old_files()],
        old_binds: vec![old_binds()],
        pinned: Vec::new(),
        mounts_below_emptydir: vec![mount_in_volume()],
        checked: 12,
        problems: Vec::new(),
        duration_us: 812,
    }
}

fn mount_in_volume() -> MountInVolume {
    let place =
        "/var/lib/kubelet/pods/0d63f1a2/volumes/kubernetes.io~empty-dir/scratch/disk".to_owned();
    MountInVolume {
        pod: old_files().pod,
        fs_type: "ext4".to_owned(),
        erased: true,
        command: format!("umount {place}"),
        mount_point: place.into(),
    }
}

fn old_files() -> OldFiles {
    let source = "/var/lib/kubelet/pods/0d63f1a2/volumes/kubernetes.io~configmap/conf/app.conf";
    let container = PodContainer {
        id: "5c1e20ab77f1".to_owned(),
        name: Some("app".to_owned()),
        state: Some(ContainerState::Running),
        attempt: Some(0),
        pod: PodName::default(),
        guarded: None,
        shim_version: None,
    };
    OldFiles {
        pod: PodName {
            uid: Some("0d63f1a2".to_owned()),
            ..pod("default", "cache")
        },
        container,
        opted_in: Some(false),
        files: vec![RefreshedMount::new(
            "/etc/app/app.conf".as_ref(),
            source.as_ref(),
            MountResult::Stale,
        )],
        command: Some("bindguard refresh --pod default/cache".to_owned()),
    }
}

fn old_binds() -> OldBinds {
    let source = "/var/lib/kubelet/pods/0d63f1a2/volumes/kubernetes.io~csi/pv/mount";
    let OldFiles { pod, container, .. } = old_files();
    OldBinds {
        pod,
        container,
        engine: None,
        what: BindKind::Volumes,
        opted_in: Some(false),
        mounts: vec![RefreshedMount::new(
            "/data".as_ref(),
            source.as_ref(),
            MountResult::Stale,
        )],
        command: Some("bindguard refresh --pod default/cache --what volumes".to_owned()),
    }
}

fn held() -> HoldersReport {
    let mount = |mount_point: &str, propagation, unmount_propagates| HeldMount {
        mount_point: mount_point.into(),
        root: "/".to_owned(),
        fs_type: "ext4".to_owned(),
        device: "8:16".to_owned(),
        propagation,
        unmount_propagates,
    };
    let run = "kubectl -n monitoring delete pod exporter-x7k2p".to_owned();
    let holder = Holder {
        namespace: 4_026_532_555,
        held_by: HeldBy::Process {
            pid: 4242,
            command: "node_exporter".to_owned(),
            cgroup: String::new(),
        },
        processes: 2,
        container: Some("bb344d713010".to_owned()),
        pod: Some(pod("monitoring", "exporter-x7k2p")),
        mounts: vec![mount("/host/mnt/disk", "private", false)],
        release: vec![ReleaseCommand {
            effect: "or delete the pod, so that its controller creates a new one",
            command: run,
        }],
    };
    HoldersReport {
        path: "/mnt/disk".into(),
        mounts: vec![mount("/mnt/disk", "shared", true)],
        holders: vec![holder],
        note: None,
        checked: Checked {
            processes: 512,
            namespaces: 31,
        },
        problems: Vec::new(),
    }
}

fn checked() -> Report {
    let some = |word: &str| Some(word.to_owned());
    let [mut bind] = <[NodeBind; 1]>::try_from(stale().binds)
        .unwrap()
        .map(|bind| bind.bind);
    bind.finding.destination = Some("/etc/app/app.conf".into());
    Report {
        bundle: Some("/run/containerd/io.containerd.runtime.v2.task/k8s.io/bb344d713010".into()),
        container: Identity {
            container: some("app"),
            pod: PodName {
                uid: some("eea5c325"),
                namespace: some("default"),
                name: some("web"),
            },
        },
        binds: vec![bind],
        foreign: 6,
        duration_us: 287,
        ..Report::default()
    }
}

#[test]
fn matches_the_document() {
    let table = MountTable::from_mountinfo(b"1 0 8:1 / / rw - ext4 /dev/sda1 rw\n").unwrap();
    let doctor = DoctorReport {
        points: vec![Point {
            name: "host-root",
            check: host_root(&table),
        }],
    };
    // The tests of the other verbs check their output.
    assert_eq!(squeezed(&shown("`diagnose`, `repair`")), printed(&stale()));
    assert_eq!(squeezed(&shown("`holders`")), printed(&held()));
    assert_eq!(squeezed(&shown("`doctor`, `selftest`")), printed(&doctor));
    assert_eq!(squeezed(&shown("`check`")), printed(&checked()));
}

/// A report as `--json` prints it, without regard to white space.
fn printed(report: &impl Serialize) -> String {
    serde_json::to_string(report).unwrap()
}

/// JSON without the white space outside of its strings: the document puts small objects on a line.
fn squeezed(json: &str) -> String {
    let (mut in_string, mut is_escaped) = (false, false);
    json.chars()
        .filter(|c| {
            let stays = in_string || !c.is_whitespace();
            match c {
                '"' if !is_escaped => in_string = !in_string,
                _ => {}
            }
            is_escaped = in_string && *c == '\\' && !is_escaped;
            stays
        })
        .collect()
}

/// The JSON form of a value without fields, or its `result` or `held_by`.
fn name(value: &impl Serialize) -> String {
    let value = serde_json::to_value(value).unwrap();
    value
        .as_str()
        .or(value["result"].as_str())
        .or(value["held_by"].as_str())
        .unwrap()
        .to_owned()
}

#[test]
fn every_value_is_in_a_table_of_the_document() {
    use PlannedAction::{MakeRslave, PointAtVolume, Rebind, Refuse, Remake};
    use VerdictName::{Current, Dead, Foreign, Orphaned, Pinning, Stale, Unknown, Unmounted};
    let verdicts = [Current, Stale, Orphaned, Unmounted, Dead, Pinning, Unknown];
    let kinds = [
        KindName::Subpath,
        KindName::Volume,
        KindName::InVolume,
        KindName::HostRoot,
        KindName::Foreign,
    ];
    let why = "why".to_owned();
    let outcomes = [
        Outcome::Rebound { tries: 1 },
        Outcome::AlreadyCurrent,
        Outcome::Detached,
        Outcome::PointedAtVolume {
            source: "/volume".into(),
        },
        Outcome::MadeRslave,
        Outcome::NeedsSharedMount {
            command: why.clone(),
        },
        Outcome::Planned { action: Rebind },
        Outcome::Refused,
        Outcome::Failed { error: why },
    ];
    let actions = [Rebind, Remake, PointAtVolume, MakeRslave, Refuse];
    use ContainerState::{Created, Exited, Running};
    let states = [Created, Running, Exited, ContainerState::Unknown];
    let holders = [
        HeldBy::Process {
            pid: 1,
            command: String::new(),
            cgroup: String::new(),
        },
        HeldBy::Descriptor {
            pid: 1,
            command: String::new(),
        },
        HeldBy::BindMount {
            path: "/run/netns/a".into(),
        },
        HeldBy::OwnNamespace,
    ];
    let statuses = [PointStatus::Ok, PointStatus::Failed, PointStatus::Unknown];

    let journal = include_str!("../../../../docs/journal.md");
    for row in verdicts.iter().map(name).chain(kinds.iter().map(name)) {
        assert!(
            journal.contains(&format!("\n| `{row}` | ")),
            "docs/journal.md has no row {row}"
        );
    }
    for word in outcomes.iter().map(name).chain(actions.iter().map(name)) {
        assert!(
            journal.contains(&format!("`{word}`")),
            "docs/journal.md has no {word}"
        );
    }
    let json = include_str!("../../../../docs/json.md");
    for word in states
        .iter()
        .map(name)
        .chain(holders.iter().map(name))
        .chain(statuses.iter().map(name))
    {
        assert!(
            json.contains(&format!("`{word}`")),
            "docs/json.md has no {word}"
        );
    }
    for verdict in verdicts.into_iter().chain([Foreign]) {
        assert_eq!(
            name(&verdict),
            verdict.as_str(),
            "the text names it as JSON does"
        );
    }
    for kind in kinds {
        assert_eq!(name(&kind), kind.as_str(), "the text names it as JSON does");
    }
}

/// A container can give any name to a file of its volume, and to a mount point.
#[test]
fn a_path_need_not_be_text() {
    let path = PathBuf::from(OsStr::from_bytes(b"/a/\xff"));
    let mount = HeldMount {
        mount_point: path.clone(),
        root: "/".to_owned(),
        fs_type: "tmpfs".to_owned(),
        device: "0:55".to_owned(),
        propagation: "private",
        unmount_propagates: false,
    };
    let held = HoldersReport {
        path: path.clone(),
        mounts: vec![mount],
        ..HoldersReport::default()
    };
    let origin = Origin {
        issue: ISSUE,
        original_source: "/".to_owned(),
        original_destination: path.clone(),
    };
    let pinned = PinnedMounts {
        pod: PodName::default(),
        container: old_files().container,
        places: vec![path],
        command: None,
    };
    for (json, count) in [
        (serde_json::to_string(&held), 2),
        (serde_json::to_string(&origin), 1),
        (serde_json::to_string(&pinned), 1),
    ] {
        let json = json.unwrap();
        assert_eq!(json.matches("/a/\u{fffd}").count(), count, "{json}");
    }
}
