//! Hands the repairs of the agent and the guard to those who record them: the journal, and
//! events on pods.
//!
//! It never waits. Without an API server the events cost nothing.

use std::collections::{BTreeMap, HashSet};
use std::mem;
use std::sync::{Mutex, MutexGuard, PoisonError};

use bindguard_core::error_chain;
use bindguard_core::report::{Actor, JournalLine, RebindLine, RefreshLine};
use bindguard_guard::refresh::Abandoned;
use bindguard_operator::agent_status::HangingChild;
use bindguard_operator::container_mounts::ContainerMounts;
use bindguard_operator::ignored_requests::IgnoredRequest;
use bindguard_operator::node_report::NodeReport;
use bindguard_operator::pods::PodContainer;
use tracing::warn;

use crate::sinks::events::{
    Events, Standing, from_ignored_request, from_journal, from_keeper, from_rebind, from_refresh,
    from_survey,
};
use crate::sinks::journal::JournalWriter;
use crate::threads::IdleMemory;

/// The findings of the last survey: only a new finding is an event.
#[derive(Debug, Default)]
pub struct SurveyEvents {
    sources: Standing<()>,
    /// The ids of the containers that keep mounts of the host.
    keepers: HashSet<String>,
    /// The ids of the containers whose mounts are unknown.
    unread: HashSet<String>,
    /// The pods whose annotations have no effect, and the events about them.
    ignored: Vec<IgnoredRequest>,
    ignored_events: Standing<()>,
}

/// Takes reports, from any thread.
#[derive(Debug, Clone)]
pub struct Reporting {
    /// Events on pods.
    pub events: Events,
    /// The agent's own lines of the journal.
    pub journal: JournalWriter,
    /// Freed after each piece of work.
    pub memory: IdleMemory,
}

impl Reporting {
    /// True if it reads the journal.
    pub fn is_on(&self) -> bool {
        self.events.are_on()
    }

    /// A line of the journal. The agent reported its own repairs when they happened.
    pub fn journaled(&self, line: &JournalLine) {
        match line {
            JournalLine::Rebind(line) if line.by == Actor::Agent => return,
            JournalLine::Refresh(line) if line.by == Actor::Agent => return,
            JournalLine::Create(_) | JournalLine::NriCreate(_) => {}
            JournalLine::Rebind(_) | JournalLine::Refresh(_) | JournalLine::Release(_) => {}
        }
        self.memory.worked();
        if self.events.are_on() {
            self.events.record(from_journal(line));
        }
    }

    /// A survey of the node.
    pub fn surveyed(&self, report: &NodeReport, known: &mut SurveyEvents) {
        self.memory.worked();
        if self.events.are_on() {
            self.events
                .record(known.sources.changed((), from_survey(report)));
        }
    }

    /// The mounts of running containers. A container that keeps mounts is reported once,
    /// also if the container keeps further mounts later.
    pub fn surveyed_containers(&self, found: &ContainerMounts, known: &mut SurveyEvents) {
        for (name, keeper) in new_ones(&found.keepers, &mut known.keepers, |it| &it.container) {
            let places: Vec<String> = keeper
                .places
                .iter()
                .map(|place| place.display().to_string())
                .collect();
            warn!(
                "{name} keeps mounts that the host has unmounted: {}",
                places.join(", ")
            );
            self.events.record(from_keeper(keeper));
        }
        for (name, unread) in new_ones(&found.unread, &mut known.unread, |it| &it.container) {
            warn!(
                "the mounts of {name} are unknown: {}",
                error_chain(&unread.why)
            );
        }
    }

    /// The annotations for live refresh that have no effect. Returns the number of their pods.
    pub fn ignored_requests(&self, found: Vec<IgnoredRequest>, known: &mut SurveyEvents) -> usize {
        let before = mem::replace(&mut known.ignored, found);
        let mut occurrences = Vec::new();
        for request in &known.ignored {
            let problems = request.confirmed_by(&before);
            if !problems.is_empty() {
                occurrences.extend(from_ignored_request(&request.pod, &problems));
            }
        }
        let count = occurrences.len();
        let new = known.ignored_events.changed((), occurrences);
        for occurrence in &new {
            let pod = occurrence.pod.display_name().unwrap_or_default();
            warn!("pod {pod}: {}", occurrence.message);
        }
        if self.events.are_on() {
            self.events.record(new);
        }
        count
    }

    /// A re-bind by the agent. A survey finds the same again: the journal gets what is new.
    pub fn rebound(&self, line: RebindLine, is_new: bool, standing: &mut Standing<String>) {
        self.memory.worked();
        if self.events.are_on() {
            self.events
                .record(standing.changed(line.about(), from_rebind(&line)));
        }
        if is_new {
            self.journal.rebound(line);
        }
    }

    /// A refresh by the agent. A survey finds the same again: the journal gets what is new.
    pub fn refreshed(&self, line: RefreshLine, is_new: bool, standing: &mut Standing<String>) {
        self.memory.worked();
        if self.events.are_on() {
            self.events
                .record(standing.changed(line.id.clone(), from_refresh(&line)));
        }
        if is_new {
            self.journal.refreshed(line);
        }
    }
}

/// The findings about containers that were not known before, with the names of the containers. From
/// now on all are known.
fn new_ones<'f, F>(
    found: &'f [F],
    known: &mut HashSet<String>,
    container: impl Fn(&F) -> &PodContainer,
) -> Vec<(String, &'f F)> {
    let ids = found.iter().map(|it| container(it).id.clone()).collect();
    let before = mem::replace(known, ids);
    let named = |it| {
        let container = container(it);
        let pod = container.pod.display_name().unwrap_or_default();
        let name = container.name.as_deref().unwrap_or(&container.id);
        (format!("{pod} container {name}"), it)
    };
    let is_new = |it: &&F| !before.contains(&container(it).id);
    found.iter().filter(is_new).map(named).collect()
}

// The children that hang in containers. No second child enters such a container.

/// The children that hang, by the ids of their containers.
#[derive(Debug, Default)]
pub struct HangingChildren(Mutex<BTreeMap<String, Child>>);

#[derive(Debug)]
struct Child {
    /// The container's name for people.
    container: String,
    abandoned: Abandoned,
}

impl HangingChildren {
    /// Remembers the child of a container until the child ends.
    pub fn add(&self, id: &str, container: &str, abandoned: Abandoned) {
        let container = container.to_owned();
        let child = Child {
            container,
            abandoned,
        };
        self.alive().insert(id.to_owned(), child);
    }

    /// True if a child hangs in the container with this id.
    pub fn are_in(&self, id: &str) -> bool {
        self.alive().contains_key(id)
    }

    /// All of them.
    pub fn listed(&self) -> Vec<HangingChild> {
        let alive = self.alive();
        let child = |(id, child): (&String, &Child)| HangingChild {
            container: child.container.clone(),
            id: id.clone(),
            pid: child.abandoned.pid(),
        };
        alive.iter().map(child).collect()
    }

    fn alive(&self) -> MutexGuard<'_, BTreeMap<String, Child>> {
        let mut children = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        children.retain(|_, child| child.abandoned.is_alive());
        children
    }
}
