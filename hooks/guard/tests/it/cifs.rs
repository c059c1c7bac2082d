//! An SMB volume with a real server and a real client: healthy, replaced on either side, hung,
//! stopped, and not there.
//!
//! Runs where the kernel's ksmbd and client are loaded: `make kernels` sees to it.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use bindguard_core::report::Outcome;
use bindguard_testing::scene::{REBOUND, Scene, tmpfs};
use bindguard_testing::{bind, own_namespace, test_if};
use nix::mount::{MntFlags, umount2};

use crate::smb_server::{Server, forget};

const PLUGIN: &str = "kubernetes.io~csi";
/// An emulated machine is slow; the client itself waits for 20 seconds.
const SOON: Duration = Duration::from_secs(15);
/// The time for which the client trusts that a missing name is missing.
const BELIEF: Duration = Duration::from_millis(1100);

/// The default of mount.cifs(8), and the options in csi-driver-smb's examples: with those, the
/// client invents a file's number.
const BY_SERVERS_NUMBERS: &str = "serverino";
const BY_OWN_NUMBERS: &str =
    "dir_mode=0777,file_mode=0777,uid=1001,gid=1001,noperm,mfsymlinks,cache=strict,noserverino";
const BOTH: [&str; 2] = [BY_SERVERS_NUMBERS, BY_OWN_NUMBERS];

/// A share with one file, and a pod with the share as its CSI volume.
fn volume_of(server: &Server, options: &str) -> Scene {
    let share = server.share();
    // What an earlier pod left.
    fs::remove_dir_all(&share).unwrap();
    fs::create_dir_all(share.join("db")).unwrap();
    fs::write(share.join("db/state"), "old").unwrap();
    let mut scene = Scene::of_plugin(PLUGIN);
    scene.volume.push("mount");
    fs::create_dir(&scene.volume).unwrap();
    server.mount("share/volume", &scene.volume, options);
    scene
}

fn remove(path: &Path) {
    if fs::metadata(path).unwrap().is_dir() {
        fs::remove_dir_all(path)
    } else {
        fs::remove_file(path)
    }
    .unwrap();
}

fn make_anew(path: &Path) {
    let file = if path.ends_with("db") {
        fs::create_dir(path).unwrap();
        path.join("state")
    } else {
        path.to_owned()
    };
    fs::write(file, "new").unwrap();
}

/// The guard's verdict on the only bind, once the server was fast enough: on a busy machine the
/// guard takes it for dead.
fn finding(scene: &Scene) -> (&'static str, String, Option<Outcome>) {
    let is_slow = |found: &(&str, String, Option<Outcome>)| {
        found.0 == "dead" || found.0 == "unknown" || matches!(found.2, Some(Outcome::Failed { .. }))
    };
    let mut tries = (0..10).map(|_| scene.finding(&scene.policy()));
    let first = tries.find(|found| !is_slow(found));
    first.unwrap_or_else(|| scene.finding(&scene.policy()))
}

/// A directory and a file, by both kinds of numbers.
fn each(mut what: impl FnMut(&'static str, &'static str)) {
    for options in BOTH {
        for sub_path in ["db", "db/state"] {
            what(options, sub_path);
        }
    }
}

/// The same, with what the client remembers and without.
fn each_warm_and_cold(mut what: impl FnMut(&'static str, &'static str, bool)) {
    each(|options, sub_path| {
        [false, true]
            .into_iter()
            .for_each(|is_cold| what(options, sub_path, is_cold))
    });
}

#[test_if(own_namespace)]
fn a_healthy_share_is_current_warm_and_cold() {
    let Some(server) = Server::start() else {
        return;
    };
    each_warm_and_cold(|options, sub_path, is_cold| {
        let scene = volume_of(&server, options).bound(sub_path);
        for source in [scene.volume.clone(), scene.subpath()] {
            if is_cold {
                forget();
            }
            scene.write_spec(&[&source]);
            let what = format!("{}, cold: {is_cold}, {options}", source.display());
            assert_eq!(finding(&scene), ("current", String::new(), None), "{what}");
            assert_eq!(scene.admitted(&scene.refusing()).refusal, None, "{what}");
            // In use, and read again by the client.
            assert_eq!(scene.content(), "old");
            fs::write(server.share().join("db/other"), "another client's").unwrap();
            thread::sleep(BELIEF);
        }
    });
}

