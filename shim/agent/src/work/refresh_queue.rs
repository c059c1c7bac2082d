//! The pods whose containers wait for a refresh, and the pods in work.
//!
//! Several workers take pods from the queue. A pod has one worker at a time: so no container is
//! refreshed twice at once, and the updates of a volume arrive in order.

use std::collections::{HashMap, HashSet};
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use bindguard_config::Config;
use bindguard_core::report::{Actor, BindRecord, RebindLine, Severity};
use bindguard_guard::refresh::{VolumeOfPod, rebind_volume};
use tracing::{info, warn};

use crate::pods::PodLookup;
use crate::sinks::events::Standing;
use crate::sinks::metrics::Metrics;
use crate::sinks::reporting::Reporting;
use crate::work::pod_refreshes::Refreshes;

/// The turn of a pod. A slow container waits until every other container had a first turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Turn {
    /// After an update.
    First,
    /// For containers that needed more time than the first turn has.
    Last,
    /// After a last turn that failed. A child that still hangs in the container is not waited for:
    /// many such containers would keep the workers busy.
    Retry,
}

/// The first pause before a refresh that failed is tried again, and the longest: a survey finds the
/// container again by then.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);
const MAX_RETRY_INTERVAL: Duration = Duration::from_secs(300);

/// The pause before the next try of a refresh that was planned at this moment. Each pause is as
/// long as all earlier pauses together, so a container that hangs for hours costs few tries.
pub fn retry_pause(planned_at: Instant) -> Duration {
    let waited = planned_at.elapsed();
    waited.clamp(RETRY_INTERVAL, MAX_RETRY_INTERVAL)
}

/// A pod of a kubelet root.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PodOfRoot {
    pub kubelet_root: PathBuf,
    pub uid: String,
}

impl PodOfRoot {
    /// `<root>/pods/<uid>`
    pub fn directory(&self) -> PathBuf {
        self.kubelet_root.join("pods").join(&self.uid)
    }
}

impl From<VolumeOfPod> for PodOfRoot {
    fn from(volume: VolumeOfPod) -> Self {
        Self {
            kubelet_root: volume.kubelet_root,
            uid: volume.pod_uid,
        }
    }
}

/// A pod whose containers are to be refreshed, and when that was planned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Planned {
    pub pod: PodOfRoot,
    /// A moment after the update of a volume, and after the re-bind of its subpaths on the host.
    pub at: Instant,
    pub turn: Turn,
    /// The plan waits until this moment, because an earlier try failed.
    pub not_before: Option<Instant>,
}

impl Planned {
    fn is_due(&self, now: Instant) -> bool {
        self.not_before.is_none_or(|moment| moment <= now)
    }
}

/// Limit of workers in a last turn: the rest of the workers is free for first turns.
const MAX_LATE: usize = 8;

/// The plans that wait, the pods that are refreshed, and the number of workers.
#[derive(Debug, Default)]
pub struct RefreshQueue {
    waiting: Vec<Planned>,
    /// The pods that have a worker.
    busy: HashSet<PodOfRoot>,
    workers: usize,
    /// The workers that do a last turn.
    late: usize,
}

impl RefreshQueue {
    /// Adds a plan, and counts a further worker if that helps. Returns true if the caller has to
    /// start it.
    pub fn add(&mut self, planned: Planned, limit: usize) -> bool {
        // The worker of a busy pod takes the pod's next plan itself.
        let is_busy = self.busy.contains(&planned.pod);
        self.waiting.push(planned);
        !is_busy && self.needs_worker(limit)
    }

    /// Counts a further worker if a plan could begin, and fewer than these work. Returns true if
    /// the caller has to start it.
    pub fn needs_worker(&mut self, limit: usize) -> bool {
        let needs = self.workers < limit && self.free().is_some();
        self.workers += usize::from(needs);
        needs
    }

    /// The plan that is next: of the first turns the oldest, then of the last turns.
    fn free(&self) -> Option<usize> {
        let now = Instant::now();
        let is_free = |planned: &&Planned| {
            planned.is_due(now)
                && !self.busy.contains(&planned.pod)
                && (planned.turn == Turn::First || self.late < MAX_LATE)
        };
        let free = self
            .waiting
            .iter()
            .enumerate()
            .filter(|(_, planned)| is_free(planned));
        free.min_by_key(|(index, planned)| (planned.turn, *index))
            .map(|(index, _)| index)
    }

