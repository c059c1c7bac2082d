//! Kubernetes events on the pods of this node.
//!
//! ```text
//! journal ─────┐
//! re-binds ────┼─► Events ─► recorder: names of the pod ─► objects ─► pace of the node ─► API server
//! refreshes ───┤   never     (CRI, cached)                (counted)                       create, patch
//! survey ──────┘   waits
//! ```
//!
//! Threads hand over occurrences and go on: an API server that is slow, down or hostile costs
//! events, and nothing else.

mod from_reports;
mod objects;
mod occurrence;
mod pace;
mod recorder;
mod standing;

use std::sync::Arc;

use bindguard_config::EventMode;
use tokio::sync::mpsc::{Receiver, Sender, channel};

use crate::sinks::metrics::{EventResult, Metrics};

pub use self::from_reports::{
    from_ignored_request, from_journal, from_keeper, from_rebind, from_refresh, from_survey,
};
pub use self::objects::Event;
pub use self::occurrence::{EventType, Occurrence};
pub use self::recorder::{EventApi, EventWriteError, Recorder};
pub use self::standing::Standing;

/// The limit of occurrences that wait for the recorder.
const WAITING: usize = 256;

/// Takes occurrences, from any thread.
#[derive(Debug, Clone)]
pub struct Events {
    /// `None` if no events are written.
    recorder: Option<Sender<Occurrence>>,
    mode: EventMode,
    metrics: Arc<Metrics>,
}

impl Events {
    /// Takes occurrences and drops them.
    pub fn off(metrics: Arc<Metrics>) -> Self {
        Self {
            recorder: None,
            mode: EventMode::Off,
            metrics,
        }
    }

    /// Both ends: the threads' and the recorder's.
    pub fn on(mode: EventMode, metrics: Arc<Metrics>) -> (Self, Receiver<Occurrence>) {
        let (recorder, occurrences) = channel(WAITING);
        (
            Self {
                recorder: Some(recorder),
                mode,
                metrics,
            },
            occurrences,
        )
    }

    /// True if an occurrence can become an event.
    pub fn are_on(&self) -> bool {
        self.recorder.is_some()
    }

    /// Hands over occurrences. It never waits.
    pub fn record(&self, occurrences: impl IntoIterator<Item = Occurrence>) {
        let Some(recorder) = &self.recorder else {
            return;
        };
        let wanted = |occurrence: &Occurrence| match self.mode {
            EventMode::Off => false,
            EventMode::Warnings => occurrence.reason.event_type() == EventType::Warning,
            EventMode::All => true,
        };
        for occurrence in occurrences.into_iter().filter(wanted) {
            if recorder.try_send(occurrence).is_err() {
                self.metrics.events.count(EventResult::queue_full, 1);
            }
        }
    }
}
