//! An NFS volume with a real server and a real client: healthy, replaced on the server, hung, and
//! not there.
//!
//! Runs where the kernel's nfsd and client are loaded: `make kernels` sees to it.

use std::fs;
use std::time::{Duration, Instant};

use bindguard_core::policy::Policy;
use bindguard_guard::check_bundle;
use bindguard_testing::scene::{REBOUND, Scene, tmpfs};
use bindguard_testing::{own_namespace, test_if};
use nix::mount::{MntFlags, umount2};

use crate::nfs_server::{Server, forget};

const PLUGIN: &str = "kubernetes.io~nfs";
/// Shorter than the minute for which a stopped server gives a waiting call no answer.
const DEADLINE: Duration = Duration::from_secs(30);

/// A share with these files, and a pod whose nfs volume it is.
fn volume_of(server: &Server, files: &[&str]) -> Scene {
    for file in files {
        let path = server.share().join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "old").unwrap();
    }
    let scene = Scene::of_plugin(PLUGIN);
    server.mount(&scene.volume);
    scene
}

/// Replaces a file on the server, as another client would.
fn replace(server: &Server, path: &str) {
    let path = server.share().join(path);
    if fs::metadata(&path).unwrap().is_dir() {
        fs::remove_dir_all(&path).unwrap();
        fs::create_dir(&path).unwrap();
        fs::write(path.join("state"), "new").unwrap();
    } else {
        fs::remove_file(&path).unwrap();
        fs::write(&path, "new").unwrap();
    }
}

fn verdicts(scene: &Scene, policy: &Policy) -> Vec<(&'static str, String)> {
    let report = scene.admitted(policy).report;
    report
        .binds
        .into_iter()
        .map(|bind| (bind.verdict().as_str(), bind.reason().unwrap_or_default()))
        .collect()
}

#[test_if(own_namespace)]
fn a_healthy_share_is_current_warm_and_cold() {
    let Some(server) = Server::start() else {
        return;
    };
    for sub_path in ["db", "db/state"] {
        let scene = volume_of(&server, &["db/state"]).bound(sub_path);
        scene.write_spec(&[&scene.volume, &scene.subpath()]);
        for _ in 0..2 {
            let began = Instant::now();
            let admission = scene.admitted(&scene.refusing());
            assert!(began.elapsed() < DEADLINE, "{:?}", began.elapsed());
            let verdicts: Vec<_> = admission
                .report
                .binds
                .iter()
                .map(|bind| bind.verdict().as_str())
                .collect();
            assert_eq!(
                (verdicts, admission.refusal),
                (vec!["current"; 2], None),
                "{:?}",
                admission.report
            );
            forget();
        }
    }
}

#[test_if(own_namespace)]
fn a_file_replaced_on_the_server_is_bound_anew() {
    let Some(server) = Server::start() else {
        return;
    };
    for (sub_path, is_cold) in [
        ("db", false),
        ("db", true),
        ("db/state", false),
        ("db/state", true),
    ] {
        let scene = volume_of(&server, &["db/state"]).bound(sub_path);
        assert_eq!(scene.content(), "old");
        replace(&server, sub_path);
        if is_cold {
            forget();
        }
        let what = format!("{sub_path}, cold: {is_cold}");
        let (verdict, reason, outcome) = scene.finding(&scene.policy());
        assert_eq!((verdict, outcome), ("stale", REBOUND), "{what}: {reason}");
        assert_eq!(scene.content(), "new", "{what}");
        assert_eq!(scene.mounts_at_subpath(), 1);
        assert_eq!(
            scene.finding(&scene.policy()),
            ("current", String::new(), None),
            "{what}"
        );
    }
}

#[test_if(own_namespace)]
fn a_file_removed_on_the_server_is_orphaned() {
    let Some(server) = Server::start() else {
        return;
    };
    for is_cold in [false, true] {
        let scene = volume_of(&server, &["db/state"]).bound("db/state");
        fs::remove_file(server.share().join("db/state")).unwrap();
        if is_cold {
            forget();
        }
        let (verdict, reason, outcome) = scene.finding(&scene.policy());
        assert_eq!(
            (verdict, outcome),
            ("orphaned", None),
            "cold: {is_cold}: {reason}"
        );
        assert_eq!(scene.mounts_at_subpath(), 1);
    }
}

#[test_if(own_namespace)]
fn a_share_that_was_replaced_is_dead_until_it_is_mounted_again() {
    let Some(server) = Server::start() else {
        return;
    };
    let scene = volume_of(&server, &["db/state"]).bound("db");
    scene.write_spec(&[&scene.volume, &scene.subpath()]);
    replace(&server, "");
    fs::create_dir(server.share().join("db")).unwrap();
    fs::write(server.share().join("db/state"), "new").unwrap();
    forget();
    for (verdict, reason) in verdicts(&scene, &scene.policy()) {
        assert_eq!(verdict, "dead", "{reason}");
        assert!(reason.contains("Stale file handle"), "{reason}");
    }
    let refusal = scene.admitted(&scene.refusing()).refusal.unwrap();
    assert!(
        refusal.contains("is dead") && refusal.contains("Stale file handle"),
        "{refusal}"
    );

    umount2(&scene.volume, MntFlags::MNT_DETACH).unwrap();
    server.mount(&scene.volume);
    let found = verdicts(&scene, &scene.refusing());
    assert_eq!([found[0].0, found[1].0], ["current", "stale"], "{found:?}");
    assert_eq!(scene.content(), "new");
    assert_eq!(scene.mounts_at_subpath(), 1);
}

