//! The log and the journal of creates and starts.

use std::sync::mpsc::Receiver;

use bindguard_core::report::{RefreshLine, Report, Severity};
use tracing::{info, warn};

use crate::sinks::journal::JournalWriter;

/// A report on one container.
#[derive(Debug)]
pub enum NriReport {
    /// The check before the create, with the container's id.
    Create(String, Report),
    /// The refresh before the start.
    Refresh(RefreshLine),
    /// The comparison before the start, with the container's id and its init.
    Proof(String, u32, Report),
}

/// Writes reports until the sender is gone.
pub fn write_reports(received: &Receiver<NriReport>, journal: &JournalWriter) {
    for report in received {
        match report {
            NriReport::Create(id, report) => {
                log_binds(&id, &report);
                // The shim journals its own creates. A healthy create is not journaled again.
                let has_finding = report
                    .binds
                    .iter()
                    .any(|bind| bind.finding.verdict.is_finding());
                if has_finding || !report.problems.is_empty() {
                    journal.nri_create(&id, None, report);
                }
            }
            NriReport::Refresh(line) => {
                log_refresh(&line);
                journal.refreshed(line);
            }
            NriReport::Proof(id, pid, report) => {
                log_binds(&id, &report);
                if !report.binds.is_empty() || !report.problems.is_empty() {
                    journal.nri_create(&id, Some(pid), report);
                }
            }
        }
    }
}

fn log_binds(id: &str, report: &Report) {
    for problem in &report.problems {
        warn!("container {id}: {problem}");
    }
    for (severity, message) in report.binds.iter().filter_map(|bind| bind.log_message()) {
        match severity {
            Severity::Info => info!("container {id}: {message}"),
            Severity::Warning => warn!("container {id}: {message}"),
        }
    }
}

fn log_refresh(line: &RefreshLine) {
    for mount in &line.mounts {
        let (place, id) = (&mount.destination, &line.id);
        match mount.outcome.is_replaced() {
            true => info!("container {id}: {place} shows the current file before it starts"),
            false => warn!("container {id} starts with an old file at {place}"),
        }
    }
}
