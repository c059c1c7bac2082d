//! Repairs pods after an update of a volume, or after the host mounted a volume anew: re-binds the
//! stale subpaths on the host, then refreshes the running containers of pods that opted in.

use std::cell::Cell;
use std::error::Error;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use bindguard_config::Config;
use bindguard_core::error_chain;
use bindguard_core::places::Places;
use bindguard_core::refresh::SpecBind;
use bindguard_core::refresh_request::RefreshRequest;
use bindguard_core::report::{Actor, BindRecord, RebindLine, Severity};
use bindguard_core::spec::SpecView;
use bindguard_guard::refresh::{
    BoundFiles, BoundMounts, CurrentFiles, FileBind, PodVolumes, VolumeOfPod, rebind_volume,
};
use bindguard_guard::{Probes, kubelet_roots_by_all_names};
use bindguard_operator::containers::bundle_of_container;
use bindguard_operator::writers::ContainersOfNode;
use bindguard_sys::bundle::read_spec;
use tracing::{info, warn};

use crate::pods::{Container, PodLookup};
use crate::say_once::SayOnce;
use crate::sinks::events::Standing;
use crate::sinks::metrics::Metrics;
use crate::sinks::reporting::Reporting;
use crate::work::refresher::{OF_NODE, RefreshedContainer, Refresher};
use crate::work::turns::{Planned, Turn, TurnEnd, Turns};

/// The time limit of a container's refresh in the first turn, and in each later turn.
const FIRST_TURN: Duration = Duration::from_millis(300);
const LAST_TURN: Duration = Duration::from_secs(20);

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

impl fmt::Display for PodOfRoot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the containers of pod {}", self.uid)
    }
}

/// Refreshes pods.
#[derive(Debug)]
pub struct PodRefreshes<'a> {
    pub pods: &'a PodLookup,
    pub places: &'a Places,
    pub refresher: Refresher<'a>,
}

impl PodRefreshes<'_> {
    /// Refreshes the containers of a pod; `others_wait` if further pods do.
    pub fn refresh(&self, planned: &Planned<PodOfRoot>, others_wait: bool) -> TurnEnd {
        let pod = &planned.subject;
        let ended = self.refresh_pod(pod, planned.at, planned.turn, others_wait);
        // A pod that is gone is not queried again.
        match pod.directory().symlink_metadata() {
            Ok(_) => ended,
            Err(_) => TurnEnd::Done,
        }
    }

    fn refresh_pod(&self, pod: &PodOfRoot, at: Instant, turn: Turn, others_wait: bool) -> TurnEnd {
        let opted_in = match self.pods.opted_in(&pod.uid, at, others_wait) {
            Ok(Some(opted_in)) => opted_in,
            Ok(None) => return TurnEnd::Done,
            Err(error) => {
                // A single warning for the node instead of a warning for each pod.
                self.refresher.warn(OF_NODE, vec![error_chain(&error)]);
                return TurnEnd::Unanswered;
            }
        };
        let request = &opted_in.request;
        let mut warnings = request.problems.clone();
        let folder = pod.directory();
        // Without an answer the files of a driver are refused, and the refusal is reported.
        let is_unanswered = Cell::new(false);
        let writable = || {
            let writable = self.pods.writable_mounts(&pod.uid);
            is_unanswered.set(writable.is_err());
            writable
        };
        let volumes = PodVolumes::open(&folder);
        let mut is_out_of_time = false;
        match volumes.and_then(|volumes| volumes.with_drivers(&folder, writable)) {
            Ok(volumes) => {
                for container in &opted_in.containers {
                    let done = self.refresh_container(&folder, request, container, &volumes, turn);
                    warnings.extend(done.warnings);
                    is_out_of_time |= done.is_out_of_time;
                }
            }
            Err(error) => {
                warnings.push(error_chain(&error));
                is_out_of_time = true;
            }
        }
        self.refresher.warn(&pod.uid, warnings);
        match is_out_of_time || is_unanswered.get() {
            true => TurnEnd::OutOfTime,
            false => TurnEnd::Done,
        }
    }

    fn refresh_container(
        &self,
        pod: &Path,
        request: &RefreshRequest,
        container: &Container,
        volumes: &PodVolumes,
        turn: Turn,
    ) -> RefreshedContainer {
        let (root, name, binds) = (Path::new("/"), &container.name, request.binds);
        let mut unread = None;
        let bundle = bundle_of_container(root, &container.id);
        let bundle = bundle.as_deref();
        if binds.any() && bundle.is_none() {
            // The container ended, or bindguard does not know its runtime's folders.
            unread = Some("its bundle is not found".to_owned());
        }
        let bytes = bundle.and_then(|bundle| noted(read_spec(bundle), &mut unread));
        let bytes = bytes.unwrap_or_default();
        let spec = match bytes.is_empty() {
            true => None,
            false => noted(SpecView::from_bytes(&bytes), &mut unread),
        };
        let in_pod = container.identity.container.as_deref().unwrap_or_default();
        let files = request.containers.includes(in_pod).then(|| {
            let binds = spec.as_ref().map(SpecBind::of_spec);
            volumes.for_container(binds.unwrap_or_default())
        });
        let mounts = bundle
            .filter(|_| binds.volumes)
            .and_then(|bundle| noted(BoundMounts::open(bundle, pod), &mut unread));
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
        let time = match turn {
            Turn::First => FIRST_TURN,
            Turn::Last | Turn::Retry => LAST_TURN,
        };
        let refresher = &self.refresher;
        let mut done = refresher.refresh(turn, time, container, &kinds, &request.notify);
        done.note_unread(name, unread);
        for error in errors.into_iter().flatten() {
            done.warnings
                .push(format!("{name}: {}", error_chain(&error)));
        }
        done
    }
}

