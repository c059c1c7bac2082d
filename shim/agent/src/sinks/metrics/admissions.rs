//! Figures of the creates on this node, from the journal's lines.

use bindguard_core::judge::VerdictName;
use bindguard_core::report::{CreateLine, Unchecked, UnreadLine};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use super::binds::{BindCounters, bind_labels};
use super::{Counters, in_seconds, new};

/// Upper bounds of the buckets for an admission, in seconds.
const BUCKETS: [f64; 9] = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0, 2.5];

/// The figures of all admissions.
#[derive(Debug)]
pub(super) struct AdmissionMetrics {
    seconds: Histogram,
    retries: Counter,
    problems: Counter,
    refused: Counter,
    unchecked: Counters<&'static str>,
    unproven: Counter,
    binds: BindCounters,
    unread: Counters<&'static str>,
}

impl AdmissionMetrics {
    pub(super) fn new(registry: &mut Registry) -> Self {
        let metrics = Self {
            seconds: in_seconds(
                registry,
                "admission",
                "Time of the guard in a create",
                Histogram::new(BUCKETS),
            ),
            retries: new(
                registry,
                "admission_retries",
                "Creates that the shim tried again",
            ),
            problems: new(registry, "admission_problems", "Errors of the guard itself"),
            refused: new(registry, "admission_refused", "Creates that policy refused"),
            unchecked: new(
                registry,
                "unchecked_creates",
                "Creates that no guard checked, by reason",
            ),
            unproven: new(
                registry,
                "unproven_binds",
                "Binds whose mounts in the container were not compared with the spec",
            ),
            binds: new(
                registry,
                "admission_binds",
                "Checked binds, by verdict and outcome",
            ),
            unread: new(
                registry,
                "journal_unread_lines",
                "Lines that are not counted",
            ),
        };
        // An alert on an increase needs the zero before the first event.
        for reason in Unchecked::ALL.map(Unchecked::as_str) {
            drop(metrics.unchecked.get_or_create(&[("reason", reason)]));
        }
        let wrong = bind_labels(VerdictName::Wrong, None);
        drop(metrics.binds.get_or_create(&wrong));
        metrics
    }

    pub(super) fn count(&self, line: &CreateLine) {
        let report = &line.report;
        self.refused.inc_by(u64::from(line.refused.is_some()));
        if let Some(unchecked) = line.unchecked {
            let label = [("reason", unchecked.as_str())];
            self.unchecked.get_or_create(&label).inc();
            return;
        }
        // A line with a pid is about a container after its create.
        if line.pid.is_none() {
            self.seconds.observe(report.duration_us as f64 / 1e6);
            self.retries.inc_by(u64::from(line.attempt > 0));
        }
        self.count_unproven(report.unproven);
        self.problems.inc_by(report.problems.len() as u64);
        for bind in &report.binds {
            let labels = bind_labels(bind.verdict, bind.outcome.as_deref());
            self.binds.get_or_create(&labels).inc();
        }
    }

    pub(super) fn count_unproven(&self, binds: usize) {
        self.unproven.inc_by(binds as u64);
    }

    pub(super) fn count_unread(&self, line: UnreadLine) {
        let reason = match line {
            UnreadLine::Newer => "newer",
            UnreadLine::Foreign => "foreign",
        };
        self.unread.get_or_create(&[("reason", reason)]).inc();
    }
}
