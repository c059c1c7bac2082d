//! An NFS volume of a running container that the host mounts anew, with a real server.
//!
//! Runs where the kernel's nfsd and client are loaded: `make kernels` sees to it.

use std::fs;
use std::time::{Duration, Instant};

use bindguard_testing::live::Container;
use bindguard_testing::{mount_tmpfs, mounts_of_host, own_namespace};
use nix::mount::{MntFlags, umount2};

use crate::nfs_server::{Server, forget};
use crate::refresh_scene;
use crate::refresh_scene::volume::Scene;

/// Shorter than the minute for which a stopped server gives a waiting call no answer.
const DEADLINE: Duration = Duration::from_secs(30);

/// A share with content, a pod whose volume it is, and a running container.
fn running(server: &Server) -> (Scene, Container) {
    fs::write(server.share().join("0"), "1").unwrap();
    let scene = Scene::new();
    umount2(&scene.volume(), MntFlags::MNT_DETACH).unwrap();
    server.mount(&scene.volume());
    scene.admit();
    let container = scene.start();
    assert_eq!(container.read("data/0").as_deref(), Some("1"));
    (scene, container)
}

#[test]
fn a_share_that_was_mounted_anew_arrives_again_and_again() {
    if !own_namespace() || !refresh_scene::can_run() {
        return;
    }
    let Some(server) = Server::start() else {
        return;
    };
    let (scene, container) = running(&server);
    let mounts = container.mounts();
    for content in ["2", "3"] {
        umount2(&scene.volume(), MntFlags::MNT_DETACH).unwrap();
        fs::remove_file(server.share().join("0")).unwrap();
        fs::write(server.share().join("0"), content).unwrap();
        server.mount_unshared(&scene.volume());
        let host = mounts_of_host();
        let refreshed = scene.refresh(&container);
        assert_eq!(refreshed.replaced(), 1, "{refreshed:?}");
        assert_eq!(container.read("data/0").as_deref(), Some(content));
        assert!(scene.refresh(&container).mounts.is_empty(), "a second time");
        assert_eq!((container.mounts(), mounts_of_host()), (mounts, host));
    }
}

#[test]
fn a_share_whose_server_is_gone_is_replaced_in_time() {
    if !own_namespace() || !refresh_scene::can_run() {
        return;
    }
    let Some(server) = Server::start() else {
        return;
    };
    for is_cold in [false, true] {
        let (scene, container) = running(&server);
        let mounts = container.mounts();
        if is_cold {
            forget();
        }
        let (took, refreshed) = server.stopped_during(|| {
            umount2(&scene.volume(), MntFlags::MNT_DETACH).unwrap();
            mount_tmpfs(&scene.volume());
            fs::write(scene.volume().join("0"), "2").unwrap();
            let began = Instant::now();
            let refreshed = scene.refresh(&container);
            (began.elapsed(), refreshed)
        });
        assert!(took < DEADLINE, "{took:?}");
        assert_eq!(refreshed.replaced(), 1, "cold: {is_cold}: {refreshed:?}");
        assert_eq!(container.read("data/0").as_deref(), Some("2"));
        assert_eq!(container.mounts(), mounts);
    }
}
