//! A pod with a running container that binds some of its keys, and the agent's steps after an
//! update.

use std::fs;

use bindguard_core::refresh::RefusedReason;
use bindguard_core::refresh_request::Notify;
use bindguard_core::report::{AttachMethod, MountResult};
use bindguard_guard::refresh::{
    HelperProcess, PodVolumes, REPLACE_TIMEOUT, RefreshAct, Refreshed, TuckRecords, VolumeOfPod,
    rebind_volume, refresh_container,
};

pub mod host_root;
pub mod running;
pub mod supervised;
pub mod volume;

use bindguard_testing::live::{self, Container, Inside};
use bindguard_testing::{Pod, helper, own_namespace};

/// A pod, and a folder that is its containers' root filesystem.
pub struct Scene {
    pub pod: Pod,
    pub root: tempfile::TempDir,
}

impl Scene {
    pub fn with_keys(keys: u32) -> Self {
        Self {
            pod: Pod::with_keys(keys),
            root: tempfile::tempdir().unwrap(),
        }
    }

    pub fn binds(&self, keys: u32) -> Vec<Inside> {
        let names = ["etc/app/0", "etc/app/1", "etc/app/2"];
        let inside = |key: u32| Inside::of(self.pod.subpath(key), names[key as usize]);
        (0..keys).map(inside).collect()
    }

    pub fn start(&self, keys: u32) -> Container {
        Container::start(self.root.path(), &self.binds(keys))
    }

    /// The steps of the agent after `..data` was renamed.
    pub fn refresh(&self, container: &Container) -> Refreshed {
        self.rebind();
        self.refresh_only(container, RefreshAct::Replace(Notify::None))
    }

    /// Records of their own, in the folder of the pod's kubelet.
    pub fn records(&self) -> TuckRecords {
        TuckRecords::at(&self.pod.places().kubelet_roots[0].join("tucks"))
    }

    pub fn rebind(&self) {
        let kubelet_root = self.pod.places().kubelet_roots[0].clone();
        let volume = VolumeOfPod {
            kubelet_root,
            pod_uid: "uid-1".to_owned(),
            volume: "conf".to_owned(),
        };
        let report = rebind_volume(&volume, &self.pod.policy());
        assert!(report.problems.is_empty(), "{report:?}");
    }

    /// The same as [`Scene::refresh_only`], in a program of its own.
    pub fn refresh_program(&self, container: &Container) -> supervised::Refresh {
        supervised::Refresh {
            pod: self.pod.directory(),
            records: self.records().directory().to_owned(),
            init: container.process.pid(),
            has_beneath: false,
        }
    }

    pub fn refresh_only(&self, container: &Container, act: RefreshAct) -> Refreshed {
        self.refresh_with(helper(), container, act)
    }

    pub fn refresh_with(
        &self,
        helper: &HelperProcess,
        container: &Container,
        act: RefreshAct,
    ) -> Refreshed {
        let volumes = PodVolumes::open(&self.pod.directory()).unwrap();
        refresh_container(
            helper,
            REPLACE_TIMEOUT,
            &container.process,
            Some(container.spec()),
            &[&volumes],
            act,
            &self.records(),
        )
        .unwrap()
    }
}

/// False, with a printed reason, without privilege.
pub fn can_run() -> bool {
    own_namespace()
}

/// The same, also without `MOVE_MOUNT_BENEATH`.
pub fn can_attach_beneath() -> bool {
    let has_beneath = live::kernel() >= (6, 5);
    if !has_beneath {
        bindguard_testing::skipped("no MOVE_MOUNT_BENEATH before Linux 6.5");
    }
    has_beneath && can_run()
}

/// The method of this kernel.
pub fn method() -> AttachMethod {
    if live::kernel() >= (6, 5) {
        AttachMethod::Beneath
    } else {
        AttachMethod::Tucked
    }
}

pub fn methods(refreshed: &Refreshed) -> Vec<AttachMethod> {
    let method = |outcome: &MountResult| match outcome {
        MountResult::Replaced { method } => *method,
        other => panic!("not replaced: {other:?}"),
    };
    refreshed
        .mounts
        .iter()
        .map(|mount| method(&mount.outcome))
        .collect()
}

/// No mount of the container is left in the host's table.
pub fn container_free(scene: &Scene) -> bool {
    !fs::read_to_string("/proc/thread-self/mountinfo")
        .unwrap()
        .contains(scene.root.path().to_str().unwrap())
}

/// The only reason for which a mount was not replaced.
pub fn reason(refreshed: &Refreshed) -> String {
    match &refreshed.mounts[..] {
        [only] if !only.outcome.is_replaced() => only.reason().unwrap().into_owned(),
        others => panic!("{others:?}"),
    }
}

/// The error of the only mount, which no rule refused.
pub fn failure(refreshed: &Refreshed) -> String {
    match &refreshed.mounts[..] {
        [only] => match &only.outcome {
            MountResult::Failed { error } => error.clone(),
            other => panic!("{other:?}"),
        },
        others => panic!("{others:?}"),
    }
}

/// The rule by which the only mount was not replaced.
pub fn refusal(refreshed: &Refreshed) -> RefusedReason {
    match &refreshed.mounts[..] {
        [only] => match &only.outcome {
            MountResult::Refused(refused) => refused.reason,
            other => panic!("{other:?}"),
        },
        others => panic!("{others:?}"),
    }
}
