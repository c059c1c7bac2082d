//! Writes the agent's own lines of the journal, in a thread of its own: a repair does not wait for
//! the journal's disk.

use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use bindguard_core::error_chain;
use bindguard_core::report::{CreateLine, RebindLine, RefreshLine, Report};
use bindguard_guard::{record, record_rebind, record_refresh};
use lru::LruCache;
use tracing::warn;

use crate::pods::PodLookup;
use crate::sinks::metrics::{Metrics, Total};
use crate::threads::{TokenBucket, retry_with_backoff, spawn};

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

/// Starts the thread. `None` if it cannot be started.
pub fn start(
    journal: &Path,
    pods: &'static PodLookup,
    metrics: &'static Metrics,
) -> Option<SyncSender<Box<AgentLine>>> {
    let (lines, waiting) = sync_channel(WAITING);
    let journal = journal.to_owned();
    let started = spawn("journal", move || {
        let what = format!("write {}", journal.display());
        retry_with_backoff(&what, &metrics[Total::AgentThreadRestarts], || {
            write_lines(&journal, &waiting, pods, metrics);
            Ok(())
        })
    });
    if let Err(error) = started {
        warn!("the agent's repairs are not journaled: {error:#}");
        return None;
    }
    Some(lines)
}

fn write_lines(
    journal: &Path,
    waiting: &Receiver<Box<AgentLine>>,
    pods: &PodLookup,
    metrics: &Metrics,
) {
    let mut failed: Option<String> = None;
    let (mut shares, start) = (Shares::default(), Instant::now());
    for mut line in waiting {
        // The container or the volume whose share the line takes.
        let (about, problems) = match &mut *line {
            AgentLine::NriCreate(id, _, report) => (id.clone(), &mut report.problems),
            AgentLine::Rebind(line) => (line.about(), &mut line.problems),
            AgentLine::Refresh(line) => (line.id.clone(), &mut line.problems),
        };
        match shares.admit(&about, start.elapsed()) {
            Some(0) => {}
            Some(left_out) => problems.push(format!(
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
        let error = written.err().map(|error| error_chain(&error));
        // A full disk causes one warning, not a warning for each line.
        if let Some(error) = &error
            && failed.as_ref() != Some(error)
        {
            warn!("journal a repair of the agent: {error}");
        }
        failed = error;
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
#[derive(Debug)]
struct Shares(LruCache<String, Share>);

#[derive(Debug)]
struct Share {
    bucket: TokenBucket,
    left_out: u64,
}

impl Default for Shares {
    fn default() -> Self {
        Self(LruCache::new(MAX_SHARES))
    }
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
        let (mut shares, now) = (Shares::default(), Duration::from_secs(1));
        let written = (0..1_000).filter(|_| shares.admit("loud", now).is_some());
        assert_eq!(written.count(), 30);
        assert_eq!(shares.admit("quiet", now), Some(0));
        let later = now + LINE_INTERVAL;
        let answers = [(); 3].map(|()| shares.admit("loud", later));
        assert_eq!(answers, [Some(970), None, None]);
        assert_eq!(shares.admit("loud", later + LINE_INTERVAL), Some(2));
    }
}