    /// A plan for the worker that returns from `done`, or has just started. `None` ends the worker.
    /// A refresh serves all waiting plans for the pod.
    pub fn next(&mut self, done: Option<&Planned>) -> Option<Planned> {
        if let Some(done) = done {
            self.busy.remove(&done.pod);
            self.late -= usize::from(done.turn != Turn::First);
        }
        let Some(mut next) = self.free().map(|index| self.waiting.remove(index)) else {
            self.workers -= 1;
            return None;
        };
        let pod = next.pod.clone();
        let same_pod = self.waiting.extract_if(.., |other| other.pod == pod);
        next.at = same_pod.map(|other| other.at).fold(next.at, Instant::max);
        self.busy.insert(pod);
        self.late += usize::from(next.turn != Turn::First);
        Some(next)
    }

    /// Plans the same refresh again, at this moment or later.
    pub fn add_later(&mut self, planned: Planned, not_before: Instant) {
        self.waiting.push(Planned {
            not_before: Some(not_before),
            ..planned
        });
    }

    /// The moment at which the first of the later plans is due.
    pub fn due(&self) -> Option<Instant> {
        let waiting = self.waiting.iter();
        waiting.filter_map(|planned| planned.not_before).min()
    }

    /// True while a worker may plan a refresh.
    pub fn has_workers(&self) -> bool {
        self.workers > 0
    }

    /// Plans the last turn of a pod. The calling worker, or a later worker, takes the
    /// turn.
    pub fn add_last(&mut self, planned: &Planned) {
        self.waiting.push(Planned {
            turn: Turn::Last,
            ..planned.clone()
        });
    }

    /// True if further plans wait for a worker.
    pub fn others_wait(&self) -> bool {
        let now = Instant::now();
        self.waiting.iter().any(|planned| planned.is_due(now))
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
pub struct Updates<'a> {
    config: &'a Config,
    metrics: &'a Metrics,
    reporting: &'a Reporting,
    /// `None` if no running container is refreshed.
    refreshes: Option<Refreshes>,
    /// The warnings about each volume. A survey finds the same warnings again, and logs only new
    /// warnings.
    warned: HashMap<VolumeOfPod, Vec<String>>,
    standing: Standing<String>,
    pods: PodLookup,
}

impl<'a> Updates<'a> {
    /// A follower that has seen no update.
    pub fn new(
        config: &'a Config,
        metrics: &'a Metrics,
        reporting: &'a Reporting,
        refreshes: Option<Refreshes>,
        pods: PodLookup,
    ) -> Self {
        Self {
            config,
            metrics,
            reporting,
            refreshes,
            warned: HashMap::new(),
            standing: Standing::default(),
            pods,
        }
    }

