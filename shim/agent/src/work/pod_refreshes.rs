//! Refreshes the running containers of pods that opted in, after the host's subpaths of a volume
//! became current, or the host mounted a volume anew.
//!
//! Several pods at a time: most of a refresh is a wait, for the kernel's RCU grace period after
//! each detach and for a processor. Workers start when there is work, and end when there is none:
//! an idle agent keeps no stacks for them.

use std::cell::Cell;
use std::collections::HashSet;
use std::error::Error;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, Scope};
use std::time::{Duration, Instant};

use bindguard_core::error_chain;
use bindguard_core::identity::{Identity, PodName};
use bindguard_core::places::Places;
use bindguard_core::refresh::SpecBind;
use bindguard_core::spec::SpecView;
use bindguard_guard::refresh::{BoundFiles, BoundMounts, CurrentFiles, FileBind, PodVolumes};
use bindguard_guard::{Probes, kubelet_roots_by_all_names};
use bindguard_operator::bundles::bundle_of_container;
use bindguard_operator::engines::ContainersOfNode;
use bindguard_sys::bundle::read_spec;
use tracing::error;

use crate::container::Container;
use crate::pods::{OptedIn, PodLookup};
use crate::work::refresh_queue::{Planned, PodOfRoot, RefreshQueue, Turn, retry_pause};
use crate::work::refresher::{OF_NODE, RefreshedContainer, Refresher};

/// Workers that begin at once: eight took more processor time for each file (docs/decisions/0014).
const SIDE_BY_SIDE: usize = 2;

/// Limit of workers. A worker may wait for a container, and must not delay the other pods.
const MAX_WORKERS: usize = 32;

/// The interval at which a further worker starts while plans wait.
const WORKER_INTERVAL: Duration = Duration::from_millis(100);

/// The time limit of a container's refresh in the first turn, and in the second turn.
const FIRST_TURN: Duration = Duration::from_millis(300);
const LAST_TURN: Duration = Duration::from_secs(20);

/// The interval at which findings about pods that are gone are forgotten.
const FORGET_INTERVAL: Duration = Duration::from_secs(600);

/// The pods whose containers are to be refreshed.
#[derive(Debug, Clone)]
pub struct Refreshes(Sender<Planned>);

impl Refreshes {
    /// Plans the refresh of a pod's containers.
    pub fn plan(&self, pod: PodOfRoot) {
        // Without the thread there is no refresh; its panic was reported.
        let _ = self.0.send(Planned {
            pod,
            at: Instant::now(),
            turn: Turn::First,
            not_before: None,
        });
    }
}

/// Both ends of the plan.
pub fn refreshes() -> (Refreshes, Receiver<Planned>) {
    let (plan, planned) = channel();
    (Refreshes(plan), planned)
}

/// Starts the workers, from a thread of its own.
#[derive(Debug)]
pub struct PodRefreshes<'a> {
    pods: &'a PodLookup,
    places: &'a Places,
    refresher: Refresher<'a>,
    queue: Mutex<RefreshQueue>,
    /// The last time that findings about pods which are gone were forgotten.
    forgot: Mutex<Instant>,
}

impl<'a> PodRefreshes<'a> {
    /// Refreshes with this refresher the containers of these pods.
    pub fn new(pods: &'a PodLookup, places: &'a Places, refresher: Refresher<'a>) -> Self {
        Self {
            pods,
            places,
            refresher,
            queue: Mutex::default(),
            forgot: Mutex::new(Instant::now()),
        }
    }

    /// Refreshes what is planned, until no plan can come any more.
    pub fn run(&self, planned: &Receiver<Planned>) {
        thread::scope(|scope| {
            while let Some(planned) = self.next(planned) {
                let needs_worker = match planned {
                    Some(planned) => self.queue().add(planned, SIDE_BY_SIDE),
                    None => self.queue().needs_worker(MAX_WORKERS),
                };
                if needs_worker {
                    self.start_worker(scope);
                }
            }
        });
    }

    /// The next plan; `Some(None)` if a plan may wait for a worker and none comes for a moment. `None`
    /// if no plan can come any more.
    fn next(&self, planned: &Receiver<Planned>) -> Option<Option<Planned>> {
        let limit = {
            let queue = self.queue();
            if queue.others_wait() || queue.has_workers() {
                WORKER_INTERVAL
            } else if let Some(due) = queue.due() {
                due.saturating_duration_since(Instant::now())
            } else {
                drop(queue);
                return planned.recv().ok().map(Some);
            }
        };
        match planned.recv_timeout(limit) {
            Ok(planned) => Some(Some(planned)),
            Err(RecvTimeoutError::Timeout) => Some(None),
            Err(RecvTimeoutError::Disconnected) => None,
        }
    }

