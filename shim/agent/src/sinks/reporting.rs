//! Hands the repairs of the agent and the guard to those who record them: the journal, and
//! events on pods.
//!
//! It never waits. Without an API server the events cost nothing.

use std::collections::BTreeMap;
use std::mem;
use std::sync::{Mutex, MutexGuard, PoisonError};

use bindguard_core::error_chain;
use bindguard_core::report::{Actor, JournalLine, RebindLine, RefreshLine};
use bindguard_guard::refresh::Abandoned;
use bindguard_operator::agent_status::HangingChild;
use bindguard_operator::container_mounts::{ContainerMounts, UnreadContainer};
use bindguard_operator::node_report::NodeReport;
use bindguard_operator::pods::{IgnoredRequest, PodContainer};
use tracing::warn;

use crate::say_once::SayOnce;
use crate::sinks::events::{
    Events, Occurrence, Standing, from_ignored_request, from_journal, from_keeper, from_rebind,
    from_refresh, from_survey, news,
};
use crate::sinks::journal::JournalWriter;
use crate::threads::IdleMemory;

/// The findings of the last survey: only a new finding is an event.
#[derive(Debug, Default)]
pub struct SurveyEvents {
    sources: Standing<()>,
    /// The ids of the containers that keep mounts of the host.
    keepers: SayOnce<String>,
    /// The ids of the containers whose mounts are unknown.
    unread: SayOnce<String>,
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

    fn record(&self, occurrences: impl FnOnce() -> Vec<Occurrence>) {
        self.memory.worked();
        if self.is_on() {
            self.events.record(occurrences());
        }
    }

    /// A line of the journal. The agent reported its own repairs when they happened.
    pub fn journaled(&self, line: &JournalLine) {
        match line {
            JournalLine::Rebind(line) if line.by == Actor::Agent => {}
            JournalLine::Refresh(line) if line.by == Actor::Agent => {}
            line => self.record(|| from_journal(line)),
        }
    }

    /// A survey of the node.
    pub fn surveyed(&self, report: &NodeReport, known: &mut SurveyEvents) {
        self.record(|| news(&mut known.sources, (), from_survey(report)));
    }

    /// The mounts of running containers. A container that keeps mounts is reported once,
    /// also if the container keeps further mounts later.
    pub fn surveyed_containers(&self, found: &ContainerMounts, known: &mut SurveyEvents) {
        let keepers = found.keepers.iter().map(|it| it.container.id.clone());
        let new_keepers = known.keepers.news((), keepers.collect());
        for keeper in &found.keepers {
            if new_keepers.contains(&keeper.container.id) {
                let places = keeper
                    .places
                    .iter()
                    .map(|place| place.display().to_string());
                warn!(
                    "{} keeps mounts that the host has unmounted: {}",
                    name_of(&keeper.container),
                    Vec::from_iter(places).join(", ")
                );
                self.events.record(from_keeper(keeper));
            }
        }
        let unread = found.unread.iter().map(|it| it.container.id.clone());
        let new_unread = known.unread.news((), unread.collect());
        for UnreadContainer { container, why } in &found.unread {
            if new_unread.contains(&container.id) {
                let why = error_chain(why);
                warn!("the mounts of {} are unknown: {why}", name_of(container));
            }
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
        let new = news(&mut known.ignored_events, (), occurrences);
        for occurrence in &new {
            let pod = occurrence.pod.display_name().unwrap_or_default();
            warn!("pod {pod}: {}", occurrence.message);
        }
        self.events.record(new);
        count
    }

    /// A re-bind by the agent. A survey finds the same again: the journal gets what is new.
    pub fn rebound(&self, line: RebindLine, is_new: bool, standing: &mut Standing<String>) {
        self.record(|| news(standing, line.about(), from_rebind(&line)));
        if is_new {
            self.journal.rebound(line);
        }
    }

    /// A refresh by the agent. A survey finds the same again: the journal gets what is new.
    pub fn refreshed(&self, line: RefreshLine, is_new: bool, standing: &mut Standing<String>) {
        self.record(|| news(standing, line.id.clone(), from_refresh(&line)));
        if is_new {
            self.journal.refreshed(line);
        }
    }
}

fn name_of(container: &PodContainer) -> String {
    let pod = container.pod.display_name().unwrap_or_default();
    let name = container.name.as_deref().unwrap_or(&container.id);
    format!("{pod} container {name}")
}

// The children that hang in containers. No second child enters such a container.

/// The children that hang, by the ids of their containers, with the names of the containers.
#[derive(Debug, Default)]
pub struct HangingChildren(Mutex<BTreeMap<String, (String, Abandoned)>>);

impl HangingChildren {
    /// Remembers the child of a container until the child ends.
    pub fn add(&self, id: &str, container: &str, abandoned: Abandoned) {
        let child = (container.to_owned(), abandoned);
        self.alive().insert(id.to_owned(), child);
    }

    /// True if a child hangs in the container with this id.
    pub fn are_in(&self, id: &str) -> bool {
        self.alive().contains_key(id)
    }

    /// All of them.
    pub fn listed(&self) -> Vec<HangingChild> {
        let mut listed = Vec::new();
        for (id, (container, abandoned)) in &*self.alive() {
            listed.push(HangingChild {
                container: container.clone(),
                id: id.clone(),
                pid: abandoned.pid(),
            });
        }
        listed
    }

    fn alive(&self) -> MutexGuard<'_, BTreeMap<String, (String, Abandoned)>> {
        let mut children = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        children.retain(|_, (_, abandoned)| abandoned.is_alive());
        children
    }
}
