//! Repairs pods after an update of a volume, or after the host mounted a volume anew: re-binds the
//! stale subpaths on the host, then refreshes the running containers of pods that opted in.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use bindguard_core::error_chain;
use bindguard_core::refresh::SpecBind;
use bindguard_core::report::{Actor, RebindLine};
use bindguard_core::spec::SpecView;
use bindguard_guard::refresh::{BoundMounts, FileBind, PodVolumes, VolumeOfPod, rebind_volume};
use bindguard_guard::{Probes, kubelet_roots_by_all_names};
use bindguard_operator::containers::bundle_of_container;
use bindguard_operator::writers::ContainersOfNode;
use bindguard_sys::files::read_spec;
use tracing::{info, warn};

use crate::limits::SayOnce;
use crate::sinks::AgentLine;
use crate::work::Node;
use crate::work::queue::{Planned, RefreshQueue, TurnEnd};
use crate::work::refresher::{ContainerRefresh, OF_NODE, Refresher};

/// The time limit of a container's refresh in a later turn.
const LATER_TURN: Duration = Duration::from_secs(20);

/// A kubelet root, and the state that its threads share.
#[derive(Debug)]
pub struct KubeletRoot {
    pub node: &'static Node,
    pub path: PathBuf,
    /// `None` if no container is refreshed.
    pub refresher: Option<Refresher>,
    pub refreshes: RefreshQueue,
    /// True once a thread follows files of the host in pods.
    pub are_files_followed: AtomicBool,
}

impl KubeletRoot {
    /// A root, for as long as the process lives.
    pub fn new(node: &'static Node, path: PathBuf) -> &'static Self {
        Box::leak(Box::new(Self {
            node,
            path,
            refresher: Refresher::of(node),
            refreshes: RefreshQueue::default(),
            are_files_followed: AtomicBool::new(false),
        }))
    }

    /// `<root>/pods/<uid>`
    pub fn pod(&self, uid: &str) -> PathBuf {
        self.path.join("pods").join(uid)
    }

    /// Refreshes the containers of the planned pods, for ever.
    pub fn refresh_pods(&self) {
        if let Some(refresher) = &self.refresher {
            let pods = "the containers of pod ";
            self.refreshes
                .run(self.node, pods, |planned| self.refresh(refresher, planned));
        }
    }

    fn refresh(&self, refresher: &Refresher, planned: &Planned) -> TurnEnd {
        let ended = self.refresh_pod(refresher, planned);
        // A pod that is gone is not queried again.
        match self.pod(&planned.id).symlink_metadata() {
            Ok(_) => ended,
            Err(_) => TurnEnd::Done,
        }
    }

    fn refresh_pod(&self, refresher: &Refresher, planned: &Planned) -> TurnEnd {
        let (pods, uid) = (self.node.pods, &planned.id);
        let opted_in = match pods.opted_in(uid, planned.at, self.refreshes.others_wait()) {
            Ok(Some(opted_in)) => opted_in,
            Ok(None) => return TurnEnd::Done,
            Err(error) => {
                // A single warning for the node instead of a warning for each pod.
                refresher.warn(OF_NODE, vec![error_chain(&error)]);
                return TurnEnd::Unanswered;
            }
        };
        let request = &opted_in.request;
        let mut warnings = request.problems.clone();
        let (folder, running) = (self.pod(uid), ContainersOfNode("/".into()));
        // Without an answer the files of a driver are refused, and the refusal is reported.
        let is_unanswered = Cell::new(false);
        let writable = || {
            let writable = pods.writable_mounts(uid);
            is_unanswered.set(writable.is_err());
            writable
        };
        let volumes = PodVolumes::open(&folder);
        let mut is_out_of_time = false;
        match volumes.and_then(|volumes| volumes.with_drivers(&folder, writable)) {
            Ok(volumes) => {
                for container in &opted_in.containers {
                    let bundle = bundle_of_container(Path::new("/"), &container.id);
                    let bundle = bundle.as_deref();
                    let mut refresh = ContainerRefresh::of(container, &request.notify, bundle);
                    let mut bytes = Vec::new();
                    match bundle {
                        Some(bundle) => {
                            bytes = refresh.noted(read_spec(bundle)).unwrap_or_default();
                        }
                        // The container ended, or bindguard does not know its runtime's folders.
                        None if request.binds.any() => {
                            refresh.unread = Some("its bundle is not found".to_owned());
                        }
                        None => {}
                    }
                    let mut spec = None;
                    if !bytes.is_empty() {
                        spec = refresh.noted(SpecView::from_bytes(&bytes));
                    }
                    let in_pod = container.identity.container.as_deref().unwrap_or_default();
                    if request.containers.includes(in_pod) {
                        let binds = spec.as_ref().map(SpecBind::of_spec);
                        refresh.add(volumes.for_container(binds.unwrap_or_default()));
                    }
                    if let Some(bundle) = bundle {
                        if request.binds.volumes {
                            refresh.add_read(BoundMounts::open(bundle, &folder));
                        }
                        if request.binds.host_root {
                            refresh.add_read(refresher.host_roots(bundle));
                        }
                    }
                    if let Some(spec) = &spec
                        && request.binds.host_files
                    {
                        let places = self.node.config.places();
                        let roots = kubelet_roots_by_all_names(places, &Probes::for_create());
                        refresh.add_files(FileBind::of_pod(spec, &roots), &running);
                    }
                    is_out_of_time |= refresher.refresh(planned.turn, LATER_TURN, &mut refresh);
                    warnings.append(&mut refresh.warnings);
                }
            }
            Err(error) => {
                warnings.push(error_chain(&error));
                is_out_of_time = true;
            }
        }
        let is_out_of_time = is_out_of_time || is_unanswered.get();
        refresher.ended(uid, warnings, is_out_of_time)
    }
}

// Updated volumes: makes the host's subpaths current.
//
// From then on every restart of a container finds the current file, whatever shim starts it.

/// Limit of volumes at a time. A re-bind waits most of its time for the kernel's RCU grace period
/// after the detach.
const SIDE_BY_SIDE: usize = 8;

/// Follows the updates of volumes.
#[derive(Debug)]
pub struct Updates {
    root: &'static KubeletRoot,
    warned: SayOnce<VolumeOfPod>,
    standing: SayOnce<String>,
}

impl Updates {
    /// A follower that has seen no update.
    pub fn new(root: &'static KubeletRoot) -> Self {
        Self {
            root,
            warned: SayOnce::default(),
            standing: SayOnce::default(),
        }
    }

