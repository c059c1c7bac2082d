//! The kubelet's root is a link to a larger disk. A spec has a source below the link, as CRI-O
//! writes it, or below the link's target, as containerd does.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

use bindguard_core::places::Places;
use bindguard_core::policy::Policy;
use bindguard_core::refresh_request::Notify;
use bindguard_guard::refresh::{
    BoundMounts, REPLACE_TIMEOUT, RefreshAct, TuckRecords, refresh_container,
};
use bindguard_guard::{Attempt, admit};
use bindguard_testing::live::{self, Container, Inside};
use bindguard_testing::{Folder, helper, mount_of};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use serde_json::json;

use crate::refresh_scene;

const VOLUME: &str = "pods/uid-1/volumes/kubernetes.io~csi/pv/mount";

#[test]
fn a_volume_that_was_mounted_anew_is_replaced_by_any_name_of_the_root() {
    if live::kernel() < (6, 5) {
        bindguard_testing::skipped("no MOVE_MOUNT_BENEATH before Linux 6.5");
        return;
    }
    if !refresh_scene::can_run() {
        return;
    }
    let host = Folder::new();
    let [target, link, bundle, root] =
        ["data/kubelet", "kubelet", "bundle", "root"].map(|name| host.path().join(name));
    for folder in [&target.join(VOLUME), &bundle, &root] {
        fs::create_dir_all(folder).unwrap();
    }
    symlink("data/kubelet", &link).unwrap();
    let volume = target.join(VOLUME);
    let publish = |content: &str| {
        let (kind, none) = (Some("tmpfs"), MsFlags::empty());
        mount(kind, &volume, kind, none, None::<&str>).unwrap();
        fs::write(volume.join("file"), content).unwrap();
    };
    publish("1");
    for (in_spec, configured) in [(&target, &link), (&link, &link), (&link, &target)] {
        let spec = json!({"mounts": [mount_of(&in_spec.join(VOLUME), "/data", "rprivate")]});
        fs::write(bundle.join("config.json"), spec.to_string()).unwrap();
        let places = Places {
            kubelet_roots: vec![configured.clone()],
            ..Places::default()
        };
        admit(&bundle, &Policy::default(), &places, Attempt::First);
        let container = Container::start(&root, &[Inside::of(volume.clone(), "data")]);
        umount2(&volume, MntFlags::MNT_DETACH).unwrap();
        publish("2");
        let pod: PathBuf = configured.join("pods/uid-1");
        let mounts = BoundMounts::open(&bundle, &pod).unwrap();
        let refreshed = refresh_container(
            helper(),
            REPLACE_TIMEOUT,
            &container.process,
            Some(container.spec()),
            &[&mounts],
            RefreshAct::Replace(Notify::None),
            &TuckRecords::at(&host.path().join("tucks")),
        )
        .unwrap();
        assert_eq!(refreshed.replaced(), 1, "{in_spec:?}: {refreshed:?}");
        assert_eq!(container.read("data/file").as_deref(), Some("2"));
    }
}
