//! The outcomes of re-binds and refreshes, as labels.

use bindguard_core::judge::VerdictName;
use bindguard_core::report::{CreateLine, MountResult, Outcome, Report, Unchecked, UnreadLine};
use bindguard_guard::refresh::RefreshError;
use prometheus_client::encoding::EncodeLabelValue;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::sinks::metrics::{BindCounters, Counters, bind_labels, in_seconds, new};

#[allow(non_camel_case_types, reason = "the label's values")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
pub(super) enum RebindOutcome {
    rebound,
    already_current,
    reported,
    failed,
}

/// The outcome of a refresh, as a label.
#[allow(non_camel_case_types, reason = "the label's values")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum RefreshResult {
    /// The container shows the current file.
    replaced,
    /// The mount is stale, and policy only reports stale mounts.
    reported,
    /// The bound key was removed from the volume.
    key_gone,
    /// The container mounted something over the stale mount.
    hidden,
    /// Other mounts are in the stale directory.
    occupied,
    /// A bind of the spec in a directory of the volume is gone.
    missing,
    /// The volume changed all the time; the refresh is repeated.
    restless,
    /// A rule leaves the mount as it is. Or the container was not entered, because its namespaces
    /// are unknown or were not made by its runtime.
    refused,
    /// The mount could not be replaced.
    failed,
    /// The application was not notified.
    not_notified,
}

impl RefreshResult {
    pub(super) const ALL: [Self; 10] = [
        Self::replaced,
        Self::reported,
        Self::key_gone,
        Self::hidden,
        Self::occupied,
        Self::missing,
        Self::restless,
        Self::refused,
        Self::failed,
        Self::not_notified,
    ];

    /// The label of an outcome.
    pub fn of(outcome: &MountResult) -> Self {
        match outcome {
            MountResult::Replaced { .. } => Self::replaced,
            MountResult::Stale => Self::reported,
            MountResult::KeyGone => Self::key_gone,
            MountResult::Hidden => Self::hidden,
            MountResult::Occupied => Self::occupied,
            MountResult::Missing => Self::missing,
            MountResult::Restless => Self::restless,
            MountResult::Refused { .. } => Self::refused,
            MountResult::Failed { .. } => Self::failed,
        }
    }

    /// The label of a container that could not be refreshed at all.
    pub fn of_error(error: &RefreshError) -> Self {
        match error {
            RefreshError::NoSpec | RefreshError::OldKernel(_) | RefreshError::Namespace(_) => {
                Self::refused
            }
            RefreshError::MountsOfNode(_) | RefreshError::Sandbox(_) => Self::refused,
            RefreshError::Process(_) | RefreshError::Locked(_) => Self::failed,
        }
    }
}

impl RebindOutcome {
    pub(super) const ALL: [Self; 4] = [
        Self::rebound,
        Self::already_current,
        Self::reported,
        Self::failed,
    ];

    /// `None` if the outcome is not a re-bind's.
    pub(super) fn of(outcome: &Outcome) -> Option<Self> {
        match outcome {
            Outcome::Rebound { .. } => Some(Self::rebound),
            Outcome::AlreadyCurrent => Some(Self::already_current),
            Outcome::Planned { .. } => Some(Self::reported),
            Outcome::Failed { .. } => Some(Self::failed),
            Outcome::Detached | Outcome::PointedAtVolume { .. } | Outcome::MadeRslave => None,
            Outcome::NeedsSharedMount { .. } | Outcome::Refused => None,
        }
    }
}

// Figures of the creates on this node, from the journal's lines.

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
        for reason in Unchecked::ALL {
            drop(
                metrics
                    .unchecked
                    .get_or_create(&[("reason", reason.into_str())]),
            );
        }
        let wrong = bind_labels(VerdictName::Wrong, None);
        drop(metrics.binds.get_or_create(&wrong));
        metrics
    }

    pub(super) fn count(&self, line: &CreateLine) {
        let report = &line.report;
        self.refused.inc_by(u64::from(line.refused.is_some()));
        if let Some(unchecked) = line.unchecked {
            let label = [("reason", unchecked.into_str())];
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
            let labels = bind_labels(bind.verdict, bind.outcome.as_ref());
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

// Figures of the NRI plugin. Its creates are counted here and not from the journal: the shim may
// count the same create there.

/// The figures of the plugin.
#[derive(Debug)]
pub struct NriMetrics {
    /// 1 while the runtime accepts the plugin.
    pub connected: Gauge,
    /// Registrations that the runtime accepted.
    pub registrations: Counter,
    creates: Counters<NriAnswer>,
    starts: Counters<StartAnswer>,
    binds: BindCounters,
}

/// The answer to the create of a container, as a label.
#[allow(non_camel_case_types, reason = "the label's values")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum NriAnswer {
    /// No change of the spec; stale subpaths may have been re-bound on the host.
    unchanged,
    adjusted,
    /// Policy refused the container.
    refused,
    /// No change: the check took too long, or earlier checks still hang.
    timed_out,
    /// No change: the check panicked, or the request could not be read.
    failed,
}

/// The answer to the start of a container, as a label.
#[allow(non_camel_case_types, reason = "the label's values")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum StartAnswer {
    /// It shows no old file.
    current,
    /// All its old files were replaced.
    refreshed,
    /// Policy refused the container: a mount differs from its spec.
    refused,
    /// It starts as it is: the check took too long, or earlier checks still hang.
    timed_out,
    /// It starts as it is: an old file could not be replaced, or the check failed.
    failed,
}

impl NriMetrics {
    pub(super) fn new(registry: &mut Registry) -> Self {
        let metrics = Self {
            connected: new(
                registry,
                "nri_connected",
                "1 while the runtime accepts the NRI plugin",
            ),
            registrations: new(
                registry,
                "nri_registrations",
                "Accepted registrations of the plugin",
            ),
            creates: new(
                registry,
                "nri_creates",
                "Creates that the plugin answered, by answer",
            ),
            starts: new(
                registry,
                "nri_starts",
                "Starts that the plugin answered, by answer",
            ),
            binds: new(
                registry,
                "nri_binds",
                "Binds that the plugin checked, by outcome",
            ),
        };
        // An alert on an increase needs the zero before the first event.
        for answer in NriAnswer::ALL {
            drop(metrics.creates.get_or_create(&[("answer", answer)]));
        }
        for answer in StartAnswer::ALL {
            drop(metrics.starts.get_or_create(&[("answer", answer)]));
        }
        metrics
    }

    /// Counts an answer.
    pub fn answered(&self, answer: NriAnswer) {
        self.creates.get_or_create(&[("answer", answer)]).inc();
    }

    /// Counts an answer to a start.
    pub fn started(&self, answer: StartAnswer) {
        self.starts.get_or_create(&[("answer", answer)]).inc();
    }

    /// Counts the binds of a create.
    pub fn checked(&self, report: &Report) {
        for bind in &report.binds {
            let labels = bind_labels(bind.verdict(), bind.outcome.as_ref());
            self.binds.get_or_create(&labels).inc();
        }
    }
}

impl NriAnswer {
    const ALL: [Self; 5] = [
        Self::unchanged,
        Self::adjusted,
        Self::refused,
        Self::timed_out,
        Self::failed,
    ];
}

impl StartAnswer {
    const ALL: [Self; 5] = [
        Self::current,
        Self::refreshed,
        Self::refused,
        Self::timed_out,
        Self::failed,
    ];
}
