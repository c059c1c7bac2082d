//! Refreshes the running containers of pods that opted in, after the host's subpaths of a volume became current.
//!
//! It has a thread of its own: a container can make its own refresh wait, and must not delay the host's re-binds.

use std::collections::HashMap;
use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use bindguard_core::error_chain;
use bindguard_core::policy::{Mode, Policy};
use bindguard_guard::refresh::{
    Abandoned, HeldProcess, NotReplaced, PodVolumes, RefreshAct, RefreshOutcome, Refreshed, VolumeOfPod,
    refresh_container,
};
use tracing::{info, warn};

use crate::metrics::{Metrics, RefreshResult};
use crate::pods::{Container, OptedIn, PodLookup};

/// The volumes whose containers are to be refreshed.
#[derive(Debug, Clone)]
pub struct Refreshes(Sender<VolumeOfPod>);

impl Refreshes {
    /// Plans the refresh of a volume's containers.
    pub fn plan(&self, volume: VolumeOfPod) {
        // Without the thread there is no refresh; its panic was reported.
        let _ = self.0.send(volume);
    }
}

/// Both ends of the plan.
pub fn refreshes() -> (Refreshes, Receiver<VolumeOfPod>) {
    let (plan, planned) = channel();
    (Refreshes(plan), planned)
}

/// Works in a thread of its own.
pub struct Refresher<'a> {
    pods: &'a PodLookup,
    metrics: &'a Metrics,
    policy: &'a Policy,
    /// Children that hang in a container, by its id: no other one is started there.
    abandoned: HashMap<String, Abandoned>,
    warned: HashMap<String, Vec<String>>,
}

impl<'a> Refresher<'a> {
    /// A refresher that has done nothing.
    pub fn new(pods: &'a PodLookup, metrics: &'a Metrics, policy: &'a Policy) -> Self {
        Self { pods, metrics, policy, abandoned: HashMap::new(), warned: HashMap::new() }
    }

    /// Refreshes what is planned, until no plan can come any more.
    pub fn run(&mut self, planned: &Receiver<VolumeOfPod>) {
        while let Ok(first) = planned.recv() {
            // Of many plans for one pod, one refresh does them all.
            let mut due = VecDeque::from([first]);
            due.extend(planned.try_iter());
            while let Some(volume) = due.pop_front() {
                due.retain(|other| other.pod_directory() != volume.pod_directory());
                self.refresh_pod(&volume);
            }
        }
    }

    fn refresh_pod(&mut self, volume: &VolumeOfPod) {
        let opted_in = match self.pods.opted_in(&volume.pod_uid) {
            Ok(Some(opted_in)) => opted_in,
            Ok(None) => return,
            // One warning for the node, not one for each pod.
            Err(error) => return self.warn("", vec![error_chain(&error)]),
        };
        let mut warnings = opted_in.request.problems.clone();
        match PodVolumes::open(&volume.pod_directory()) {
            Ok(volumes) => {
                for container in &opted_in.containers {
                    warnings.extend(self.refresh(&opted_in, container, &volumes));
                }
            }
            Err(error) => warnings.push(error_chain(&error)),
        }
        self.warn(&volume.pod_uid, warnings);
    }

    /// Refreshes one container, and returns what could not be done.
    fn refresh(&mut self, opted_in: &OptedIn, container: &Container, volumes: &PodVolumes) -> Vec<String> {
        let name = format!("{}/{} container {}", opted_in.pod.namespace, opted_in.pod.name, container.name);
        self.abandoned.retain(|_, child| child.is_alive());
        if self.abandoned.contains_key(&container.id) {
            return vec![format!("refresh {name}: an earlier refresh still hangs in it")];
        }
        let start = Instant::now();
        let refreshed = match held(container) {
            Ok(process) => refresh_container(&process, volumes, self.act(opted_in)),
            Err(None) => return Vec::new(),
            Err(Some(why)) => return vec![format!("refresh {name}: {why}")],
        };
        let refreshed = match refreshed {
            Ok(refreshed) => refreshed,
            // A container that ends at this very moment.
            Err(error) => return vec![format!("refresh {name}: {}", error_chain(&error))],
        };
        if refreshed.replaced() > 0 {
            self.metrics.refresh_seconds.observe(start.elapsed().as_secs_f64());
        }
        let warnings = self.report(&name, &refreshed);
        self.abandoned.extend(refreshed.abandoned.map(|child| (container.id.clone(), child)));
        warnings
    }

    fn act(&self, opted_in: &OptedIn) -> RefreshAct {
        match self.policy.stale_subpaths {
            Mode::Repair => RefreshAct::Replace(opted_in.request.notify),
            Mode::Report | Mode::Off => RefreshAct::Look,
        }
    }

    fn report(&self, name: &str, refreshed: &Refreshed) -> Vec<String> {
        let mut warnings = Vec::new();
        for mount in &refreshed.mounts {
            let result = RefreshResult::of(&mount.outcome);
            self.metrics.refreshed(result);
            let place = mount.destination.display();
            match &mount.outcome {
                RefreshOutcome::Replaced(_) => info!("refreshed {place} of {name}"),
                RefreshOutcome::KeyGone => warnings.push(format!(
                    "{place} of {name} keeps its old content: the volume has no {} any more",
                    mount.sub_path.display()
                )),
                RefreshOutcome::Hidden => {
                    warnings.push(format!("{place} of {name} is not refreshed: the container mounted over it"));
                }
                // The events of these changes, and the checks after the last one, repeat it.
                RefreshOutcome::NotReplaced(NotReplaced::Restless(_)) => {}
                RefreshOutcome::NotReplaced(why) => {
                    warnings.push(format!("{place} of {name} is not refreshed: {}", error_chain(why)));
                }
                RefreshOutcome::Stale => warnings.push(format!("{place} of {name} is stale; policy only reports it")),
            }
        }
        if let Some(error) = &refreshed.not_notified {
            self.metrics.refreshed(RefreshResult::not_notified);
            warnings.push(format!("{name} is refreshed but not notified: {}", error_chain(error)));
        }
        warnings
    }

    /// Logs the warnings that are new for this pod.
    fn warn(&mut self, pod: &str, warnings: Vec<String>) {
        let known = self.warned.remove(pod).unwrap_or_default();
        warnings.iter().filter(|warning| !known.contains(warning)).for_each(|warning| warn!("{warning}"));
        if !warnings.is_empty() {
            self.warned.insert(pod.to_owned(), warnings);
        }
    }
}

/// The init of a container, checked by its cgroup: since the CRI's answer another process may have got the pid. `None` if it
/// ended.
fn held(container: &Container) -> Result<HeldProcess, Option<String>> {
    let process = HeldProcess::open(container.pid).map_err(|_| None)?;
    let cgroup = process.read("cgroup").map_err(|_| None)?;
    match String::from_utf8_lossy(&cgroup).contains(&container.id) {
        true => Ok(process),
        false => Err(Some(format!("process {} is not in its cgroup", container.pid))),
    }
}
