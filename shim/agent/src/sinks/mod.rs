//! The receivers of reports: the journal, the log, figures, and events on pods. No module of this
//! folder imports a module of `sources` or `work`.

pub mod events;
pub mod journal;
pub mod metrics;

use std::hash::Hash;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use bindguard_config::{Config, EventMode};
use bindguard_core::error_chain;
use bindguard_core::report::{Actor, JournalLine, RebindLine, RefreshLine};
use bindguard_kubernetes::{Access, AccessError};
use tokio::sync::mpsc::Sender;
use tracing::warn;

use crate::pods::PodLookup;
use crate::sinks::events::{
    EventType, Occurrence, Standing, from_binds, from_journal, from_refresh,
};
use crate::sinks::journal::AgentLine;
use crate::sinks::metrics::{EventResult, Metrics, Total, TotalBy};
use crate::threads::IdleMemory;

/// Takes reports of repairs and surveys from any thread, for the journal and for events on pods. It
/// never waits. Without an API server the events cost nothing.
#[derive(Debug, Clone)]
pub struct Reporting {
    metrics: &'static Metrics,
    event_mode: EventMode,
    /// `None` if no events are written.
    events: Option<Sender<Occurrence>>,
    /// `None` if there is no journal. Boxed: the channel reserves memory for all lines that may
    /// wait.
    journal: Option<SyncSender<Box<AgentLine>>>,
    /// Freed after each piece of work.
    memory: IdleMemory,
}

impl Reporting {
    /// Takes reports and drops them.
    pub fn off(metrics: &'static Metrics) -> Self {
        Self {
            metrics,
            event_mode: EventMode::Off,
            events: None,
            journal: None,
            memory: IdleMemory::default(),
        }
    }

    /// Starts the writer of the journal, and the recorder of events if the settings want events and
    /// there are credentials.
    pub fn start(
        config: &Config,
        access: &Result<Arc<Access>, AccessError>,
        pods: &'static PodLookup,
        metrics: &'static Metrics,
    ) -> Self {
        let to_api = &config.agent().kubernetes;
        let mut reporting = Self::off(metrics);
        tokio::spawn(reporting.memory.clone().run());
        if let Some(journal) = config.journal() {
            reporting.journal = journal::start(journal, pods, metrics);
        }
        match access {
            _ if to_api.events == EventMode::Off => {}
            Ok(access) => {
                let (access, memory) = (Arc::clone(access), reporting.memory.clone());
                let recorder = events::start(to_api, access, pods, metrics, memory);
                reporting.events_to(to_api.events, recorder);
            }
            Err(error) => warn!("no events are written: {}", error_chain(error)),
        }
        reporting
    }

    pub fn events_to(&mut self, mode: EventMode, recorder: Sender<Occurrence>) {
        (self.event_mode, self.events) = (mode, Some(recorder));
    }

    /// True if an occurrence can become an event.
    pub fn writes_events(&self) -> bool {
        self.events.is_some()
    }

    /// Hands over the occurrences that a place did not have before.
    pub fn record_news<K: Hash + Eq + Clone>(
        &self,
        standing: &mut Standing<K>,
        place: K,
        found: impl FnOnce() -> Vec<Occurrence>,
    ) {
        self.memory.worked();
        if self.writes_events() {
            self.record(events::news(standing, place, found()));
        }
    }

    /// Hands over occurrences.
    pub fn record(&self, occurrences: impl IntoIterator<Item = Occurrence>) {
        let Some(recorder) = &self.events else {
            return;
        };
        for occurrence in occurrences {
            let is_wanted = match self.event_mode {
                EventMode::Off => false,
                EventMode::Warnings => occurrence.reason.event_type() == EventType::Warning,
                EventMode::All => true,
            };
            if is_wanted && recorder.try_send(occurrence).is_err() {
                let result = EventResult::QueueFull;
                self.metrics.count_by(TotalBy::Events, result, 1);
            }
        }
    }

    /// A line of the journal. The agent reported its own repairs when they happened.
    pub fn journaled(&self, line: &JournalLine) {
        match line {
            JournalLine::Rebind(line) if line.by == Actor::Agent => {}
            JournalLine::Refresh(line) if line.by == Actor::Agent => {}
            line => {
                self.memory.worked();
                if self.writes_events() {
                    self.record(from_journal(line));
                }
            }
        }
    }

    /// A re-bind by the agent. A survey finds the same again: the journal gets what is new.
    pub fn rebound(&self, line: RebindLine, is_new: bool, standing: &mut Standing<String>) {
        self.record_news(standing, line.about(), || {
            from_binds(&line.container, &line.binds)
        });
        if is_new {
            self.journal(AgentLine::Rebind(line));
        }
    }

    /// A refresh by the agent. A survey finds the same again: the journal gets what is new.
    pub fn refreshed(&self, line: RefreshLine, is_new: bool, standing: &mut Standing<String>) {
        self.record_news(standing, line.id.clone(), || from_refresh(&line));
        if is_new {
            self.journal(AgentLine::Refresh(line));
        }
    }

    /// Hands over the agent's own line of the journal.
    pub fn journal(&self, line: AgentLine) {
        let lines = self.journal.as_ref();
        if lines.is_some_and(|lines| lines.try_send(Box::new(line)).is_err()) {
            self.metrics[Total::JournalUnwrittenLines].inc();
        }
    }
}
