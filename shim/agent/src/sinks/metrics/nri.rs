//! Figures of the NRI plugin. Its creates are counted here and not from the journal: the shim may
//! count the same create there.

use bindguard_core::report::Report;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::binds::BindCounters;

/// The figures of the plugin.
#[derive(Debug, Default)]
pub struct NriMetrics {
    /// 1 while the runtime accepts the plugin.
    pub connected: Gauge,
    /// Registrations that the runtime accepted.
    pub registrations: Counter,
    creates: Family<AnswerLabel, Counter>,
    starts: Family<StartLabel, Counter>,
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

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct StartLabel {
    answer: StartAnswer,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct AnswerLabel {
    answer: NriAnswer,
}

impl NriMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register(
            "nri_connected",
            "1 while the runtime accepts the NRI plugin",
            self.connected.clone(),
        );
        registry.register(
            "nri_registrations",
            "Accepted registrations of the plugin",
            self.registrations.clone(),
        );
        registry.register(
            "nri_creates",
            "Creates that the plugin answered, by answer",
            self.creates.clone(),
        );
        registry.register(
            "nri_starts",
            "Starts that the plugin answered, by answer",
            self.starts.clone(),
        );
        registry.register(
            "nri_binds",
            "Binds that the plugin checked, by outcome",
            self.binds.family(),
        );
    }

    /// An alert on an increase needs the zero before the first event.
    pub(super) fn begin_at_zero(&self) {
        use NriAnswer::{adjusted, failed, refused, timed_out, unchanged};
        for answer in [unchanged, adjusted, refused, timed_out, failed] {
            drop(self.creates.get_or_create(&AnswerLabel { answer }));
        }
        use StartAnswer::{current, refreshed};
        for answer in [
            current,
            refreshed,
            StartAnswer::refused,
            StartAnswer::timed_out,
            StartAnswer::failed,
        ] {
            drop(self.starts.get_or_create(&StartLabel { answer }));
        }
    }

    /// Counts an answer.
    pub fn answered(&self, answer: NriAnswer) {
        self.creates.get_or_create(&AnswerLabel { answer }).inc();
    }

    /// Counts an answer to a start.
    pub fn started(&self, answer: StartAnswer) {
        self.starts.get_or_create(&StartLabel { answer }).inc();
    }

    /// Counts the binds of a create.
    pub fn checked(&self, report: &Report) {
        report
            .binds
            .iter()
            .for_each(|bind| self.binds.count(bind.verdict(), bind.outcome.as_ref()));
    }
}