#[test_if(own_namespace)]
fn a_stopped_server_is_reported_in_time() {
    let Some(server) = Server::start() else {
        return;
    };
    for is_cold in [false, true] {
        let scene = volume_of(&server, &["db/state"]).bound("db/state");
        let host_path = scene.folder.path().join("mnt");
        fs::create_dir(&host_path).unwrap();
        server.mount(&host_path);
        for source in [
            scene.volume.clone(),
            scene.subpath(),
            host_path.clone(),
            host_path.join("db"),
        ] {
            scene.write_spec(&[&source]);
            assert_eq!(
                check_bundle(&scene.bundle(), &scene.policy(), &scene.places())
                    .binds
                    .iter()
                    .filter(|bind| bind.verdict().as_str() == "dead")
                    .count(),
                0
            );
            if is_cold {
                forget();
            }
            let (took, admission, refused) = server.stopped_during(|| {
                let began = Instant::now();
                let admission = scene.admitted(&scene.policy());
                (
                    began.elapsed(),
                    admission,
                    scene.admitted(&scene.refusing()),
                )
            });
            let what = format!(
                "{}, cold: {is_cold}: {:?}",
                source.display(),
                admission.report
            );
            assert!(took < DEADLINE, "{took:?}: {what}");
            assert_eq!(admission.refusal, None, "{what}");
            assert_eq!(
                admission.report.binds[0].verdict().as_str(),
                "dead",
                "{what}"
            );
            assert!(
                admission.report.binds[0]
                    .reason()
                    .unwrap()
                    .contains("did not answer within 700 ms"),
                "{what}"
            );
            assert!(
                refused
                    .refusal
                    .is_some_and(|why| why.contains("did not answer")),
                "{what}"
            );
        }
        umount2(&host_path, MntFlags::MNT_DETACH).unwrap();
    }
}

#[test_if(own_namespace)]
fn an_nfs_volume_without_its_mount_or_with_another_is_unmounted() {
    let Some(server) = Server::start() else {
        return;
    };
    let scene = volume_of(&server, &["db/state"]).bound("db");
    umount2(&scene.volume, MntFlags::MNT_DETACH).unwrap();
    for found in [None, Some("tmpfs")] {
        if found.is_some() {
            tmpfs(&scene.volume);
        }
        for source in [scene.volume.clone(), scene.subpath()] {
            scene.write_spec(&[&source]);
            let (verdict, reason, _) = scene.finding(&scene.policy());
            assert_eq!(
                verdict,
                "unmounted",
                "{}, {found:?}: {reason}",
                source.display()
            );
            assert!(
                reason.contains(PLUGIN) && reason.contains("mount.nfs"),
                "{reason}"
            );
            assert!(found.is_none_or(|found| reason.contains(found)), "{reason}");
            assert!(scene.admitted(&scene.refusing()).refusal.is_some());
        }
    }
}

/// A container on the same node deletes or replaces the file: the client keeps a file in use under
/// a hidden name.
#[test_if(own_namespace)]
fn a_file_that_was_deleted_or_replaced_on_this_node_is_not_taken_for_current() {
    let Some(server) = Server::start() else {
        return;
    };
    for is_deleted_first in [true, false] {
        let scene = volume_of(&server, &["db/state"]).bound("db/state");
        let (file, next) = (scene.volume.join("db/state"), scene.volume.join("db/next"));
        fs::write(&next, "new").unwrap();
        if is_deleted_first {
            fs::remove_file(&file).unwrap();
        }
        fs::rename(&next, &file).unwrap();
        let (verdict, reason, outcome) = scene.finding(&scene.policy());
        assert_eq!((verdict, outcome), ("stale", None), "{reason}");
        assert!(reason.contains("keeps it by another name"), "{reason}");
    }
}

/// The kernel does not even open such a mount: open_tree(2) and open(2) with `O_PATH` return
/// ESTALE.
#[test_if(own_namespace)]
fn a_directory_that_was_replaced_on_this_node_is_dead() {
    let Some(server) = Server::start() else {
        return;
    };
    let scene = volume_of(&server, &["db/state"]).bound("db");
    fs::remove_dir_all(scene.volume.join("db")).unwrap();
    fs::create_dir(scene.volume.join("db")).unwrap();
    let (verdict, reason, outcome) = scene.finding(&scene.policy());
    assert_eq!((verdict, outcome), ("dead", None), "{reason}");
    assert!(reason.contains("Stale file handle"), "{reason}");
    assert!(scene.admitted(&scene.refusing()).refusal.is_some());
    assert_eq!(scene.mounts_at_subpath(), 1);
}