    fn start_worker<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) {
        let worker = thread::Builder::new().name("refresh-pod".to_owned());
        if worker.spawn_scoped(scope, || self.work()).is_err() {
            // Without a new thread, this thread refreshes the pods in sequence.
            self.work();
        }
    }

    fn work(&self) {
        let mut next = self.queue().next(None);
        while let Some(planned) = next {
            if catch_unwind(AssertUnwindSafe(|| self.refresh_pod(&planned))).is_err() {
                error!(
                    "refresh the containers of pod {}: the thread panicked",
                    planned.pod.uid
                );
                self.refresher.count_restart();
            }
            next = self.queue().next(Some(&planned));
        }
        if self.forgets_now() {
            self.forget_others();
        }
    }

    /// True once in each interval.
    fn forgets_now(&self) -> bool {
        let mut last = self.forgot.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = last.elapsed() >= FORGET_INTERVAL;
        if is_due {
            *last = Instant::now();
        }
        is_due
    }

    /// Findings come with refreshes, so their number grows only while workers end. A CRI that does
    /// not answer still has its containers.
    fn forget_others(&self) {
        let Ok(pods) = self.pods.all() else { return };
        let here: HashSet<&str> = pods
            .containers
            .iter()
            .flat_map(|container| [Some(container.id.as_str()), container.pod.uid.as_deref()])
            .flatten()
            .collect();
        self.refresher.forget_others(|about| here.contains(about));
    }

    fn queue(&self) -> MutexGuard<'_, RefreshQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn refresh_pod(&self, planned: &Planned) {
        let Planned { pod, at, turn, .. } = planned;
        let others_wait = self.queue().others_wait();
        let opted_in = match self.pods.opted_in(&pod.uid, *at, others_wait) {
            Ok(Some(opted_in)) => opted_in,
            Ok(None) => return,
            Err(error) => {
                self.try_later(planned.clone());
                // A single warning for the node instead of a warning for each pod.
                return self.refresher.warn(OF_NODE, vec![error_chain(&error)]);
            }
        };
        let mut warnings = opted_in.request.problems.clone();
        let mut is_out_of_time = false;
        let folder = pod.directory();
        // Without an answer the files of a driver are refused, and the refusal is reported.
        let is_unanswered = Cell::new(false);
        let writable = || {
            let writable = self.pods.writable_mounts(&pod.uid);
            is_unanswered.set(writable.is_err());
            writable
        };
        let volumes = PodVolumes::open(&folder);
        match volumes.and_then(|volumes| volumes.with_drivers(&folder, writable)) {
            Ok(volumes) => {
                for container in &opted_in.containers {
                    let done = self.refresh(pod, &opted_in, container, &volumes, *turn);
                    warnings.extend(done.warnings);
                    is_out_of_time |= done.is_out_of_time;
                }
            }
            Err(error) => {
                warnings.push(error_chain(&error));
                is_out_of_time = true;
            }
        }
        if is_out_of_time || is_unanswered.get() {
            match turn {
                Turn::First => self.queue().add_last(planned),
                Turn::Last | Turn::Retry => self.try_later(Planned {
                    turn: Turn::Retry,
                    ..planned.clone()
                }),
            }
        }
        self.refresher.warn(&pod.uid, warnings);
    }

    /// Plans the same refresh again, unless the pod is gone.
    fn try_later(&self, planned: Planned) {
        if planned.pod.directory().symlink_metadata().is_ok() {
            let again = Instant::now() + retry_pause(planned.at);
            self.queue().add_later(planned, again);
        }
    }

    fn refresh(
        &self,
        pod: &PodOfRoot,
        opted_in: &OptedIn,
        container: &Container,
        volumes: &PodVolumes,
        turn: Turn,
    ) -> RefreshedContainer {
        let identity = Identity {
            container: Some(container.name.clone()),
            pod: PodName {
                namespace: Some(opted_in.pod.namespace.clone()),
                name: Some(opted_in.pod.name.clone()),
                uid: Some(pod.uid.clone()),
            },
        };
        let name = format!(
            "{}/{} container {}",
            opted_in.pod.namespace, opted_in.pod.name, container.name
        );
        let (root, request) = (Path::new("/"), &opted_in.request);
        let binds = request.binds;
        let mut unread = None;
        let bundle = bundle_of_container(root, &container.id);
        let bundle = bundle.as_deref();
        if binds.any() && bundle.is_none() {
            // The container ended, or bindguard does not know its runtime's folders.
            unread = Some("its bundle is not found".to_owned());
        }
        let bytes = bundle.and_then(|bundle| noted(read_spec(bundle), &mut unread));
        let spec = bytes
            .as_deref()
            .and_then(|bytes| noted(SpecView::from_bytes(bytes), &mut unread));
        let gets_files = request.containers.includes(&container.name);
        let files = gets_files.then(|| {
            let binds = spec.as_ref().map(SpecBind::of_spec);
            volumes.for_container(binds.unwrap_or_default())
        });
        let mounts = bundle
            .filter(|_| binds.volumes)
            .and_then(|bundle| noted(BoundMounts::open(bundle, &pod.directory()), &mut unread));
        let roots = bundle
            .filter(|_| binds.host_root)
            .and_then(|bundle| noted(self.refresher.host_roots(bundle, self.places), &mut unread));
        let running = ContainersOfNode::at(root);
        let host_files = spec.as_ref().filter(|_| binds.host_files).map(|spec| {
            let roots = kubelet_roots_by_all_names(self.places, &Probes::for_create());
            BoundFiles::open(FileBind::of_pod(spec, &roots), container.pid, &running)
        });
        let (host_files, errors) = host_files.unzip();
        let kinds: [Option<&dyn CurrentFiles>; 4] = [
            files.as_ref().map(|files| files as &dyn CurrentFiles),
            mounts.as_ref().map(|mounts| mounts as &dyn CurrentFiles),
            roots.as_ref().map(|roots| roots as &dyn CurrentFiles),
            host_files.as_ref().map(|files| files as &dyn CurrentFiles),
        ];
        let kinds: Vec<&dyn CurrentFiles> = kinds.into_iter().flatten().collect();
        let errors = errors.into_iter().flatten();
        let errors: Vec<String> = errors
            .map(|error| format!("{name}: {}", error_chain(&error)))
            .collect();
        let container = Container {
            name,
            identity,
            ..container.clone()
        };
        let time = match turn {
            Turn::First => FIRST_TURN,
            Turn::Last | Turn::Retry => LAST_TURN,
        };
        let mut done = self
            .refresher
            .refresh(turn, time, &container, &kinds, &request.notify);
        if let Some(why) = unread {
            done.is_out_of_time = true;
            let name = &container.name;
            let warning = format!("binds of {name} are not refreshed: {why}; trying again");
            done.warnings.push(warning);
        }
        done.warnings.extend(errors);
        done
    }
}