    /// Re-binds the stale subpaths of these volumes, and plans the refresh of their running
    /// containers. The host comes first: a container that restarts meanwhile starts with the
    /// current file. Only directories do not wait for the host.
    pub fn follow(&mut self, volumes: &[VolumeOfPod]) {
        let (root, node) = (self.root, self.root.node);
        let is_refreshed = root.refresher.is_some();
        let lines = Mutex::new(Vec::new());
        let next = AtomicUsize::new(0);
        let work = || {
            while let Some(volume) = volumes.get(next.fetch_add(1, Ordering::Relaxed)) {
                let plan = || root.refreshes.plan(volume.pod_uid.clone());
                // A directory has no files until its refresh; the files of a volume keep their old
                // content. The plan after the re-bind finds the containers that started meanwhile.
                if is_refreshed && volume.has_directories() {
                    plan();
                }
                let report = rebind_volume(volume, node.config.policy());
                let line = RebindLine::new(Actor::Agent, &volume.pod_uid, &volume.volume, &report);
                node.metrics.rebound(&line);
                if is_refreshed {
                    plan();
                }
                let mut lines = lines.lock().unwrap_or_else(PoisonError::into_inner);
                lines.push((volume, line));
            }
        };
        match volumes.len().min(SIDE_BY_SIDE) {
            0 | 1 => work(),
            threads => thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work)))),
        }
        for (volume, line) in lines.into_inner().unwrap_or_else(PoisonError::into_inner) {
            let mut warnings = line.problems.clone();
            let mut repairs = Vec::new();
            for bind in &line.binds {
                match bind.is_repaired() {
                    true => repairs.extend(bind.log_message()),
                    false => warnings.extend(bind.log_message()),
                }
            }
            let warnings = self.warned.news(volume.clone(), warnings);
            let is_new = !repairs.is_empty() || !warnings.is_empty();
            if is_new {
                // `namespace/name`, or the uid if the CRI does not answer. The query comes after the
                // re-binds, and so delays no re-bind.
                let pod = node.pods.names(&volume.pod_uid);
                let pod = pod.and_then(|pod| pod.display_name());
                let pod = pod.as_ref().unwrap_or(&volume.pod_uid);
                for repair in repairs {
                    info!("pod {pod}: {repair}");
                }
                for warning in warnings {
                    warn!("pod {pod}: {warning}");
                }
            }
            let line = AgentLine::Rebind(line);
            node.reporting.repaired(line, is_new, &mut self.standing);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::fs;
    use std::time::Instant;

    use bindguard_testing::helper;

    use super::*;
    use crate::work::queue::Turn;

    /// The runtime restarts at the moment of an update.
    #[test]
    fn a_pod_is_refreshed_later_if_the_runtime_does_not_answer() {
        let (folder, node) = (tempfile::tempdir().unwrap(), Node::silent(""));
        let root = KubeletRoot::new(node, folder.path().to_owned());
        let refresher = Refresher::new(helper(), node);
        let planned = Planned {
            id: "u-1".to_owned(),
            at: Instant::now(),
            turn: Turn::First,
            not_before: None,
        };
        fs::create_dir_all(root.pod("u-1")).unwrap();
        assert_eq!(root.refresh(&refresher, &planned), TurnEnd::Unanswered);
        // A pod that is gone is not queried again.
        fs::remove_dir(root.pod("u-1")).unwrap();
        assert_eq!(root.refresh(&refresher, &planned), TurnEnd::Done);
    }
}
