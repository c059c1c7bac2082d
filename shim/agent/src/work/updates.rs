//! Updated volumes: makes the host's subpaths current.
//!
//! From then on every restart of a container finds the current file, whatever shim starts it.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use bindguard_config::Config;
use bindguard_core::report::{Actor, BindRecord, RebindLine, Severity};
use bindguard_guard::refresh::{VolumeOfPod, rebind_volume};
use tracing::{info, warn};

use crate::pods::PodLookup;
use crate::sinks::events::Standing;
use crate::sinks::metrics::Metrics;
use crate::sinks::reporting::Reporting;
use crate::work::pod_refreshes::Refreshes;

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

    use std::fs;
    use std::sync::Arc;

    use super::*;
    use crate::idle_memory::IdleMemory;
    use crate::sinks::events::Events;
    use crate::sinks::journal::JournalWriter;

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