/// csi-driver-smb mounts the share once for the node, and binds that to each pod's folder.
#[test_if(own_namespace)]
fn a_share_that_was_staged_for_the_node_is_current() {
    let Some(server) = Server::start() else {
        return;
    };
    for (source, below) in [("share", "volume"), ("share/volume", "")] {
        let scene = volume_of(&server, BY_OWN_NUMBERS);
        umount2(&scene.volume, MntFlags::MNT_DETACH).unwrap();
        let staged = scene.folder.path().join("globalmount");
        fs::create_dir(&staged).unwrap();
        server.mount(source, &staged, BY_OWN_NUMBERS);
        bind(&staged.join(below), &scene.volume);
        let scene = scene.bound("db/state");
        assert_eq!(
            finding(&scene),
            ("current", String::new(), None),
            "{source}"
        );
        remove(&scene.volume.join("db/state"));
        make_anew(&scene.volume.join("db/state"));
        assert_eq!(finding(&scene).2, REBOUND, "{source}");
        assert_eq!(scene.content(), "new");
        umount2(&staged, MntFlags::MNT_DETACH).unwrap();
    }
}

#[test_if(own_namespace)]
fn a_file_replaced_on_the_server_is_followed_or_bound_anew() {
    let Some(server) = Server::start() else {
        return;
    };
    each_warm_and_cold(|options, sub_path, is_cold| {
        let scene = volume_of(&server, options).bound(sub_path);
        assert_eq!(scene.content(), "old");
        let path = server.share().join(sub_path);
        remove(&path);
        make_anew(&path);
        if is_cold {
            forget();
        }
        let what = format!("{sub_path}, cold: {is_cold}, {options}");
        let (verdict, reason, outcome) = finding(&scene);
        match options {
            BY_SERVERS_NUMBERS => {
                assert_eq!((verdict, outcome), ("stale", REBOUND), "{what}: {reason}")
            }
            // A client that invents the inode numbers identifies files by name, including the bound
            // file.
            _ => assert_eq!((verdict, outcome), ("current", None), "{what}: {reason}"),
        }
        assert_eq!(scene.content(), "new", "{what}");
        assert_eq!(scene.mounts_at_subpath(), 1);
        assert_eq!(finding(&scene), ("current", String::new(), None), "{what}");
    });
}

#[test_if(own_namespace)]
fn a_file_removed_on_the_server_is_reported_and_bound_when_it_is_back() {
    let Some(server) = Server::start() else {
        return;
    };
    each(|options, sub_path| {
        let scene = volume_of(&server, options).bound("db/state");
        let path = server.share().join(sub_path);
        remove(&path);
        let what = format!("{sub_path}, {options}");
        for _ in 0..2 {
            let (verdict, reason, outcome) = finding(&scene);
            assert_eq!((verdict, outcome), ("orphaned", None), "{what}: {reason}");
        }
        make_anew(&path);
        thread::sleep(BELIEF);
        let (verdict, reason, outcome) = finding(&scene);
        assert_eq!((verdict, outcome), ("stale", REBOUND), "{what}: {reason}");
        assert_eq!(scene.content(), "new", "{what}");
        assert_eq!(scene.mounts_at_subpath(), 1);
    });
}

/// A container on the same node removes or replaces the file.
#[test_if(own_namespace)]
fn a_file_removed_or_replaced_on_this_node_is_reported_and_bound_anew() {
    let Some(server) = Server::start() else {
        return;
    };
    each(|options, sub_path| {
        let scene = volume_of(&server, options).bound(sub_path);
        let path = scene.volume.join(sub_path);
        let what = format!("{sub_path}, {options}");
        remove(&path);
        if sub_path == "db/state" {
            let (verdict, reason, outcome) = finding(&scene);
            assert_eq!((verdict, outcome), ("orphaned", None), "{what}: {reason}");
        }
        make_anew(&path);
        let (verdict, reason, outcome) = finding(&scene);
        assert_eq!((verdict, outcome), ("stale", REBOUND), "{what}: {reason}");
        assert_eq!(scene.content(), "new", "{what}");
        assert_eq!(scene.mounts_at_subpath(), 1);
        assert_eq!(finding(&scene), ("current", String::new(), None), "{what}");
    });
}

#[test_if(own_namespace)]
fn a_file_that_another_was_renamed_over_on_this_node_is_bound_anew() {
    let Some(server) = Server::start() else {
        return;
    };
    for options in BOTH {
        let scene = volume_of(&server, options).bound("db/state");
        let (file, next) = (scene.volume.join("db/state"), scene.volume.join("db/next"));
        fs::write(&next, "new").unwrap();
        fs::rename(&next, &file).unwrap();
        let (verdict, reason, outcome) = finding(&scene);
        assert_eq!(
            (verdict, outcome),
            ("stale", REBOUND),
            "{options}: {reason}"
        );
        assert_eq!(scene.content(), "new", "{options}");
        assert_eq!(scene.mounts_at_subpath(), 1);
    }
}

