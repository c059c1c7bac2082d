//! Mounts that differ from the recorded spec in their place, their order or their number, and a
//! spec that changes after the admission. `refuse` must refuse each wrong container.
//!
//! The expected stack is the spec's: each entry is mounted in order, and a later entry at the same
//! place or above covers earlier entries. The honest runtimes are in `prove_honest`.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use bindguard_core::policy::{Alarm, Policy};
use bindguard_guard::{Attempt, Proved, admit, prove_container};
use bindguard_testing::live::{Container, Inside, change};
use bindguard_testing::{Folder, Pod, mount_of, mount_tmpfs, own_namespace, test_if};
use nix::mount::{MsFlags, mount};
use serde_json::{Value, json};

/// A bundle with an image, and folders of the host. Each folder has the file `file` and the folder
/// `sub`.
pub struct Scene {
    pod: Pod,
    host: Folder,
}

impl Scene {
    /// A scene whose image has these folders.
    pub fn with_image(folders: &[&str]) -> Self {
        let scene = Self {
            pod: Pod::with_keys(0),
            host: Folder::new(),
        };
        for folder in ["right", "left", "added"] {
            fs::create_dir_all(scene.host(folder).join("sub")).unwrap();
            fs::write(scene.host(folder).join("file"), folder).unwrap();
        }
        fs::create_dir_all(scene.image("proc")).unwrap();
        for folder in folders {
            fs::create_dir_all(scene.image(folder)).unwrap();
        }
        scene
    }

    /// A path of the host.
    pub fn host(&self, path: &str) -> PathBuf {
        self.host.path().join(path)
    }

    /// A path in the image: the spec's `root.path` is `rootfs`.
    pub fn image(&self, path: &str) -> PathBuf {
        self.pod.bundle().join("rootfs").join(path)
    }

    /// An entry of the spec: a private, read-only bind of the host's `path`.
    pub fn entry(&self, path: &str, destination: &str) -> Value {
        mount_of(&self.host(path), destination, "rprivate")
    }

    /// The runtime's mount for such an entry.
    pub fn mounted(&self, path: &str, destination: &'static str) -> Inside {
        Inside::of(self.host(path), destination)
    }

    /// Writes a spec without an admission: a program changed the spec since.
    pub fn write_spec(&self, mounts: &[Value]) {
        self.pod.write_spec(mounts);
    }

    /// Changes the spec's other values.
    pub fn edit_spec(&self, change: impl FnOnce(&mut Value)) {
        let mut spec = serde_json::from_slice(&fs::read(self.pod.config()).unwrap()).unwrap();
        change(&mut spec);
        fs::write(self.pod.config(), spec.to_string()).unwrap();
    }

    /// Refuses, and lets pods choose a mode by an annotation.
    fn policy(&self) -> Policy {
        let mut policy = self.pod.policy();
        policy.proof = Alarm::Refuse;
        policy.pods_may.set_mode = true;
        policy
    }

    /// Admits the spec that is written.
    pub fn admit_written(&self) {
        let places = self.pod.places();
        let policy = self.policy();
        let admission = admit(&self.pod.bundle(), &policy, &places, Attempt::First);
        assert!(admission.is_provable, "{admission:?}");
    }

    /// Writes a spec with these mounts, and admits it.
    pub fn admit(&self, mounts: &[Value]) {
        self.write_spec(mounts);
        self.admit_written();
    }

    /// A container with these mounts and `/proc`; `more` makes further mounts.
    pub fn start(&self, mounted: &[Inside], more: impl FnOnce()) -> Container {
        Container::start_with(&self.image(""), mounted, || {
            let proc = Some("proc");
            mount(proc, "/proc", proc, MsFlags::empty(), None::<&str>).unwrap();
            more();
        })
    }

    pub fn prove(&self, container: &Container) -> Proved {
        let (policy, places) = (self.policy(), self.pod.places());
        let pid = container.process.pid();
        prove_container(&self.pod.bundle(), pid, &policy, &places)
    }

    /// The proof of a container with these mounts.
    pub fn proved(&self, mounted: &[Inside]) -> Proved {
        self.proved_with(mounted, || {})
    }

    pub fn proved_with(&self, mounted: &[Inside], more: impl FnOnce()) -> Proved {
        self.prove(&self.start(mounted, more))
    }
}

/// A tmpfs of the spec.
pub fn tmpfs_entry(destination: &str) -> Value {
    json!({"type": "tmpfs", "source": "tmpfs", "destination": destination, "options": ["nosuid"]})
}

fn move_mount(from: &str, to: &str) {
    mount(Some(from), to, None::<&str>, MsFlags::MS_MOVE, None::<&str>).unwrap();
}

