//! Writes the agent's own lines of the journal, in a thread of its own: a repair does not wait for
//! the journal's disk.

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use bindguard_core::error_chain;
use bindguard_core::report::{Actor, RebindLine, RefreshLine, Report};
use bindguard_guard::{
    JournalEntry, RecordError, record_nri_create, record_rebind, record_refresh,
};
use tracing::warn;

use super::pod_names::PodNames;
use crate::events::PodIdentity;
use crate::metrics::Metrics;
use crate::pods::PodLookup;
use crate::run::spawn;

/// Limit of lines that wait for the disk. Further ones are counted and dropped.
const WAITING: usize = 1024;

/// Takes lines from any thread, without waiting.
#[derive(Debug, Clone)]
pub struct JournalWriter {
    /// `None` if there is no journal. Boxed: the channel reserves memory for all lines that may
    /// wait.
    lines: Option<SyncSender<Box<AgentLine>>>,
    metrics: Arc<Metrics>,
}

#[derive(Debug)]
enum AgentLine {
    NriCreate(String, Report),
    Rebind {
        pod_uid: String,
        volume: String,
        report: Report,
    },
    Refresh(RefreshLine),
}

impl JournalWriter {
    /// Takes lines and drops them: there is no journal.
    pub fn off(metrics: Arc<Metrics>) -> Self {
        Self {
            lines: None,
            metrics,
        }
    }

    /// Starts the thread.
    pub fn start(journal: &Path, pods: PodLookup, metrics: Arc<Metrics>) -> Self {
        let (lines, waiting) = sync_channel(WAITING);
        let journal = journal.to_owned();
        match spawn("journal", move || {
            write_lines(&journal, &waiting, PodNames::new(pods))
        }) {
            Ok(()) => Self {
                lines: Some(lines),
                metrics,
            },
            Err(error) => {
                warn!("the agent's repairs are not journaled: {error:#}");
                Self::off(metrics)
            }
        }
    }

    /// The plugin's report on the create of a container.
    pub fn nri_create(&self, id: &str, report: Report) {
        self.write(AgentLine::NriCreate(id.to_owned(), report));
    }

    /// The subpaths of a volume that are not healthy, or were not.
    pub fn rebound(&self, pod_uid: &str, volume: &str, report: Report) {
        self.write(AgentLine::Rebind {
            pod_uid: pod_uid.to_owned(),
            volume: volume.to_owned(),
            report,
        });
    }

    /// The refresh of a container.
    pub fn refreshed(&self, line: RefreshLine) {
        self.write(AgentLine::Refresh(line));
    }

    fn write(&self, line: AgentLine) {
        if self
            .lines
            .as_ref()
            .is_some_and(|lines| lines.try_send(Box::new(line)).is_err())
        {
            self.metrics.unwritten_lines.inc();
        }
    }
}

fn write_lines(journal: &Path, waiting: &Receiver<Box<AgentLine>>, mut pods: PodNames) {
    let mut failed: Option<String> = None;
    for line in waiting {
        let error = write_line(journal, *line, &mut pods)
            .err()
            .map(|error| error_chain(&error));
        // One warning for a disk that is full, not one for each line.
        if let Some(error) = error
            .as_ref()
            .filter(|error| failed.as_ref() != Some(error))
        {
            warn!("journal a repair of the agent: {error}");
        }
        failed = error;
    }
}

fn write_line(journal: &Path, line: AgentLine, pods: &mut PodNames) -> Result<(), RecordError> {
    match line {
        AgentLine::NriCreate(id, report) => record_nri_create(
            journal,
            &JournalEntry {
                id: Some(&id),
                attempt: 0,
                pid: None,
                report: &report,
            },
        ),
        AgentLine::Rebind {
            pod_uid,
            volume,
            report,
        } => {
            let mut line = RebindLine::new(Actor::Agent, &pod_uid, &volume, &report);
            if let Some(PodIdentity {
                namespace, name, ..
            }) = pods.of(&pod_uid)
            {
                (line.container.namespace, line.container.pod) = (Some(namespace), Some(name));
            }
            record_rebind(journal, line)
        }
        AgentLine::Refresh(line) => record_refresh(journal, line),
    }
}