/// Twice: after the first failure, the client queries the server for every call.
#[test_if(own_namespace)]
fn an_unreachable_server_is_dead_in_time_and_until_it_returns() {
    let Some(mut server) = Server::start() else {
        return;
    };
    for (is_cut_off, is_cold) in [(true, false), (true, true), (false, false), (false, true)] {
        let scene = volume_of(&server, BY_SERVERS_NUMBERS).bound("db/state");
        let host_path = scene.folder.path().join("mnt");
        fs::create_dir(&host_path).unwrap();
        server.mount("share", &host_path, BY_OWN_NUMBERS);
        let sources: Vec<PathBuf> = vec![
            scene.volume.clone(),
            scene.subpath(),
            host_path.clone(),
            host_path.join("volume/db"),
        ];
        let probe = |source: &PathBuf| {
            scene.write_spec(&[source]);
            let began = Instant::now();
            let admission = scene.admitted(&scene.refusing());
            (
                began.elapsed(),
                admission.report.binds.into_iter().next(),
                admission.refusal,
            )
        };
        scene.write_spec(&[&scene.subpath()]);
        assert_eq!(finding(&scene), ("current", String::new(), None));
        if is_cold {
            forget();
        }
        let probe_twice = || -> Vec<_> { sources.iter().chain(&sources).map(probe).collect() };
        let answers = if is_cut_off {
            server.cut_off_during(probe_twice)
        } else {
            server.stop();
            let answers = probe_twice();
            server.begin();
            answers
        };
        for ((took, bind, refusal), source) in
            answers.into_iter().zip(sources.iter().chain(&sources))
        {
            let what = format!(
                "{}, cut off: {is_cut_off}, cold: {is_cold}: {bind:?}",
                source.display()
            );
            assert!(took < SOON, "{took:?}: {what}");
            assert!(
                bind.is_some_and(|bind| bind.verdict().as_str() == "dead"),
                "{what}"
            );
            assert!(
                refusal
                    .is_some_and(|why| why.contains("is dead") || why.contains("did not answer")),
                "{what}"
            );
        }
        scene.write_spec(&[&scene.subpath()]);
        // The client must find its server again.
        let began = Instant::now();
        while fs::read_to_string(scene.volume.join("db/state")).is_err() {
            assert!(
                began.elapsed() < Duration::from_secs(60),
                "the server does not come back"
            );
            thread::sleep(Duration::from_millis(100));
        }
        assert_eq!(finding(&scene), ("current", String::new(), None));
        umount2(&host_path, MntFlags::MNT_DETACH).unwrap();
    }
}

#[test_if(own_namespace)]
fn an_smb_volume_without_its_mount_is_unmounted_and_one_mounted_anew_is_bound_anew() {
    let Some(server) = Server::start() else {
        return;
    };
    let scene = volume_of(&server, BY_OWN_NUMBERS).bound("db");
    umount2(&scene.volume, MntFlags::MNT_DETACH).unwrap();
    for source in [scene.volume.clone(), scene.subpath()] {
        scene.write_spec(&[&source]);
        let (verdict, reason, _) = finding(&scene);
        assert_eq!(verdict, "unmounted", "{}: {reason}", source.display());
        assert!(scene.admitted(&scene.refusing()).refusal.is_some());
    }
    // `nosharesock` opens a new connection, so the kernel makes a new filesystem.
    server.mount(
        "share/volume",
        &scene.volume,
        &format!("{BY_OWN_NUMBERS},nosharesock"),
    );
    let (verdict, reason, outcome) = finding(&scene);
    assert_eq!((verdict, outcome), ("stale", REBOUND), "{reason}");
    assert_eq!(finding(&scene), ("current", String::new(), None));
    assert_eq!(scene.content(), "old");

    // The in-tree plugin's volumes are SMB or NFS, and nothing else.
    let other = Scene::of_plugin("kubernetes.io~azure-file");
    tmpfs(&other.volume);
    other.write_spec(&[&other.volume]);
    assert_eq!(finding(&other).0, "unmounted");
    umount2(&other.volume, MntFlags::MNT_DETACH).unwrap();
    server.mount("share/volume", &other.volume, BY_SERVERS_NUMBERS);
    assert_eq!(finding(&other).0, "current");
}