#[track_caller]
fn is_refused(proved: &Proved) {
    assert!(proved.refusal.is_some(), "accepted: {proved:?}");
    assert!(!proved.report.binds.is_empty(), "no finding: {proved:?}");
}

#[test_if(own_namespace)]
fn a_bind_at_another_place_without_a_link_is_wrong() {
    let scene = Scene::with_image(&["data", "other"]);
    scene.admit(&[scene.entry("right", "/data")]);
    is_refused(&scene.proved(&[scene.mounted("right", "other")]));
}

#[test_if(own_namespace)]
fn a_file_bind_at_another_place_without_a_link_is_wrong() {
    let scene = Scene::with_image(&["etc"]);
    fs::write(scene.image("etc/file"), "of the image").unwrap();
    scene.admit(&[scene.entry("right/file", "/etc/file")]);
    is_refused(&scene.proved(&[scene.mounted("right/file", "etc/file.new")]));
}

#[test_if(own_namespace)]
fn a_tmpfs_over_the_destination_is_wrong() {
    let scene = Scene::with_image(&[]);
    scene.admit(&[scene.entry("right", "/data")]);
    let right = [scene.mounted("right", "data")];
    is_refused(&scene.proved_with(&right, || mount_tmpfs("/data".as_ref())));
}

#[test_if(own_namespace)]
fn another_file_over_the_destination_is_wrong() {
    let scene = Scene::with_image(&[]);
    scene.admit(&[scene.entry("right/file", "/etc/file")]);
    let mounted = ["right/file", "left/file"].map(|file| scene.mounted(file, "etc/file"));
    is_refused(&scene.proved(&mounted));
}

/// The lower mount is read-only and private, as the spec says; the container sees the upper mount.
#[test_if(own_namespace)]
fn a_writable_mount_of_the_source_over_its_read_only_mount_is_wrong() {
    let scene = Scene::with_image(&[]);
    scene.admit(&[scene.entry("right", "/data")]);
    let writable = Inside::writable(scene.host("right"), "data");
    is_refused(&scene.proved(&[scene.mounted("right", "data"), writable]));
}

#[test_if(own_namespace)]
fn a_shared_mount_of_the_source_over_its_private_mount_is_wrong() {
    let scene = Scene::with_image(&[]);
    scene.admit(&[scene.entry("right", "/data")]);
    let mounted = [(); 2].map(|()| scene.mounted("right", "data"));
    is_refused(&scene.proved_with(&mounted, || change("/data".as_ref(), MsFlags::MS_SHARED)));
}

#[test_if(own_namespace)]
fn one_of_two_binds_of_the_same_source_left_out_is_wrong() {
    let scene = Scene::with_image(&["a", "b"]);
    scene.admit(&[scene.entry("right", "/a"), scene.entry("right", "/b")]);
    is_refused(&scene.proved(&[scene.mounted("right", "a")]));
}

#[test_if(own_namespace)]
fn two_binds_of_the_same_source_at_the_same_of_two_places_are_wrong() {
    let scene = Scene::with_image(&["a", "b"]);
    scene.admit(&[scene.entry("right", "/a"), scene.entry("right", "/b")]);
    let mounted = [(); 2].map(|()| scene.mounted("right", "a"));
    is_refused(&scene.proved(&mounted));
}

/// `/link` of the image leads to `/a`: both destinations are the same place, and the runtime must
/// mount twice.
#[test_if(own_namespace)]
fn a_mount_proves_only_one_of_two_binds_that_lead_to_its_place() {
    let scene = Scene::with_image(&["a/x"]);
    symlink("a", scene.image("link")).unwrap();
    scene.admit(&[
        scene.entry("right", "/a/x"),
        scene.entry("right", "/link/x"),
    ]);
    is_refused(&scene.proved(&[scene.mounted("right", "a/x")]));
}

#[test_if(own_namespace)]
fn a_stack_in_another_order_than_the_spec_is_wrong() {
    let scene = Scene::with_image(&[]);
    scene.admit(&[scene.entry("left", "/data"), scene.entry("right", "/data")]);
    let mounted = ["right", "left"].map(|source| scene.mounted(source, "data"));
    is_refused(&scene.proved(&mounted));
}

/// The spec mounts the tmpfs first; the runtime mounts the tmpfs last.
#[test_if(own_namespace)]
fn a_tmpfs_of_the_spec_over_a_later_bind_is_wrong() {
    for (tmpfs, bind, place) in [
        ("/data", "/data", "data"),
        ("/data", "/data/sub", "data/sub"),
    ] {
        let scene = Scene::with_image(&[]);
        scene.admit(&[tmpfs_entry(tmpfs), scene.entry("right", bind)]);
        let right = [scene.mounted("right", place)];
        is_refused(&scene.proved_with(&right, || mount_tmpfs(tmpfs.as_ref())));
    }
}

