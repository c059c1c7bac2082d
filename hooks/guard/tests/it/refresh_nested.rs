//! A configMap's directory, with a file of a second configMap mounted inside.

use std::fs;
use std::path::Path;

use bindguard_core::refresh::SpecBind;
use bindguard_core::refresh_request::Notify;
use bindguard_guard::refresh::{
    PodVolumes, REPLACE_TIMEOUT, RefreshAct, Refreshed, refresh_container,
};
use bindguard_testing::live::{Container, Inside};
use bindguard_testing::{helper, test_if};

use crate::refresh_scene::{Scene, can_run};

/// A configMap with the directory `d`, and a file of a second configMap that the spec mounts in
/// `d`.
struct Nested {
    scene: Scene,
    inner: tempfile::TempDir,
}

impl Nested {
    fn new() -> Self {
        let nested = Self {
            scene: Scene::with_keys(1),
            inner: tempfile::tempdir().unwrap(),
        };
        fs::write(nested.inner.path().join("b.conf"), "inner").unwrap();
        nested.fill(0);
        nested
    }

    fn fill(&self, number: u64) {
        let directory = self
            .scene
            .pod
            .volume()
            .join(format!("..2026_11_21_05_10_00.{number}/d"));
        fs::create_dir_all(&directory).unwrap();
        for name in ["0", "b.conf"] {
            fs::write(directory.join(name), number.to_string()).unwrap();
        }
    }

    fn start(&self) -> Container {
        let outer = Inside::of(self.scene.pod.volume().join("..data/d"), "etc/d");
        let inner = Inside::of(self.inner.path().join("b.conf"), "etc/d/b.conf");
        Container::start(self.scene.root.path(), &[outer, inner])
    }

    fn refresh(&self, container: &Container, act: RefreshAct) -> Refreshed {
        let bind = |destination: &str| SpecBind {
            destination: destination.into(),
            source: "/host/file".into(),
        };
        let volumes = PodVolumes::open(&self.scene.pod.directory()).unwrap();
        let volumes = volumes.for_container(vec![
            bind("/etc/d"),
            bind("/etc/d/b.conf"),
            bind("/etc/other"),
        ]);
        refresh_container(
            helper(),
            REPLACE_TIMEOUT,
            &container.process,
            Some(container.spec()),
            &[&volumes],
            act,
            &self.scene.records(),
        )
        .unwrap()
    }
}

fn results(refreshed: &Refreshed) -> Vec<(&Path, &'static str)> {
    refreshed
        .mounts
        .iter()
        .map(|mount| (Path::new(&mount.destination), mount.outcome.as_str()))
        .collect()
}

/// Since Linux 3.18 the kernel detaches a mount when its mount point is removed, in every mount
/// namespace.
#[test_if(can_run)]
fn a_nested_bind_that_the_update_detached_is_reported() {
    let nested = Nested::new();
    let container = nested.start();
    assert!(
        nested
            .refresh(&container, RefreshAct::Look)
            .mounts
            .is_empty()
    );
    assert_eq!(container.read("etc/d/b.conf").as_deref(), Some("inner"));
    nested.scene.pod.update(1);
    nested.fill(1);
    let refreshed = nested.refresh(&container, RefreshAct::Replace(Notify::None));
    assert_eq!(
        results(&refreshed),
        [
            (Path::new("/etc/d"), "replaced"),
            (Path::new("/etc/d/b.conf"), "missing")
        ]
    );
    assert_eq!(
        container.read("etc/d/b.conf").as_deref(),
        Some("1"),
        "the wrong file, without an error"
    );
    // Also later, and by a command that changes nothing.
    let later = nested.refresh(&container, RefreshAct::Look);
    assert_eq!(results(&later), [(Path::new("/etc/d/b.conf"), "missing")]);
}

/// The old directory is still there: to detach its mount would detach the nested mount.
#[test_if(can_run)]
fn a_directory_with_another_mount_in_it_is_not_detached() {
    let nested = Nested::new();
    let container = nested.start();
    let mounts = container.mounts();
    nested.scene.pod.update_keeping_old(1);
    nested.fill(1);
    let refreshed = nested.refresh(&container, RefreshAct::Replace(Notify::None));
    assert_eq!(results(&refreshed), [(Path::new("/etc/d"), "occupied")]);
    assert_eq!(
        (
            container.read("etc/d/b.conf").as_deref(),
            container.mounts()
        ),
        (Some("inner"), mounts)
    );
}
