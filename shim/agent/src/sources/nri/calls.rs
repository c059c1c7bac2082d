//! The state of the answers to the runtime's calls.

use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

use bindguard_config::Config;
use bindguard_guard::refresh::HelperProcess;
use tracing::warn;

use super::deadline::Deadline;
use super::expected::ExpectedOfContainers;
use super::reports::{NriReport, write_reports};
use crate::sinks::journal::JournalWriter;
use crate::sinks::metrics::Metrics;
use crate::threads::{retry_with_backoff, spawn};

/// Answers the runtime's calls.
#[derive(Debug)]
pub struct Calls {
    pub(super) config: Arc<Config>,
    pub(super) metrics: Arc<Metrics>,
    /// The sources of the binds of new containers.
    pub(super) expected: ExpectedOfContainers,
    /// `None` in tests only.
    pub(super) helper: Option<Arc<HelperProcess>>,
    pub(super) creating: Deadline,
    pub(super) starting: Deadline,
    reports: Sender<NriReport>,
}

/// Policy refuses the container, for this reason.
#[derive(Debug, thiserror::Error)]
#[error("bindguard refuses the container: {0}")]
pub struct CreateRefused(pub(super) String);

impl Calls {
    /// Starts the thread that writes reports: a call waits neither for the log nor for the journal.
    pub fn new(
        config: &Config,
        metrics: Arc<Metrics>,
        journal: JournalWriter,
        helper: Option<Arc<HelperProcess>>,
    ) -> Self {
        let (reports, received) = channel();
        let counted = Arc::clone(&metrics);
        let writing = spawn("nri-reports", move || {
            retry_with_backoff(
                "report creates and starts through NRI",
                &counted.restarts,
                || {
                    write_reports(&received, &journal);
                    Ok(())
                },
            )
        });
        if let Err(error) = writing {
            warn!("creates and starts through NRI are not reported: {error:#}");
        }
        Self {
            config: Arc::new(config.clone()),
            metrics,
            expected: ExpectedOfContainers::default(),
            helper,
            creating: Deadline::default(),
            starting: Deadline::default(),
            reports,
        }
    }

    pub(super) fn report(&self, report: NriReport) {
        // Without the thread there is no journal; its failure was reported.
        let _ = self.reports.send(report);
    }
}
