//! A container with the host's root as a private bind.

use std::fs;
use std::path::PathBuf;

use bindguard_core::places::{KindName, Places};
use bindguard_core::policy::{Mode, Policy};
use bindguard_core::refresh::RefusedReason;
use bindguard_core::refresh_request::Notify;
use bindguard_guard::refresh::{
    HostRoots, REPLACE_TIMEOUT, RefreshAct, Refreshed, Release, Released, TuckRecords,
    refresh_container, release_copies,
};
use bindguard_guard::{Attempt, admit, prove_container};
use bindguard_testing::live::{self, Container, Inside};
use bindguard_testing::{Folder, helper, mount_tmpfs, mounts_of_host};
use serde_json::json;

use super::{can_run, refusal};

/// A folder of the host with a kubelet's root and a disk in it, which a container has at `/host`.
pub struct Scene {
    pub host: Folder,
    pub root: tempfile::TempDir,
    pub policy: Policy,
}

impl Scene {
    pub fn new() -> Self {
        let scene = Self {
            host: Folder::new(),
            root: tempfile::tempdir().unwrap(),
            policy: Policy::default(),
        };
        for folder in ["kubelet/pods", "bundle", "disk", "later"] {
            fs::create_dir_all(scene.host.path().join(folder)).unwrap();
        }
        scene.write_spec(&["rprivate"], &[]);
        mount_tmpfs(&scene.disk());
        fs::write(scene.disk().join("file"), "disk").unwrap();
        scene
    }

    pub fn disk(&self) -> PathBuf {
        self.host.path().join("disk")
    }

    /// The spec of a container with these capabilities and these options of its bind, beside
    /// `rbind`.
    pub fn write_spec(&self, options: &[&str], capabilities: &[&str]) {
        let options = [&["rbind"], options].concat();
        let bind = json!({
            "type": "bind", "source": self.host.path(), "destination": "/host",
            "options": options,
        });
        let spec = json!({
            "ociVersion": "1.2.0", "mounts": [bind],
            "process": {"capabilities": {"bounding": capabilities}},
            "linux": {"rootfsPropagation": "rslave"},
        });
        fs::write(self.bundle().join("config.json"), spec.to_string()).unwrap();
    }

    pub fn bundle(&self) -> PathBuf {
        self.host.path().join("bundle")
    }

    pub fn start(&self) -> Container {
        self.start_with(|| {})
    }

    pub fn start_with(&self, more: impl FnOnce()) -> Container {
        Container::start_with(self.root.path(), &[self.bind()], more)
    }

    pub fn bind(&self) -> Inside {
        Inside::tree(self.host.path().to_owned(), "host")
    }

    /// A node whose policy only reports, and a privileged container.
    pub fn for_record() -> Self {
        let mut scene = Self::new();
        scene.write_spec(&["rprivate"], &["CAP_SYS_ADMIN"]);
        scene.policy.host_root = Mode::Report;
        scene
    }

    /// Starts the container as bindguard's shim does.
    pub fn start_recorded(&self) -> Container {
        // The proof comes after the runtime's mounts, and before the container's own.
        let container = self.start_unproved();
        self.prove(&container);
        container
    }

    /// The same without the proof.
    pub fn start_unproved(&self) -> Container {
        let (bundle, places) = (self.bundle(), self.places());
        let admission = admit(&bundle, &self.policy, &places, Attempt::First);
        assert!(admission.is_provable, "{admission:?}");
        self.start()
    }

    pub fn prove(&self, container: &Container) {
        let pid = container.process.pid();
        let proved = prove_container(&self.bundle(), pid, &self.policy, &self.places());
        assert!(proved.report.problems.is_empty(), "{proved:?}");
    }

    /// Starts a container as bindguard's shim does, then calls `more` in the container.
    pub fn recorded(more: impl FnOnce() + Send) -> (Self, Container) {
        let scene = Self::for_record();
        let container = scene.start_recorded();
        container.run_inside(more);
        (scene, container)
    }

    pub fn places(&self) -> Places {
        Places {
            kubelet_roots: vec![self.host.path().join("kubelet")],
            ..Places::default()
        }
    }

    pub fn release(&self, container: &Container, extent: Release) -> Vec<Released> {
        let roots = HostRoots::open(&self.bundle(), &self.policy, &self.places()).unwrap();
        let (process, spec) = (&container.process, Some(container.spec()));
        let host = mounts_of_host();
        let released = release_copies(helper(), process, spec, &roots, |_, _| true, extent);
        assert_eq!(mounts_of_host(), host);
        released.unwrap()
    }

    pub fn refresh(&self, container: &Container) -> Refreshed {
        self.act(container, RefreshAct::Replace(Notify::None))
    }

    pub fn act(&self, container: &Container, act: RefreshAct) -> Refreshed {
        let roots = HostRoots::open(&self.bundle(), &self.policy, &self.places()).unwrap();
        refresh_container(
            helper(),
            REPLACE_TIMEOUT,
            &container.process,
            Some(container.spec()),
            &[&roots],
            act,
            &TuckRecords::at(&self.host.path().join("tucks")),
        )
        .unwrap()
    }

    /// Refreshes, and expects that nothing changes for this reason.
    pub fn is_refused(&self, container: &Container, expected: RefusedReason) {
        let (mounts, host) = (container.mounts(), mounts_of_host());
        let refreshed = self.refresh(container);
        let looked = self.act(container, RefreshAct::Look);
        assert_eq!(refusal(&refreshed), expected);
        assert_eq!(refreshed.mounts[0].kind, Some(KindName::HostRoot));
        assert_eq!(refusal(&looked), expected);
        assert_eq!((container.mounts(), mounts_of_host()), (mounts, host));
    }
}

/// False, with a printed reason, where the kernel does not list another namespace's mounts with
/// unique ids.
pub fn can_record() -> bool {
    let has_ids = live::kernel() >= (6, 11);
    if !has_ids {
        bindguard_testing::skipped("no unique ids of another namespace's mounts before Linux 6.11");
    }
    has_ids && can_run()
}
