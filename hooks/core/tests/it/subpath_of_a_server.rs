//! Subpaths of an NFS volume whose own handle went bad: the verdict depends on what the volume has
//! by that name today.

use std::path::Path;

use bindguard_core::evidence::{
    FileIdentity, FileKind, Observed, Reach, SubpathEvidence, SubpathMount, Target, Volume,
};
use bindguard_core::judge::{Verdict, judge_subpath};
use bindguard_core::kubelet::{Plugin, VolumeLayout, VolumeSubpath};
use bindguard_core::mount_table::{Device, FsType, MountRoot};

const DEVICE: Device = Device {
    major: 0,
    minor: 26,
};

fn stale_handle() -> Reach {
    Reach::Refused {
        number: 116,
        words: "Stale file handle".to_owned(),
    }
}

fn file(inode: u64) -> Observed<FileIdentity> {
    Observed::Seen(FileIdentity {
        device: 26,
        inode,
        kind: FileKind::File,
    })
}

fn mount_of(path: &str) -> Observed<SubpathMount> {
    let root = MountRoot {
        path: path.into(),
        deleted: false,
    };
    let fs_type = FsType("nfs4".to_owned());
    Observed::Seen(SubpathMount {
        root,
        device: DEVICE,
        fs_type,
        identity: file(1),
        covers_its_equal: false,
    })
}

fn volume_on(fs_type: &str) -> Observed<Volume> {
    Observed::Seen(Volume {
        plugin: Plugin::from_folder("kubernetes.io~nfs".as_ref()).unwrap(),
        directory: "/var/lib/kubelet/pods/u/volumes/kubernetes.io~nfs/data".into(),
        device: DEVICE,
        fs_type: FsType(fs_type.to_owned()),
        place: "/share".into(),
        is_mount_point: true,
        is_newer: true,
        layout: VolumeLayout::Plain,
    })
}

fn judged(evidence: &SubpathEvidence) -> (&'static str, String) {
    let path = Path::new("/var/lib/kubelet/pods/u/volume-subpaths/data/app/0");
    let subpath = VolumeSubpath::from_path(path, [Path::new("/var/lib/kubelet")]).unwrap();
    let verdict: Verdict = judge_subpath(&subpath, evidence);
    (
        verdict.name().as_str(),
        verdict.reason().unwrap_or_default(),
    )
}

fn evidence(root: &str, reach: Reach, found: Observed<FileIdentity>) -> SubpathEvidence {
    let target = Observed::Seen(Target {
        timestamp: None,
        file: found,
    });
    SubpathEvidence {
        mount: mount_of(root),
        reach,
        volume: volume_on("nfs4"),
        target,
    }
}

#[test]
fn a_healthy_one_is_current() {
    assert_eq!(
        judged(&evidence("/share/state", Reach::Alive, file(1))).0,
        "current"
    );
}

#[test]
fn a_stale_handle_is_judged_by_the_file_that_has_the_name_now() {
    for (found, verdict) in [(file(2), "stale"), (Observed::Absent, "orphaned")] {
        let (found, reason) = judged(&evidence("/share/state", stale_handle(), found));
        assert_eq!(found, verdict, "{reason}");
        assert!(reason.contains("Stale file handle"), "{reason}");
    }
    let target_unread = SubpathEvidence {
        target: Observed::Unreadable("its volume did not answer".to_owned()),
        ..evidence("/share/state", stale_handle(), file(2))
    };
    assert_eq!(judged(&target_unread).0, "dead");
}

/// SMB's client looks up a file by its path, and may no longer find the file.
#[test]
fn a_file_gone_from_its_server_is_judged_by_the_file_that_has_the_name_now() {
    let gone = Reach::Refused {
        number: 2,
        words: "No such file or directory".to_owned(),
    };
    let shows_nothing = |reach, found| {
        let mut evidence = evidence("/share/state", reach, found);
        let Observed::Seen(mount) = &mut evidence.mount else {
            panic!("{evidence:?}")
        };
        mount.fs_type = FsType("cifs".to_owned());
        mount.identity = Observed::Seen(FileIdentity::of_what_is_gone(FileKind::File));
        judged(&evidence)
    };
    for reach in [gone, stale_handle()] {
        assert_eq!(shows_nothing(reach.clone(), file(2)).0, "stale");
        assert_eq!(shows_nothing(reach, Observed::Absent).0, "orphaned");
    }
}

#[test]
fn a_mount_that_cannot_even_be_held_is_dead_by_its_own_answer_alone() {
    let unheld = |reach| SubpathEvidence {
        mount: Observed::Unreadable("open it to look at it".to_owned()),
        ..evidence("/share/state", reach, file(2))
    };
    assert_eq!(judged(&unheld(stale_handle())).0, "dead");
    assert_eq!(judged(&unheld(Reach::Alive)).0, "unknown");
    assert_eq!(judged(&unheld(Reach::NotNeeded)).0, "unknown");
}

#[test]
fn a_name_that_the_client_gave_is_no_sub_path() {
    let (found, reason) = judged(&evidence(
        "/share/db/.nfs000000000000019d00000001",
        Reach::Alive,
        file(1),
    ));
    assert_eq!(found, "stale", "{reason}");
    assert!(reason.contains("keeps it by another name"), "{reason}");
    for name in [".nfs0001", ".nfs-of-mine", "x.nfs000000000000019d00000001"] {
        assert_eq!(
            judged(&evidence(&format!("/share/{name}"), Reach::Alive, file(1))).0,
            "current",
            "{name}"
        );
    }
}

#[test]
fn another_filesystem_in_the_volumes_place_is_no_volume() {
    let other = SubpathEvidence {
        volume: volume_on("tmpfs"),
        ..evidence("/share/state", Reach::Alive, file(1))
    };
    let (found, reason) = judged(&other);
    assert_eq!(found, "unmounted", "{reason}");
    assert!(reason.contains("tmpfs"), "{reason}");
}
