//! Children that hang in containers count against the container's own pod, whichever agent started
//! them. A number that the containers of other pods can fill would stop every refresh of the node.
//!
//! The children are those of helper processes, so each test runs in a process of its own.

use std::env;
use std::fs::File;
use std::io::Read;
use std::process::Command;
use std::time::{Duration, Instant};

use bindguard_sys::enter::{
    Action, ContainerNamespace, EnterError, Entered, HeldProcess, HelperProcess, Replacement,
};
use bindguard_testing::live::Container;
use bindguard_testing::{Cgroup, skipped, test_if};
use nix::mount::{MntFlags, umount2};

use crate::enter_hostile::{answer_init, with_silent_fuse};
use crate::enter_scene::{Scene, can_run, far, stale};

/// The share of a pod.
const MAX_IN_POD: usize = 4;

const ENTER_TIMEOUT: Duration = Duration::from_millis(200);

/// A pod with a container in which every child hangs. The FUSE device is the last to end: a
/// container with hanging children ends with it.
struct HangingPod {
    cgroup: Option<Cgroup>,
    container: Option<Container>,
    scene: Scene,
    fuse: Option<File>,
    has_begun: bool,
}

impl HangingPod {
    fn start(name: &str) -> Option<Self> {
        let Ok(fuse) = File::options().read(true).write(true).open("/dev/fuse") else {
            skipped("no /dev/fuse");
            return None;
        };
        let (scene, cgroup) = (Scene::new(), Cgroup::make(name)?);
        let container = with_silent_fuse(&scene, &fuse);
        cgroup.add(container.process.pid());
        Some(Self {
            cgroup: Some(cgroup),
            container: Some(container),
            scene,
            fuse: Some(fuse),
            has_begun: false,
        })
    }

    fn container(&self) -> &Container {
        self.container.as_ref().unwrap()
    }

    fn namespace(&self) -> ContainerNamespace {
        self.container().namespace()
    }

    /// Starts children that hang and are given up.
    fn hang(&mut self, helper: &HelperProcess, namespace: &ContainerNamespace, count: usize) {
        for number in 0..count {
            let (mut stale, parent) = stale(self.container());
            // As if the mount table had named a place below the silent filesystem.
            stale.mount_point = "/deep/etc/conf".into();
            let replacement = Replacement {
                stale: &stale,
                parent: Some(&parent),
                new: None,
            };
            let entered =
                Entered::enter(helper, namespace, vec![replacement], ENTER_TIMEOUT, far()).unwrap();
            let opened = entered.call(Action::Open, 0);
            assert!(
                matches!(opened, Err(EnterError::Silent(_))),
                "{number}: {opened:?}"
            );
            if !self.has_begun {
                // The daemon took the request of the child: not even SIGKILL ends that wait.
                let mut fuse = self.fuse.as_ref().unwrap();
                answer_init(fuse);
                let _ = fuse.read(&mut [0; 1 << 17]).unwrap();
                self.has_begun = true;
            }
        }
    }
}

impl Drop for HangingPod {
    /// The end of the daemon ends the children, and the end of the container its cgroup.
    fn drop(&mut self) {
        self.fuse = None;
        self.container = None;
        self.cgroup = None;
        let _ = self.scene.root();
    }
}

/// An empty work in a container.
fn enter(helper: &HelperProcess, namespace: &ContainerNamespace) -> Result<Entered, EnterError> {
    Entered::enter(
        helper,
        namespace,
        Vec::new(),
        Duration::from_secs(60),
        far(),
    )
}

fn run(test: &str) {
    let mut own = Command::new(env::current_exe().unwrap());
    own.args(["--exact", &format!("enter_hanging::{test}"), "--ignored"]);
    let ended = own.output().unwrap();
    assert!(ended.status.success(), "{ended:?}");
}

#[test]
fn children_that_hang_in_eight_pods_leave_room_for_a_ninth() {
    run("eight_pods_in_a_process_of_their_own");
}

