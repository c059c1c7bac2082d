//! One updated volume: makes the host's subpaths current.
//!
//! From then on every restart of a container finds the current file, whatever shim starts it.

use std::collections::HashMap;
use std::time::Instant;

use bindguard_config::Config;
use bindguard_core::report::{Loudness, Report};
use bindguard_guard::refresh::{VolumeOfPod, rebind_volume};
use tracing::{info, warn};

use crate::metrics::Metrics;
use crate::refresher::Refreshes;

/// Follows the updates of volumes.
#[derive(Debug)]
pub struct Updates<'a> {
    config: &'a Config,
    metrics: &'a Metrics,
    /// `None` if no running container is refreshed.
    refreshes: Option<Refreshes>,
    /// The warnings about each volume that has some: a survey finds the same again, and logs only what is new.
    warned: HashMap<VolumeOfPod, Vec<String>>,
}

impl<'a> Updates<'a> {
    /// A follower that has seen no update.
    pub fn new(config: &'a Config, metrics: &'a Metrics, refreshes: Option<Refreshes>) -> Self {
        Self { config, metrics, refreshes, warned: HashMap::new() }
    }

    /// Re-binds the stale subpaths of a volume, and plans the refresh of its running containers. The host comes first: a
    /// container that restarts meanwhile starts with the current file.
    pub fn follow(&mut self, volume: &VolumeOfPod) {
        let start = Instant::now();
        let report = rebind_volume(volume, self.config.policy());
        self.metrics.rebound(&report, start.elapsed());
        self.log(volume, &report);
        if let Some(refreshes) = &self.refreshes {
            refreshes.plan(volume.clone());
        }
    }

    fn log(&mut self, volume: &VolumeOfPod, report: &Report) {
        let mut warnings = report.problems.clone();
        for (loudness, message) in report.binds.iter().filter_map(|bind| bind.log_message()) {
            match loudness {
                Loudness::Info => info!("{message}"),
                Loudness::Warning => warnings.push(message),
            }
        }
        let known = self.warned.remove(volume).unwrap_or_default();
        warnings.iter().filter(|warning| !known.contains(warning)).for_each(|warning| warn!("{warning}"));
        if !warnings.is_empty() {
            self.warned.insert(volume.clone(), warnings);
        }
    }
}
