//! A kubelet whose root has several names. On many nodes `/var/lib/kubelet` is a link to a larger
//! disk, or the disk has a link to `/var/lib/kubelet`. containerd's own directories can be links,
//! too.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use bindguard_core::places::Places;
use bindguard_core::policy::{Alarm, Policy};
use bindguard_core::report::Outcome;
use bindguard_guard::{Attempt, admit};
use bindguard_testing::scene::Scene;
use bindguard_testing::{Folder, bind, mount_of, own_namespace, test_if};
use nix::mount::{MsFlags, mount};
use serde_json::json;

/// A stale subpath of a kubelet at `<folder>/kubelet`, which is also `<folder>/link`.
fn scene() -> (Scene, PathBuf, PathBuf) {
    let scene = Scene::of_plugin("kubernetes.io~empty-dir").with_replaced("app.conf");
    let (real, link) = (
        scene.folder.path().join("kubelet"),
        scene.folder.path().join("link"),
    );
    symlink(&real, &link).unwrap();
    (scene, real, link)
}

fn under(root: &Path) -> PathBuf {
    root.join("pods/uid-1/volume-subpaths/data/app/0")
}

fn write_spec(scene: &Scene, source: &Path) {
    let spec = json!({"mounts": [mount_of(source, "/data", "rprivate")], "linux": {}});
    fs::write(scene.bundle().join("config.json"), spec.to_string()).unwrap();
}

#[test_if(own_namespace)]
fn a_stale_subpath_is_repaired_under_each_of_them() {
    for (spec_has_link, policy_has_link) in
        [(false, false), (false, true), (true, false), (true, true)]
    {
        let (scene, real, link) = scene();
        write_spec(&scene, &under(if spec_has_link { &link } else { &real }));
        let known = if policy_has_link { link } else { real };
        let places = Places {
            kubelet_roots: vec![known],
            ..Places::default()
        };
        let report = admit(&scene.bundle(), &Policy::default(), &places, Attempt::First).report;
        let found = report.binds.first().map(|bind| {
            (
                bind.kind().as_str(),
                bind.verdict().as_str(),
                bind.outcome.clone(),
            )
        });
        let expected = ("subpath", "stale", Some(Outcome::Rebound { tries: 1 }));
        assert_eq!(
            found,
            Some(expected),
            "{spec_has_link} {policy_has_link} {report:?}"
        );
        assert_eq!(fs::read_to_string(scene.subpath()).unwrap(), "new");
    }
}

#[test_if(own_namespace)]
fn an_unmounted_volume_is_reported_under_each_of_them() {
    let (scene, real, link) = scene();
    let volume = "pods/uid-1/volumes/kubernetes.io~nfs/share";
    fs::create_dir_all(real.join(volume)).unwrap();
    for (source, known) in [(&real, &link), (&link, &real)] {
        write_spec(&scene, &source.join(volume));
        let strict = Policy {
            unmounted_volumes: Alarm::Refuse,
            ..Policy::default()
        };
        let places = Places {
            kubelet_roots: vec![known.clone()],
            ..Places::default()
        };
        let admission = admit(&scene.bundle(), &strict, &places, Attempt::First);
        assert!(
            admission
                .refusal
                .is_some_and(|why| why.contains("not mounted")),
            "{:?}",
            admission.report
        );
    }
}

#[test_if(own_namespace)]
fn a_bind_of_a_parent_of_a_runtimes_real_directory_is_made_rslave() {
    let (scene, _, link) = scene();
    let above = scene.folder.path();
    write_spec(&scene, above);
    let of_kubelet = Places {
        kubelet_roots: vec![link.clone()],
        ..Places::default()
    };
    let of_runtime = Places {
        kubelet_roots: Vec::new(),
        runtime_directories: vec![link],
    };
    for places in [of_kubelet, of_runtime] {
        write_spec(&scene, above);
        let report = admit(&scene.bundle(), &Policy::default(), &places, Attempt::First).report;
        let found = report
            .binds
            .first()
            .map(|bind| (bind.kind().as_str(), bind.outcome.clone()));
        assert_eq!(
            found,
            Some(("host-root", Some(Outcome::MadeRslave))),
            "{report:?}"
        );
    }
}

/// As on Container-Optimized OS: the kubelet's root is bound from a larger disk, and a mount shows
/// at both names.
#[test_if(own_namespace)]
fn a_bind_of_the_folder_that_a_root_was_bound_from_is_made_rslave() {
    let folder = Folder::new();
    let [disk, root, bundle] =
        ["disk/lib/kubelet", "kubelet", "bundle"].map(|name| folder.path().join(name));
    for directory in [
        &disk.join("pods"),
        &root,
        &bundle,
        &folder.path().join("disk/log"),
    ] {
        fs::create_dir_all(directory).unwrap();
    }
    bind(&disk, &root);
    let places = Places {
        kubelet_roots: vec![root.clone()],
        ..Places::default()
    };
    let kind = |source: &Path| {
        let hosts = mount_of(&root.join("pods/uid-1/etc-hosts"), "/etc/hosts", "rprivate");
        let spec = json!({"mounts": [hosts, mount_of(source, "/data", "rprivate")], "linux": {}});
        fs::write(bundle.join("config.json"), spec.to_string()).unwrap();
        let report = admit(&bundle, &Policy::default(), &places, Attempt::First).report;
        report
            .binds
            .first()
            .map_or("foreign", |bind| bind.kind().as_str())
    };
    let above = folder.path().join("disk");
    for source in [&above, &above.join("lib"), &disk, &disk.join("pods")] {
        assert_eq!(kind(source), "host-root", "{}", source.display());
    }
    assert_eq!(kind(&above.join("log")), "foreign");
    // A private root: its mounts no longer show on the larger disk.
    mount(
        None::<&str>,
        &root,
        None::<&str>,
        MsFlags::MS_PRIVATE,
        None::<&str>,
    )
    .unwrap();
    assert_eq!(kind(&disk), "foreign");
}