#[test_if(own_namespace)]
fn a_bind_that_a_mount_above_covers_is_wrong() {
    let scene = Scene::with_image(&[]);
    scene.admit(&[scene.entry("right", "/data/sub")]);
    let right = [scene.mounted("right", "data/sub")];
    is_refused(&scene.proved_with(&right, || mount_tmpfs("/data".as_ref())));
}

/// The spec mounts the outer bind first; the runtime mounts the outer bind last.
#[test_if(own_namespace)]
fn nested_binds_in_another_order_than_the_spec_are_wrong() {
    let scene = Scene::with_image(&[]);
    scene.admit(&[
        scene.entry("left", "/data"),
        scene.entry("right", "/data/sub"),
    ]);
    let inner = scene.mounted("right", "data/sub");
    is_refused(&scene.proved(&[inner, scene.mounted("left", "data")]));
}

#[test_if(own_namespace)]
fn a_bind_that_was_moved_away_with_the_bind_above_is_wrong() {
    let scene = Scene::with_image(&["moved"]);
    scene.admit(&[
        scene.entry("left", "/data"),
        scene.entry("right", "/data/sub"),
    ]);
    let mounted = [
        scene.mounted("left", "data"),
        scene.mounted("right", "data/sub"),
    ];
    is_refused(&scene.proved_with(&mounted, || move_mount("/data", "/moved")));
}

/// A tree with another mount at `sub` is moved over the destination's parent. The table has two
/// mounts at `/data/sub`.
#[test_if(own_namespace)]
fn a_bind_under_a_tree_that_was_moved_over_it_is_wrong() {
    let scene = Scene::with_image(&["tree"]);
    scene.admit(&[scene.entry("right", "/data/sub")]);
    let mounted = [
        scene.mounted("right", "data/sub"),
        scene.mounted("added", "tree"),
        scene.mounted("left", "tree/sub"),
    ];
    is_refused(&scene.proved_with(&mounted, || move_mount("/tree", "/data")));
}

/// The source is mounted somewhere, but not where the image's link leads.
#[test_if(own_namespace)]
fn a_bind_beside_the_target_of_a_link_is_wrong() {
    let scene = Scene::with_image(&["real", "other"]);
    symlink("real", scene.image("data")).unwrap();
    scene.admit(&[scene.entry("right", "/data")]);
    is_refused(&scene.proved(&[scene.mounted("right", "other")]));
}

#[test_if(own_namespace)]
fn another_source_at_the_target_of_a_link_is_wrong() {
    let scene = Scene::with_image(&["real", "other"]);
    symlink("/real", scene.image("data")).unwrap();
    scene.admit(&[scene.entry("right", "/data")]);
    let mounted = [
        scene.mounted("left", "real"),
        scene.mounted("right", "other"),
    ];
    is_refused(&scene.proved(&mounted));
}

/// The link leads out of the container's root. The kernel, as the runtime, stays in the root.
#[test_if(own_namespace)]
fn a_link_of_the_image_does_not_lead_out_of_the_root() {
    let scene = Scene::with_image(&["etc", "other"]);
    symlink("../../../../etc", scene.image("data")).unwrap();
    scene.admit(&[scene.entry("right", "/data/x")]);
    is_refused(&scene.proved(&[scene.mounted("right", "other")]));
}

/// At the create the destination was a folder, and no link led to the place of the mount.
#[test_if(own_namespace)]
fn a_link_that_the_container_made_after_the_create_excuses_nothing() {
    let scene = Scene::with_image(&["data", "other"]);
    scene.admit(&[scene.entry("right", "/data")]);
    let container = scene.start(&[scene.mounted("right", "other")], || {});
    container.run_inside(|| {
        fs::remove_dir("/data").unwrap();
        symlink("other", "/data").unwrap();
    });
    is_refused(&scene.prove(&container));
}

/// The walk to the destination would have to wait for a FUSE daemon. The table alone shows the
/// other source there.
#[test_if(own_namespace)]
fn another_source_below_a_volume_of_a_daemon_is_wrong() {
    let scene = Scene::with_image(&[]);
    fs::create_dir(scene.host("fuse")).unwrap();
    let mut daemon = Command::new("bindfs");
    let daemon = daemon.args([scene.host("added"), scene.host("fuse")]);
    if !daemon.status().is_ok_and(|status| status.success()) {
        return bindguard_testing::skipped("no bindfs");
    }
    scene.admit(&[
        scene.entry("fuse", "/vol"),
        scene.entry("right", "/vol/sub"),
    ]);
    let proved = scene.proved(&[
        scene.mounted("fuse", "vol"),
        scene.mounted("left", "vol/sub"),
    ]);
    bindguard_testing::unmount(&scene.host("fuse"));
    is_refused(&proved);
}