impl RefreshedContainer {
    /// Notes the reason for which binds were not refreshed.
    pub fn note_unread(&mut self, name: &str, unread: Option<String>) {
        if let Some(why) = unread {
            self.is_out_of_time = true;
            self.warnings.push(format!(
                "binds of {name} are not refreshed: {why}; trying again"
            ));
        }
    }
}

/// The result; an error is noted as the reason for which binds are not refreshed.
pub fn noted<T, E: Error + 'static>(read: Result<T, E>, unread: &mut Option<String>) -> Option<T> {
    read.map_err(|error| *unread = Some(error_chain(&error)))
        .ok()
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
    pods: &'a PodLookup,
    /// `None` if no running container is refreshed.
    refreshes: Option<&'a Turns<PodOfRoot>>,
    warned: SayOnce<String, VolumeOfPod>,
    standing: Standing<String>,
}

impl<'a> Updates<'a> {
    /// A follower that has seen no update.
    pub fn new(
        config: &'a Config,
        metrics: &'a Metrics,
        reporting: &'a Reporting,
        pods: &'a PodLookup,
        refreshes: Option<&'a Turns<PodOfRoot>>,
    ) -> Self {
        Self {
            config,
            metrics,
            reporting,
            pods,
            refreshes,
            warned: SayOnce::default(),
            standing: Standing::default(),
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
                let mut lines = lines.lock().unwrap_or_else(PoisonError::into_inner);
                lines.push((volume, line));
            }
        };
        match volumes.len().min(SIDE_BY_SIDE) {
            0 | 1 => work(),
            threads => thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work)))),
        }
        for (volume, line) in lines.into_inner().unwrap_or_else(PoisonError::into_inner) {
            let is_new = self.log(volume, &line);
            self.reporting.rebound(line, is_new, &mut self.standing);
        }
    }

    fn rebind(&self, volume: &VolumeOfPod) -> RebindLine {
        let plan = || {
            if let Some(refreshes) = self.refreshes {
                refreshes.plan(PodOfRoot {
                    kubelet_root: volume.kubelet_root.clone(),
                    uid: volume.pod_uid.clone(),
                });
            }
        };
        // A directory has no files until its refresh; the files of a volume keep their old content.
        // The plan after the re-bind finds the containers that started meanwhile.
        if self.refreshes.is_some() && volume.has_directories() {
            plan();
        }
        let report = rebind_volume(volume, self.config.policy());
        let line = RebindLine::new(Actor::Agent, &volume.pod_uid, &volume.volume, &report);
        self.metrics.rebound(&line);
        plan();
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
        let warnings = self.warned.news(volume.clone(), warnings);
        if repairs.is_empty() && warnings.is_empty() {
            return false;
        }
        // `namespace/name`, or the uid if the CRI does not answer. The query comes after the re-binds,
        // and so delays no re-bind.
        let uid = &volume.pod_uid;
        let pod = self.pods.names(uid).and_then(|pod| pod.display_name());
        let pod = pod.unwrap_or_else(|| uid.clone());
        for repair in repairs {
            info!("pod {pod}: {repair}");
        }
        for warning in warnings {
            warn!("pod {pod}: {warning}");
        }
        true
    }
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
        let refreshes = PodRefreshes {
            pods: &PodLookup::unanswered(),
            places: &places,
            refresher: Refresher::new(helper(), &metrics, &reporting, &policy),
        };
        let root = tempfile::tempdir().unwrap();
        let planned = Planned {
            subject: PodOfRoot {
                kubelet_root: root.path().to_owned(),
                uid: "u-1".to_owned(),
            },
            at: Instant::now(),
            turn: Turn::First,
            not_before: None,
        };
        fs::create_dir_all(planned.subject.directory()).unwrap();
        assert_eq!(refreshes.refresh(&planned, false), TurnEnd::Unanswered);
        // A pod that is gone is not queried again.
        fs::remove_dir(planned.subject.directory()).unwrap();
        assert_eq!(refreshes.refresh(&planned, false), TurnEnd::Done);
    }
}
