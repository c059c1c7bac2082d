//! Figures of the creates on this node, from the journal's lines.

use bindguard_core::report::{CreateLine, Unchecked, UnreadLine};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use super::binds::BindCounters;

/// Upper bounds of the buckets for an admission, in seconds.
const BUCKETS: [f64; 9] = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0, 2.5];

/// The figures of all admissions.
#[derive(Debug)]
pub(super) struct AdmissionMetrics {
    seconds: Histogram,
    retries: Counter,
    problems: Counter,
    refused: Counter,
    unchecked: Family<UncheckedLabel, Counter>,
    unproven: Counter,
    binds: BindCounters,
    unread: Family<UnreadLabel, Counter>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct UnreadLabel {
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct UncheckedLabel {
    reason: &'static str,
}

impl Default for AdmissionMetrics {
    fn default() -> Self {
        let (retries, problems, refused, unproven, unread) = Default::default();
        let unchecked = Family::<UncheckedLabel, Counter>::default();
        // An alert on an increase needs the zero before the first event.
        for reason in Unchecked::ALL.map(Unchecked::as_str) {
            drop(unchecked.get_or_create(&UncheckedLabel { reason }));
        }
        let binds = BindCounters::default();
        binds.start_wrong();
        Self {
            seconds: Histogram::new(BUCKETS),
            retries,
            problems,
            refused,
            unchecked,
            unproven,
            binds,
            unread,
        }
    }
}

impl AdmissionMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register_with_unit(
            "admission",
            "Time of the guard in a create",
            Unit::Seconds,
            self.seconds.clone(),
        );
        registry.register(
            "admission_retries",
            "Creates that the shim tried again",
            self.retries.clone(),
        );
        registry.register(
            "admission_problems",
            "Errors of the guard itself",
            self.problems.clone(),
        );
        registry.register(
            "admission_refused",
            "Creates that policy refused",
            self.refused.clone(),
        );
        registry.register(
            "unchecked_creates",
            "Creates whose guard was late or died",
            self.unchecked.clone(),
        );
        registry.register(
            "unproven_binds",
            "Binds whose mounts in the container were not compared with the spec",
            self.unproven.clone(),
        );
        registry.register(
            "admission_binds",
            "Checked binds, by verdict and outcome",
            self.binds.family(),
        );
        registry.register(
            "journal_unread_lines",
            "Lines that are not counted",
            self.unread.clone(),
        );
    }

    pub(super) fn count(&self, line: &CreateLine) {
        let report = &line.report;
        self.refused.inc_by(u64::from(line.refused.is_some()));
        if let Some(unchecked) = line.unchecked {
            let reason = unchecked.as_str();
            self.unchecked
                .get_or_create(&UncheckedLabel { reason })
                .inc();
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
            self.binds.count(bind.verdict, bind.outcome.as_deref());
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
        self.unread.get_or_create(&UnreadLabel { reason }).inc();
    }
}
