//! The receivers of reports: the journal, the log, figures, and events on pods. No module of this
//! folder imports a module of `sources` or `work`.

pub mod events;
pub mod metrics;

use std::hash::Hash;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use bindguard_config::{Config, EventMode};
use bindguard_core::error_chain;
use bindguard_core::report::{Actor, CreateLine, JournalLine, RebindLine, RefreshLine, Report};
use bindguard_guard::{record, record_rebind, record_refresh};
use bindguard_kubernetes::{Access, Failure};
use lru::LruCache;
use tokio::sync::mpsc::Sender;
use tracing::warn;

use crate::limits::{IdleMemory, SayOnce, TokenBucket, retry_with_backoff, spawn};
use crate::pods::PodLookup;
use crate::sinks::events::{EventType, Occurrence, from_binds, from_journal, from_refresh};
use crate::sinks::metrics::{EventResult, Metrics, Total, TotalBy};

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
        access: &Result<Arc<Access>, Failure>,
        pods: &'static PodLookup,
        metrics: &'static Metrics,
    ) -> Self {
        let to_api = &config.agent().kubernetes;
        let mut reporting = Self::off(metrics);
        tokio::spawn(reporting.memory.clone().run());
        if let Some(journal) = config.journal().map(Path::to_owned) {
            let (lines, waiting) = sync_channel(WAITING);
            let started = spawn("journal", move || {
                let what = format!("write {}", journal.display());
                retry_with_backoff(&what, &metrics[Total::AgentThreadRestarts], || {
                    write_lines(&journal, &waiting, pods, metrics);
                    Ok(())
                });
            });
            match started {
                Ok(()) => reporting.journal = Some(lines),
                Err(error) => warn!("the agent's repairs are not journaled: {error:#}"),
            }
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
        standing: &mut SayOnce<K>,
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

    /// A repair by the agent. A survey finds the same again: the journal gets what is new.
    pub fn repaired(&self, line: AgentLine, is_new: bool, standing: &mut SayOnce<String>) {
        self.record_news(standing, line.about(), || match &line {
            AgentLine::NriCreate(..) => Vec::new(),
            AgentLine::Rebind(line) => from_binds(&line.container, &line.binds),
            AgentLine::Refresh(line) => from_refresh(line),
        });
        if is_new {
            self.journal(line);
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

// The agent's own lines of the journal, written in a thread of its own: a repair does not wait for the
// journal's disk.

/// Limit of lines that wait for the disk. Further lines are counted and dropped.
const WAITING: usize = 1024;

#[derive(Debug)]
pub enum AgentLine {
    /// With the id of the container, and its init after the create.
    NriCreate(String, Option<u32>, Report),
    /// The subpaths of a volume that are not healthy, or were not.
    Rebind(RebindLine),
    Refresh(RefreshLine),
}

impl AgentLine {
    /// The container, or the volume as `UID/VOLUME`.
    fn about(&self) -> String {
        match self {
            Self::NriCreate(id, ..) => id.clone(),
            Self::Rebind(line) => line.about(),
            Self::Refresh(line) => line.id.clone(),
        }
    }

    fn problems(&mut self) -> &mut Vec<String> {
        match self {
            Self::NriCreate(_, _, report) => &mut report.problems,
            Self::Rebind(line) => &mut line.problems,
            Self::Refresh(line) => &mut line.problems,
        }
    }
}

fn write_lines(
    journal: &Path,
    waiting: &Receiver<Box<AgentLine>>,
    pods: &PodLookup,
    metrics: &Metrics,
) {
    let (mut shares, mut said) = (Shares(LruCache::new(MAX_SHARES)), SayOnce::default());
    let start = Instant::now();
    for mut line in waiting {
        // Each container and each volume has a share.
        match shares.admit(&line.about(), start.elapsed()) {
            Some(0) => {}
            Some(left_out) => line.problems().push(format!(
                "{left_out} earlier lines about it were left out: its files change too often"
            )),
            None => {
                metrics[Total::JournalUnwrittenLines].inc();
                continue;
            }
        }
        let written = match *line {
            AgentLine::NriCreate(id, pid, report) => {
                let mut line = CreateLine::of_nri_plugin(&report);
                line.id = Some(id);
                line.pid = pid;
                record(journal, line)
            }
            AgentLine::Rebind(mut line) => {
                let pod = &mut line.container.pod;
                if let Some(named) = pod.uid.as_deref().and_then(|uid| pods.names(uid)) {
                    *pod = named;
                }
                record_rebind(journal, line)
            }
            AgentLine::Refresh(line) => record_refresh(journal, line),
        };
        // A full disk causes one warning, not a warning for each line.
        let error = written.err().map(|error| error_chain(&error));
        said.warn(
            (),
            error.map(|why| format!("journal a repair of the agent: {why}")),
        );
    }
}

// The share of each container in the agent's lines of the journal.
//
// A container can make its files stale in a loop, and each refresh is a line. The journal has a
// fixed size: without a limit the lines about all other containers would be lost in minutes.

/// Lines about one container that are written at once, and the interval of further lines.
const BURST: u32 = 30;
const LINE_INTERVAL: Duration = Duration::from_secs(10);

/// Limit of containers and volumes that are remembered.
const MAX_SHARES: NonZeroUsize = NonZeroUsize::new(1024).unwrap();

/// Decides which lines are written. The time is passed in.
struct Shares(LruCache<String, Share>);

struct Share {
    bucket: TokenBucket,
    left_out: u64,
}

impl Shares {
    /// `None` if the line is to be left out. Otherwise the number of lines about this container or
    /// volume that were left out since the last line.
    fn admit(&mut self, about: &str, now: Duration) -> Option<u64> {
        let new = || Share {
            bucket: TokenBucket::new(BURST, LINE_INTERVAL, now),
            left_out: 0,
        };
        let share = self.0.get_or_insert_mut(about.to_owned(), new);
        if share.bucket.take(now) {
            return Some(std::mem::take(&mut share.left_out));
        }
        share.left_out += 1;
        None
    }
}

#[cfg(test)]
mod writer_tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::fs;

    use bindguard_core::identity::Identity;
    use bindguard_core::report::Actor;

    use super::*;

    #[test]
    fn a_container_that_changes_all_the_time_leaves_room_for_the_lines_of_others() {
        let folder = tempfile::tempdir().unwrap();
        let (journal, metrics) = (folder.path().join("journal.jsonl"), Metrics::new());
        let (lines, waiting) = sync_channel(WAITING);
        for id in [["loud"; 500].as_slice(), &["quiet"]].concat() {
            let line = RefreshLine::new(Actor::Agent, id, Identity::default());
            lines.send(Box::new(AgentLine::Refresh(line))).unwrap();
        }
        drop(lines);
        write_lines(&journal, &waiting, PodLookup::unanswered(), metrics);
        let written = fs::read_to_string(&journal).unwrap();
        let about = |id: &str| written.matches(&format!(r#""id":"{id}""#)).count();
        assert_eq!(about("quiet"), 1);
        let left_out = metrics[Total::JournalUnwrittenLines].get();
        assert!(left_out > 400, "{left_out}");
        assert_eq!(about("loud") as u64 + left_out, 500);
    }
}

#[cfg(test)]
mod share_tests {
    use super::*;

    #[test]
    fn a_container_with_many_lines_costs_no_other_container_a_line() {
        let (mut shares, now) = (Shares(LruCache::new(MAX_SHARES)), Duration::from_secs(1));
        let written = (0..1_000).filter(|_| shares.admit("loud", now).is_some());
        assert_eq!(written.count(), 30);
        assert_eq!(shares.admit("quiet", now), Some(0));
        let later = now + LINE_INTERVAL;
        let answers = [(); 3].map(|()| shares.admit("loud", later));
        assert_eq!(answers, [Some(970), None, None]);
        assert_eq!(shares.admit("loud", later + LINE_INTERVAL), Some(2));
    }
}
