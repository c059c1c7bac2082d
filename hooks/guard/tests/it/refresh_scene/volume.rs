//! A volume of a CSI driver in a pod's container.

use std::fs;
use std::path::{Path, PathBuf};

use bindguard_core::refresh_request::Notify;
use bindguard_core::spec::SpecUsers;
use bindguard_guard::refresh::{
    BoundMounts, HeldProcess, REPLACE_TIMEOUT, RefreshAct, Refreshed, TuckRecords,
    refresh_container,
};
use bindguard_guard::{Attempt, admit, prove_container};
use bindguard_testing::live::{self, Container, Inside};
use bindguard_testing::{Pod, helper, mount_of, mount_tmpfs};
use nix::mount::{MntFlags, umount2};

/// A pod with a CSI volume, which its container has at `/data`.
pub struct Scene {
    pub pod: Pod,
    root: tempfile::TempDir,
}

impl Scene {
    pub fn new() -> Self {
        let scene = Self {
            pod: Pod::with_keys(1),
            root: tempfile::tempdir().unwrap(),
        };
        fs::create_dir_all(scene.volume()).unwrap();
        scene.mount("1");
        scene
            .pod
            .write_spec(&[mount_of(&scene.volume(), "/data", "rprivate")]);
        scene.admit();
        scene
    }

    /// The same with these options of the bind, beside `rbind`.
    pub fn with_options(options: &[&str]) -> Self {
        Self::with_bind(&[&["rbind"], options].concat())
    }

    pub fn with_bind(options: &[&str]) -> Self {
        let scene = Self::new();
        let mut spec = mount_of(&scene.volume(), "/data", "rprivate");
        spec["options"] = options.into();
        scene.pod.write_spec(&[spec]);
        scene.admit();
        scene
    }

    /// The same, of a container without capabilities.
    pub fn of_an_unprivileged_container(option: &str) -> Self {
        let scene = Self::with_options(&[option]);
        let file = scene.pod.bundle().join("config.json");
        let spec = fs::read(&file).unwrap();
        let mut spec: serde_json::Value = serde_json::from_slice(&spec).unwrap();
        spec["process"]["capabilities"] = serde_json::json!({});
        fs::write(&file, spec.to_string()).unwrap();
        scene
    }

    /// Before Linux 6.5, and in a user namespace.
    pub fn start_where_only_propagation_attaches(&self) -> Container {
        let data = Inside::tree(self.volume(), "data");
        match live::kernel() >= (6, 5) {
            true => Container::start_in_user_namespace(self.root.path(), &[data]),
            false => Container::start(self.root.path(), &[data]),
        }
    }

    /// Starts the container with the mounts below the volume.
    pub fn start_tree(&self) -> Container {
        let data = Inside::tree(self.volume(), "data");
        Container::start(self.root.path(), &[data])
    }

    /// The same, with the mounts of the create in the record.
    pub fn start_tree_recorded(&self) -> Container {
        let container = self.start_tree();
        let (bundle, pid) = (self.pod.bundle(), container.process.pid());
        let proved = prove_container(&bundle, pid, &self.pod.policy(), &self.pod.places());
        assert!(proved.report.problems.is_empty(), "{proved:?}");
        container
    }

    pub fn admit(&self) {
        let (policy, places) = (self.pod.policy(), self.pod.places());
        let admission = admit(&self.pod.bundle(), &policy, &places, Attempt::First);
        assert!(admission.is_provable, "{admission:?}");
    }

    pub fn root(&self) -> &Path {
        self.root.path()
    }

    pub fn volume(&self) -> PathBuf {
        self.pod
            .directory()
            .join("volumes/kubernetes.io~csi/pv/mount")
    }

    pub fn mount(&self, content: &str) {
        mount_tmpfs(&self.volume());
        fs::write(self.volume().join("0"), content).unwrap();
    }

    /// The steps of a driver after its restart.
    pub fn mount_anew(&self, content: &str) {
        umount2(&self.volume(), MntFlags::MNT_DETACH).unwrap();
        self.mount(content);
    }

    pub fn start(&self) -> Container {
        self.start_with(|| {})
    }

    pub fn start_with(&self, more: impl FnOnce()) -> Container {
        let data = Inside::of(self.volume(), "data");
        Container::start_with(self.root.path(), &[data], more)
    }

    pub fn bound_mounts(&self) -> BoundMounts<'static> {
        BoundMounts::open(&self.pod.bundle(), &self.pod.directory()).unwrap()
    }

    pub fn refresh(&self, container: &Container) -> Refreshed {
        self.act(container, RefreshAct::Replace(Notify::None))
    }

    pub fn act(&self, container: &Container, act: RefreshAct) -> Refreshed {
        self.act_on(container, &self.bound_mounts(), act)
    }

    pub fn act_on(
        &self,
        container: &Container,
        mounts: &BoundMounts,
        act: RefreshAct,
    ) -> Refreshed {
        self.act_on_process(&container.process, container.spec(), mounts, act)
    }

    pub fn act_on_process(
        &self,
        process: &HeldProcess,
        spec: &SpecUsers,
        mounts: &BoundMounts,
        act: RefreshAct,
    ) -> Refreshed {
        let records = TuckRecords::at(&self.records());
        refresh_container(
            helper(),
            REPLACE_TIMEOUT,
            process,
            Some(spec),
            &[mounts],
            act,
            &records,
        )
        .unwrap()
    }

    pub fn records(&self) -> PathBuf {
        self.pod.places().kubelet_roots[0].join("tucks")
    }

    /// A mount of the host below the volume.
    pub fn mount_below(&self, content: &str) {
        let nested = self.volume().join("nested");
        fs::create_dir(&nested).unwrap();
        mount_tmpfs(&nested);
        fs::write(nested.join("file"), content).unwrap();
    }
}
