//! Payloads with a `..data` link that the kubelet did not write: those of drivers are followed,
//! those of containers lead nowhere.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use bindguard_testing::scene::{REBOUND, Scene, tmpfs};
use bindguard_testing::{Folder, own_namespace, test_if};

/// As the kubelet's AtomicWriter does it, and as drivers do that write secrets, certificates and
/// identities.
fn write_payload(volume: &Path, timestamp: &str, content: &str) -> PathBuf {
    let payload = volume.join(timestamp);
    fs::create_dir(&payload).unwrap();
    fs::write(payload.join("tls.crt"), content).unwrap();
    symlink(timestamp, volume.join("..data_tmp")).unwrap();
    fs::rename(volume.join("..data_tmp"), volume.join("..data")).unwrap();
    payload
}

#[test_if(own_namespace)]
fn a_volume_that_its_driver_writes_as_the_kubelet_does_is_read_as_the_kubelets() {
    for (plugin, below) in [("kubernetes.io~csi", "mount"), ("vendor~driver", "")] {
        let mut scene = Scene::of_plugin(plugin);
        scene.volume.push(below);
        fs::create_dir_all(&scene.volume).unwrap();
        tmpfs(&scene.volume);
        let first = write_payload(&scene.volume, "..2026_11_21_05_10_00.1", "first");
        symlink("..data/tls.crt", scene.volume.join("tls.crt")).unwrap();
        let scene = scene.bound("tls.crt");
        assert_eq!(
            scene.finding(&scene.policy()),
            ("current", String::new(), None),
            "{plugin}"
        );

        let second = write_payload(&scene.volume, "..2026_11_21_05_10_00.2", "second");
        let (verdict, reason, outcome) = scene.finding(&scene.policy());
        assert_eq!((verdict, outcome), ("stale", REBOUND), "{plugin}: {reason}");
        assert!(reason.contains("shows the payload"), "{reason}");
        assert_eq!(scene.content(), "second");

        fs::remove_dir_all(first).unwrap();
        write_payload(&scene.volume, "..2026_11_21_05_10_00.3", "third");
        fs::remove_dir_all(second).unwrap();
        let (verdict, reason, outcome) = scene.finding(&scene.policy());
        assert_eq!((verdict, outcome), ("stale", REBOUND), "{plugin}: {reason}");
        assert_eq!(
            (scene.content().as_str(), scene.mounts_at_subpath()),
            ("third", 1)
        );
    }
}

/// A container can write the names of a payload. The names never lead out of the volume.
#[test_if(own_namespace)]
fn a_payload_that_a_container_laid_out_leads_nowhere_else() {
    let elsewhere = Folder::new();
    fs::write(elsewhere.path().join("tls.crt"), "of the host").unwrap();
    let scene = Scene::of_plugin("kubernetes.io~empty-dir");
    let first = write_payload(&scene.volume, "..2026_11_21_05_10_00.1", "first");
    let scene = scene.bound("..2026_11_21_05_10_00.1/tls.crt");
    fs::remove_file(scene.volume.join("..data")).unwrap();
    symlink(elsewhere.path(), scene.volume.join("..data")).unwrap();
    assert_eq!(
        scene.finding(&scene.policy()),
        ("current", String::new(), None)
    );
    symlink(
        elsewhere.path(),
        scene.volume.join("..2026_11_21_05_10_00.2"),
    )
    .unwrap();
    fs::remove_file(scene.volume.join("..data")).unwrap();
    symlink("..2026_11_21_05_10_00.2", scene.volume.join("..data")).unwrap();
    fs::remove_dir_all(first).unwrap();
    assert_eq!(scene.finding(&scene.policy()).2, None);
    assert_eq!(
        (scene.content().as_str(), scene.mounts_at_subpath()),
        ("first", 1)
    );
}