    /// Re-binds the stale subpaths of these volumes, and plans the refresh of their running
    /// containers. The host comes first: a container that restarts meanwhile starts with the
    /// current file. Only directories do not wait for the host.
    pub fn follow(&mut self, volumes: &[VolumeOfPod]) {
        let lines = Mutex::new(Vec::new());
        let next = AtomicUsize::new(0);
        let work = || {
            while let Some(volume) = volumes.get(next.fetch_add(1, Ordering::Relaxed)) {
                let line = self.rebind(volume);
                lines
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push((volume, line));
            }
        };
        match volumes.len().min(SIDE_BY_SIDE) {
            0 | 1 => work(),
            threads => thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work)))),
        }
        let lines = lines.into_inner().unwrap_or_else(PoisonError::into_inner);
        for (volume, line) in lines {
            let is_new = self.log(volume, &line);
            self.reporting.rebound(line, is_new, &mut self.standing);
        }
        self.forget_gone();
    }

    /// Forgets the warnings about pods whose directory the kubelet removed.
    fn forget_gone(&mut self) {
        self.warned.retain(|volume, _| {
            let directory = volume.pod_directory().symlink_metadata();
            !directory.is_err_and(|error| error.kind() == ErrorKind::NotFound)
        });
    }

    fn rebind(&self, volume: &VolumeOfPod) -> RebindLine {
        // A directory has no files until its refresh; the files of a volume keep their old content.
        // The plan after the re-bind finds the containers that started meanwhile.
        if let Some(refreshes) = self.refreshes.as_ref().filter(|_| volume.has_directories()) {
            refreshes.plan(volume.clone().into());
        }
        let report = rebind_volume(volume, self.config.policy());
        let line = RebindLine::new(Actor::Agent, &volume.pod_uid, &volume.volume, &report);
        self.metrics.rebound(&line);
        if let Some(refreshes) = &self.refreshes {
            refreshes.plan(volume.clone().into());
        }
        line
    }

    /// Returns true if it logged something.
    fn log(&mut self, volume: &VolumeOfPod, line: &RebindLine) -> bool {
        let mut warnings = line.problems.clone();
        let mut repairs = Vec::new();
        for (severity, message) in line.binds.iter().filter_map(BindRecord::log_message) {
            match severity {
                Severity::Info => repairs.push(message),
                Severity::Warning => warnings.push(message),
            }
        }
        let known = self.warned.remove(volume).unwrap_or_default();
        let new_warnings: Vec<&String> = warnings
            .iter()
            .filter(|warning| !known.contains(warning))
            .collect();
        let is_new = !repairs.is_empty() || !new_warnings.is_empty();
        if is_new {
            let pod = self.pod_display_name(&volume.pod_uid);
            repairs
                .iter()
                .for_each(|repair| info!("pod {pod}: {repair}"));
            new_warnings
                .iter()
                .for_each(|warning| warn!("pod {pod}: {warning}"));
        }
        if !warnings.is_empty() {
            self.warned.insert(volume.clone(), warnings);
        }
        is_new
    }

    /// `namespace/name`, or the uid if the CRI does not answer. The re-binds are done by now, so the
    /// query delays none of them.
    fn pod_display_name(&self, uid: &str) -> String {
        let named = self.pods.names(uid).and_then(|pod| pod.display_name());
        named.unwrap_or_else(|| uid.to_owned())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::*;

    fn planned(pod: &str, at: Instant) -> Planned {
        let pod = PodOfRoot {
            kubelet_root: "/k".into(),
            uid: pod.to_owned(),
        };
        Planned {
            pod,
            at,
            turn: Turn::First,
            not_before: None,
        }
    }

    #[test]
    fn a_plan_that_is_due_later_waits_and_joins_a_new_plan() {
        let (mut queue, now) = (RefreshQueue::default(), Instant::now());
        queue.add(planned("a", now), 1);
        let first = queue.next(None).unwrap();
        queue.add_later(first.clone(), now + Duration::from_secs(60));
        assert_eq!(queue.next(Some(&first)), None);
        assert!(!queue.others_wait() && queue.due().is_some());
        assert!(queue.add(planned("a", now), 1));
        let second = queue.next(None).unwrap();
        assert_eq!((second.not_before, queue.due()), (None, None));
        queue.add_later(second.clone(), now);
        assert!(queue.others_wait());
        assert_eq!(queue.next(Some(&second)).unwrap().pod, second.pod);
    }

    #[test]
    fn a_pod_has_one_worker_at_a_time() {
        let (mut queue, now) = (RefreshQueue::default(), Instant::now());
        assert!(queue.add(planned("a", now), 2));
        let first = queue.next(None).unwrap();
        let later = now + Duration::from_secs(1);
        assert!(!queue.add(planned("a", later), 2), "its worker takes it");
        assert!(queue.add(planned("b", now), 2));
        let second = queue.next(None).unwrap();
        assert_eq!(
            (first.pod.uid.as_str(), second.pod.uid.as_str()),
            ("a", "b")
        );
        assert_eq!(queue.next(Some(&second)), None, "the other pod is busy");
        assert_eq!(queue.next(Some(&first)).unwrap().at, later);
    }

    #[test]
    fn one_refresh_does_all_plans_of_a_pod() {
        let (mut queue, now) = (RefreshQueue::default(), Instant::now());
        let later = now + Duration::from_secs(1);
        queue.add(planned("a", now), 1);
        queue.add(planned("b", now), 1);
        queue.add(planned("a", later), 1);
        let first = queue.next(None).unwrap();
        assert_eq!((first.pod.uid.as_str(), first.at), ("a", later));
        assert!(queue.others_wait());
        let second = queue.next(Some(&first)).unwrap();
        assert_eq!(second.pod.uid, "b");
        assert!(!queue.others_wait());
        assert_eq!(queue.next(Some(&second)), None);
    }

    #[test]
    fn workers_are_few_and_end() {
        let (mut queue, now) = (RefreshQueue::default(), Instant::now());
        let started = ["a", "b", "c"].map(|pod| queue.add(planned(pod, now), 2));
        assert_eq!(started, [true, true, false]);
        let (first, second) = (queue.next(None).unwrap(), queue.next(None).unwrap());
        let third = queue.next(Some(&first)).unwrap();
        assert_eq!(
            (queue.next(Some(&second)), queue.next(Some(&third))),
            (None, None)
        );
        assert!(queue.add(planned("a", now), 1), "both ended");
    }

    #[test]
    fn a_last_turn_comes_after_all_first_turns() {
        let (mut queue, now) = (RefreshQueue::default(), Instant::now());
        for pod in ["slow", "b", "c"] {
            queue.add(planned(pod, now), 1);
        }
        let slow = queue.next(None).unwrap();
        queue.add_last(&slow);
        let order = ["b", "c", "slow"].map(|_| ());
        let mut done = slow;
        let names = order.map(|()| {
            done = queue.next(Some(&done)).unwrap();
            (done.pod.uid.clone(), done.turn)
        });
        let expected = [("b", Turn::First), ("c", Turn::First), ("slow", Turn::Last)];
        assert_eq!(names, expected.map(|(pod, turn)| (pod.to_owned(), turn)));
        // An update meanwhile gives it a first turn again.
        queue.add_last(&done);
        queue.add(planned("slow", now), 1);
        let next = queue.next(Some(&done)).unwrap();
        assert_eq!((next.turn, queue.others_wait()), (Turn::First, false));
    }

    #[test]
    fn last_turns_leave_workers_for_first_turns() {
        let (mut queue, now) = (RefreshQueue::default(), Instant::now());
        let slow = |pod: usize| Planned {
            turn: Turn::Last,
            ..planned(&format!("slow-{pod}"), now)
        };
        for pod in 0..40 {
            queue.add(slow(pod), 40);
        }
        let started = (0..40).filter(|_| queue.needs_worker(40)).count();
        let taken: Vec<_> = (0..40).map_while(|_| queue.next(None)).collect();
        assert_eq!(taken.len(), MAX_LATE, "of {started} workers");
        assert!(queue.add(planned("quick", now), 40));
        assert_eq!(queue.next(None).unwrap().pod.uid, "quick");
    }
}

#[cfg(test)]
mod updates_tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::fs;
    use std::sync::Arc;

    use super::*;
    use crate::sinks::events::Events;
    use crate::sinks::journal::JournalWriter;
    use crate::threads::IdleMemory;

    #[test]
    fn the_warnings_about_a_pod_that_is_gone_are_forgotten() {
        let (root, metrics) = (tempfile::tempdir().unwrap(), Metrics::new());
        let config = Config::default();
        let reporting = Reporting {
            events: Events::off(Arc::clone(&metrics)),
            journal: JournalWriter::off(Arc::clone(&metrics)),
            memory: IdleMemory::default(),
        };
        let mut updates =
            Updates::new(&config, &metrics, &reporting, None, PodLookup::unanswered());
        let volume = |pod: &str| VolumeOfPod {
            kubelet_root: root.path().to_owned(),
            pod_uid: pod.to_owned(),
            volume: "conf".to_owned(),
        };
        fs::create_dir_all(volume("here").pod_directory()).unwrap();
        for pod in ["here", "gone"] {
            updates.warned.insert(volume(pod), vec!["why".to_owned()]);
        }
        updates.follow(&[]);
        let known: Vec<_> = updates.warned.keys().collect();
        assert_eq!(known, [&volume("here")]);
    }
}