/// The result; an error is noted as the reason for which binds are not refreshed.
pub fn noted<T, E: Error + 'static>(read: Result<T, E>, unread: &mut Option<String>) -> Option<T> {
    read.map_err(|error| *unread = Some(error_chain(&error)))
        .ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::fs;
    use std::sync::Arc;

    use bindguard_core::policy::Policy;
    use bindguard_testing::helper;

    use super::*;
    use crate::sinks::events::Events;
    use crate::sinks::journal::JournalWriter;
    use crate::sinks::metrics::Metrics;
    use crate::sinks::reporting::Reporting;
    use crate::threads::IdleMemory;

    /// The runtime restarts at the moment of an update.
    #[test]
    fn a_pod_is_refreshed_later_if_the_runtime_does_not_answer() {
        let (metrics, policy, places) = (Metrics::new(), Policy::default(), Places::default());
        let reporting = Reporting {
            events: Events::off(Arc::clone(&metrics)),
            journal: JournalWriter::off(Arc::clone(&metrics)),
            memory: IdleMemory::default(),
        };
        let pods = PodLookup::unanswered();
        let refresher = Refresher::new(helper(), &metrics, &reporting, &policy);
        let refreshes = PodRefreshes::new(&pods, &places, refresher);
        let root = tempfile::tempdir().unwrap();
        let mut planned = Planned {
            pod: PodOfRoot {
                kubelet_root: root.path().to_owned(),
                uid: "u-1".to_owned(),
            },
            at: Instant::now(),
            turn: Turn::First,
            not_before: None,
        };
        fs::create_dir_all(planned.pod.directory()).unwrap();
        refreshes.refresh_pod(&planned);
        assert!(refreshes.queue().due().unwrap() > Instant::now());
        // A pod that is gone is not queried again.
        *refreshes.queue() = RefreshQueue::default();
        fs::remove_dir(planned.pod.directory()).unwrap();
        refreshes.refresh_pod(&planned);
        assert_eq!(refreshes.queue().due(), None);
        fs::create_dir(planned.pod.directory()).unwrap();
        // The pauses grow.
        let waited = Duration::from_secs(100);
        planned.at -= waited;
        refreshes.refresh_pod(&planned);
        assert!(refreshes.queue().due().unwrap() > Instant::now() + waited / 2);
    }
}
