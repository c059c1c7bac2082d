//! Figures of the NRI plugin. Its creates are counted here and not from the journal: the shim may
//! count the same create there.

use bindguard_core::report::Report;
use prometheus_client::encoding::EncodeLabelValue;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::binds::{BindCounters, bind_labels};
use super::{Counters, new};

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
    /// The mounts were adjusted.
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
