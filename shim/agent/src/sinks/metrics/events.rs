//! Figures of the Kubernetes events that the agent writes.

use prometheus_client::encoding::EncodeLabelValue;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::registry::Registry;

use super::{Counters, new};

/// The figures of all events.
#[derive(Debug)]
pub struct EventMetrics {
    results: Counters<EventResult>,
    /// Requests that failed, or were answered with a request for a pause.
    pub failures: Counter,
}

/// The result of an event, as a label.
#[allow(non_camel_case_types, reason = "the label's values")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum EventResult {
    /// The API server has it.
    written,
    /// The API server refuses it.
    refused,
    /// Too many events waited.
    queue_full,
    /// It waited too long.
    expired,
    /// Its pod has no sandbox, or the CRI did not answer.
    no_pod,
}

impl EventMetrics {
    const RESULTS: [EventResult; 5] = [
        EventResult::written,
        EventResult::refused,
        EventResult::queue_full,
        EventResult::expired,
        EventResult::no_pod,
    ];

    pub(super) fn new(registry: &mut Registry) -> Self {
        let metrics = Self {
            results: new(registry, "events", "Kubernetes events, by result"),
            failures: new(
                registry,
                "event_request_failures",
                "Requests for events that failed",
            ),
        };
        // An alert on an increase needs the zero before the first event.
        Self::RESULTS
            .iter()
            .for_each(|result| metrics.count(*result, 0));
        metrics
    }

    /// Counts events with this result.
    pub fn count(&self, result: EventResult, number: usize) {
        self.results
            .get_or_create(&[("result", result)])
            .inc_by(number as u64);
    }
}