/// Neither the spec nor the container has a `/proc`. The process is in a mount namespace of its
/// own, and is no sandbox of gVisor.
#[test_if(own_namespace)]
fn a_container_without_proc_and_without_its_bind_is_wrong() {
    let scene = Scene::with_image(&["data"]);
    scene.admit(&[scene.entry("right", "/data")]);
    is_refused(&scene.prove(&Container::start(&scene.image(""), &[])));
}

/// The spec says after the admission what the runtime mounts; the guard admitted another bind.
#[test_if(own_namespace)]
fn a_spec_that_changed_after_the_admission_is_no_excuse() {
    let image = ["data", "other"];
    type Change = fn(&Scene) -> (Vec<Value>, Vec<Inside>);
    let changes: [(&str, Change); 5] = [
        ("another source", |scene| {
            let entry = scene.entry("left", "/data");
            (vec![entry], vec![scene.mounted("left", "data")])
        }),
        ("another destination", |scene| {
            let entry = scene.entry("right", "/other");
            (vec![entry], vec![scene.mounted("right", "other")])
        }),
        ("without ro", |scene| {
            let mut entry = scene.entry("right", "/data");
            entry["options"] = json!(["rbind", "rprivate"]);
            let mounted = Inside::writable(scene.host("right"), "data");
            (vec![entry], vec![mounted])
        }),
        ("without the bind", |_| (Vec::new(), Vec::new())),
        ("a later bind over the bind", |scene| {
            let places = ["right", "left"];
            let entries = places.map(|source| scene.entry(source, "/data"));
            let mounted = places.map(|source| scene.mounted(source, "data"));
            (entries.into(), mounted.into())
        }),
    ];
    let mut accepted = Vec::new();
    for (name, change) in changes {
        let scene = Scene::with_image(&image);
        scene.admit(&[scene.entry("right", "/data")]);
        let (entries, mounted) = change(&scene);
        scene.write_spec(&entries);
        if scene.proved(&mounted).refusal.is_none() {
            accepted.push(name);
        }
    }
    assert!(accepted.is_empty(), "accepted: {accepted:?}");
}

/// The added bind has the position of the recorded bind, and is mounted as the new spec says.
#[test_if(own_namespace)]
fn an_added_bind_does_not_excuse_the_recorded_bind_at_its_position() {
    let scene = Scene::with_image(&[]);
    let entry = scene.entry("right", "/data");
    scene.admit(std::slice::from_ref(&entry));
    scene.write_spec(&[scene.entry("added", "/added"), entry]);
    let mounted = [
        scene.mounted("added", "added"),
        scene.mounted("left", "data"),
    ];
    let proved = scene.proved(&mounted);
    is_refused(&proved);
    let finding = &proved.report.binds[0].finding;
    assert_eq!(finding.destination.as_deref(), Some(Path::new("/data")));
}

/// The annotations of the admitted spec count, because the node lets pods choose a mode.
#[test_if(own_namespace)]
fn an_annotation_that_was_added_after_the_admission_is_not_followed() {
    let scene = Scene::with_image(&[]);
    scene.admit(&[scene.entry("right", "/data")]);
    scene.edit_spec(|spec| spec["annotations"]["bindguard.io/mode"] = "off".into());
    is_refused(&scene.proved(&[scene.mounted("left", "data")]));
}

/// As nvidia-container-runtime: a wrapper below the guard adds binds to config.json.
#[test_if(own_namespace)]
fn binds_that_a_wrapper_added_are_counted_and_not_refused() {
    for is_first in [false, true] {
        let scene = Scene::with_image(&[]);
        let entry = scene.entry("right", "/data");
        scene.admit(std::slice::from_ref(&entry));
        let mut entries = vec![
            scene.entry("added/file", "/usr/bin/tool"),
            scene.entry("added", "/usr/lib/driver"),
        ];
        entries.insert(if is_first { 2 } else { 0 }, entry);
        scene.write_spec(&entries);
        let proved = scene.proved(&[
            scene.mounted("right", "data"),
            scene.mounted("added/file", "usr/bin/tool"),
            scene.mounted("added", "usr/lib/driver"),
        ]);
        assert!(proved.refusal.is_none(), "{proved:?}");
        assert!(proved.report.binds.is_empty(), "{proved:?}");
        assert_eq!(proved.report.unproven, 2, "added first: {is_first}");
    }
}