#[test_if(can_run)]
#[ignore = "another test starts it"]
fn eight_pods_in_a_process_of_their_own() {
    let (healthy, scene) = (Cgroup::make("pod-healthy"), Scene::new());
    let Some(healthy) = healthy else { return };
    let other = Container::start(&scene.root(), &scene.binds());
    healthy.add(other.process.pid());
    let mut pods = Vec::new();
    for number in 0..8 {
        let Some(pod) = HangingPod::start(&format!("pod-hung-{number}-")) else {
            return;
        };
        pods.push(pod);
    }
    let mut agents = Vec::new();
    // The second agent is the first after its restart: the children of the first still hang.
    for agent in ["the first agent", "the restarted agent"] {
        let helper = HelperProcess::start().unwrap();
        for pod in &mut pods {
            let namespace = pod.namespace();
            if agent == "the first agent" {
                pod.hang(&helper, &namespace, MAX_IN_POD);
            }
            let refused = enter(&helper, &namespace).map(drop);
            assert!(
                matches!(refused, Err(EnterError::NoChild(_))),
                "{agent}: a hanging pod has its share only: {refused:?}"
            );
        }
        let entered = enter(&helper, &other.namespace()).map(drop);
        assert!(entered.is_ok(), "{agent}: {entered:?}");
        // The agent ends as by its service's restart.
        agents.push(helper.pid());
        drop(helper);
    }
    drop((pods, other));
}

#[test]
fn children_of_an_earlier_agent_count_for_their_pod() {
    run("two_agents_in_a_process_of_their_own");
}

#[test_if(can_run)]
#[ignore = "another test starts it"]
fn two_agents_in_a_process_of_their_own() {
    let Some(mut pod) = HangingPod::start("pod-survivors") else {
        return;
    };
    let namespace = pod.namespace();
    let first = HelperProcess::start().unwrap();
    pod.hang(&first, &namespace, MAX_IN_POD);
    drop(first);
    let second = HelperProcess::start().unwrap();
    let refused = enter(&second, &namespace).map(drop);
    assert!(
        matches!(refused, Err(EnterError::NoChild(_))),
        "{refused:?}"
    );
    // The end of the connection ends the children, as the end of the daemon does: the container has
    // a copy of its device. The pod is refreshed again.
    let force = MntFlags::MNT_FORCE | MntFlags::MNT_DETACH;
    pod.container()
        .run_inside(|| umount2("/deep", force).unwrap());
    let gone = Instant::now();
    while enter(&second, &namespace).is_err() {
        assert!(gone.elapsed() < Duration::from_secs(60), "they stay");
    }
}

#[test]
fn a_container_that_changes_its_cgroup_keeps_its_share() {
    run("a_changing_cgroup_in_a_process_of_its_own");
}

/// A container of Docker with a delegated cgroup: the cgroup of its init is no name of its own.
#[test_if(can_run)]
#[ignore = "another test starts it"]
fn a_changing_cgroup_in_a_process_of_its_own() {
    let Some(mut docker) = HangingPod::start("docker") else {
        return;
    };
    let cgroup = docker.cgroup.take().unwrap();
    let inner = (cgroup.below("one"), cgroup.below("two"));
    let (Some(one), Some(two)) = &inner else {
        return;
    };
    let pid = docker.container().process.pid();
    let namespace = || {
        let process = HeldProcess::open(pid).unwrap().of_container(cgroup.id());
        let namespace = process.mount_namespace().unwrap();
        let requested = docker_spec();
        namespace.accepted(&process, requested.namespace()).unwrap()
    };
    let helper = HelperProcess::start().unwrap();
    one.add(pid);
    let in_one = namespace();
    docker.hang(&helper, &in_one, MAX_IN_POD);
    two.add(pid);
    let moved = enter(&helper, &namespace()).map(drop);
    // The daemon and the container end before their cgroups.
    docker.fuse = None;
    docker.container = None;
    assert!(
        matches!(moved, Err(EnterError::NoChild(_))),
        "it has a second share: {moved:?}"
    );
}

fn docker_spec() -> bindguard_core::spec::SpecUsers {
    bindguard_testing::live::spec_of(None)
}
