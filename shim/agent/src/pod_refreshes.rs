//! Refreshes the running containers of pods that opted in, after the host's subpaths of a volume became current.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, Sender, channel};

use bindguard_core::error_chain;
use bindguard_guard::refresh::{PodVolumes, VolumeOfPod};

use crate::events::PodIdentity;
use crate::pods::{OptedIn, PodLookup};
use crate::refresher::{Container, Refresher};

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
#[derive(Debug)]
pub struct PodRefreshes<'a> {
    pods: &'a PodLookup,
    refresher: Refresher<'a>,
}

impl<'a> PodRefreshes<'a> {
    /// Refreshes with this refresher the containers of these pods.
    pub fn new(pods: &'a PodLookup, refresher: Refresher<'a>) -> Self {
        Self { pods, refresher }
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
            Err(error) => return self.refresher.warn("", vec![error_chain(&error)]),
        };
        let mut warnings = opted_in.request.problems.clone();
        match PodVolumes::open(&volume.pod_directory()) {
            Ok(volumes) => {
                for container in &opted_in.containers {
                    let uid = &volume.pod_uid;
                    warnings.extend(self.refresh(uid, &opted_in, container, &volumes));
                }
            }
            Err(error) => warnings.push(error_chain(&error)),
        }
        self.refresher.warn(&volume.pod_uid, warnings);
    }

    fn refresh(&mut self, uid: &str, opted_in: &OptedIn, container: &Container, volumes: &PodVolumes) -> Vec<String> {
        let (namespace, pod) = (opted_in.pod.namespace.clone(), opted_in.pod.name.clone());
        let pod = PodIdentity { namespace, name: pod, uid: uid.to_owned() };
        let name = format!("{}/{} container {}", opted_in.pod.namespace, opted_in.pod.name, container.name);
        let container = Container { name, pod: Some((pod, container.name.clone())), ..container.clone() };
        self.refresher.refresh(&container, volumes, opted_in.request.notify)
    }
}
