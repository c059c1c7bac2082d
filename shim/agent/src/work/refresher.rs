//! Refreshes running containers, and reports what could not be done.
//!
//! Several threads may use one refresher, each for a different container: a container can make its
//! own refresh wait, and must not delay the host's re-binds.

use std::collections::HashMap;
use std::mem;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use bindguard_core::error_chain;
use bindguard_core::places::Places;
use bindguard_core::policy::{Mode, Policy};
use bindguard_core::refresh_request::Notify;
use bindguard_core::report::{Actor, MountResult, RefreshLine, RefreshedMount};
use bindguard_guard::OpenError;
use bindguard_guard::refresh::{
    CurrentFiles, HeldProcess, HelperProcess, HostRoots, MAX_MOUNTS_OF_FILE, ProcessError,
    RefreshAct, RefreshError, Refreshed, TuckRecords, refresh_container_within,
};
use bindguard_operator::node::{NotInit, hold_init};
use tracing::{info, warn};

use crate::container::Container;
use crate::sinks::events::Standing;
use crate::sinks::metrics::{Metrics, RefreshResult};
use crate::sinks::reporting::Reporting;
use crate::work::refresh_queue::Turn;

/// The place of a pod or a container in warnings that concern the whole node.
pub const OF_NODE: &str = "";

/// The pause between two checks if a child has ended.
const CHILD_INTERVAL: Duration = Duration::from_millis(50);

/// Limit of the wait for the end of an init that cannot be read.
const END_TIMEOUT: Duration = Duration::from_secs(1);

/// The end of a container's refresh.
#[derive(Debug, Default)]
pub struct RefreshedContainer {
    /// The reasons for which mounts stay stale.
    pub warnings: Vec<String>,
    /// True if it needs more time, or a later try may succeed.
    pub is_out_of_time: bool,
}

impl RefreshedContainer {
    fn out_of_time(warnings: Vec<String>) -> Self {
        Self {
            warnings,
            is_out_of_time: true,
        }
    }
}

/// Refreshes containers, and remembers what is known of each.
#[derive(Debug)]
pub struct Refresher<'a> {
    helper: &'a HelperProcess,
    metrics: &'a Metrics,
    reporting: &'a Reporting,
    policy: &'a Policy,
    records: TuckRecords,
    /// Locked for a look-up, never during a refresh.
    known: Mutex<Known>,
}

/// The findings of earlier refreshes.
#[derive(Debug, Default)]
struct Known {
    warned: HashMap<String, Vec<String>>,
    standing: Standing<String>,
    /// The journaled mounts of each container that could not be replaced: a survey finds the same
    /// again.
    left: HashMap<String, Vec<RefreshedMount>>,
    /// The journaled reason for which a container could not be refreshed at all.
    problems: HashMap<String, String>,
}

impl<'a> Refresher<'a> {
    /// A refresher that has done nothing.
    pub fn new(
        helper: &'a HelperProcess,
        metrics: &'a Metrics,
        reporting: &'a Reporting,
        policy: &'a Policy,
    ) -> Self {
        Self {
            helper,
            metrics,
            reporting,
            policy,
            records: TuckRecords::default(),
            known: Mutex::default(),
        }
    }

    /// The host-root binds of the container with this bundle, by the node's policy.
    ///
    /// # Errors
    /// If the bundle has no spec.
    pub fn host_roots(&self, bundle: &Path, places: &Places) -> Result<HostRoots, OpenError> {
        HostRoots::open(bundle, self.policy, places)
    }

    /// Refreshes a container for at most this time, and reports what could not be done. A container
    /// that needs more time than its first turn has is not reported: its next turn continues, once
    /// the child of the earlier refresh ended.
    pub fn refresh(
        &self,
        turn: Turn,
        time: Duration,
        container: &Container,
        files: &[&dyn CurrentFiles],
        notify: &Notify,
    ) -> RefreshedContainer {
        let start = Instant::now();
        while self.metrics.hanging_children.are_in(&container.id) {
            if turn == Turn::First {
                return RefreshedContainer::out_of_time(Vec::new());
            }
            if turn == Turn::Retry || start.elapsed() > time {
                return RefreshedContainer::out_of_time(vec![format!(
                    "refresh {}: an earlier refresh still hangs in it",
                    container.name
                )]);
            }
            thread::sleep(CHILD_INTERVAL);
        }
        let time = time.saturating_sub(start.elapsed());
        self.refresh_within(time, turn, container, files, notify)
    }

    fn refresh_within(
        &self,
        time: Duration,
        turn: Turn,
        container: &Container,
        files: &[&dyn CurrentFiles],
        notify: &Notify,
    ) -> RefreshedContainer {
        let has_more_time = turn == Turn::First;
        let name = &container.name;
        let start = Instant::now();
        let refreshed = match held(container) {
            Ok(process) => {
                let (spec, act) = (container.spec.as_deref(), self.act(notify));
                refresh_container_within(
                    self.helper,
                    time,
                    &process,
                    spec,
                    files,
                    act,
                    &self.records,
                )
            }
            Err(None) => return RefreshedContainer::default(),
            Err(Some(_)) if has_more_time => return RefreshedContainer::out_of_time(Vec::new()),
            Err(Some(_)) if ends(container) => return RefreshedContainer::default(),
            Err(Some(why)) => {
                return RefreshedContainer::out_of_time(vec![format!("refresh {name}: {why}")]);
            }
        };
        let mut refreshed = match refreshed {
            Ok(refreshed) => refreshed,
            Err(error) if has_more_time && error.may_pass() => {
                return RefreshedContainer::out_of_time(Vec::new());
            }
            Err(error) if error.may_pass() && ends(container) => {
                return RefreshedContainer::default();
            }
            Err(error) => {
                return RefreshedContainer {
                    warnings: self.report_error(container, &error),
                    is_out_of_time: error.may_pass(),
                };
            }
        };
        self.known().problems.remove(&container.id);
        if refreshed.replaced() > 0 {
            self.metrics
                .refresh_seconds
                .observe(start.elapsed().as_secs_f64());
        }
        let is_out_of_time = refreshed.is_out_of_time || refreshed.abandoned.is_some();
        if has_more_time && is_out_of_time {
            refreshed.mounts.retain(|mount| mount.outcome.is_replaced());
        }
        let mut line = line_about(container);
        line.mounts = mem::take(&mut refreshed.mounts);
        line.notification = refreshed.notification.take();
        line.set_duration(start.elapsed());
        let mut warnings = self.report(name, &line);
        if refreshed.overlooked > 0 {
            let overlooked = overlooked(name, &refreshed);
            warnings.push(overlooked.clone());
            line.problems
                .extend((!line.mounts.is_empty()).then_some(overlooked));
        }
        self.hand_over(line);
        if let Some(child) = refreshed.abandoned {
            self.metrics
                .hanging_children
                .add(&container.id, name, child);
        }
        RefreshedContainer {
            warnings,
            is_out_of_time,
        }
    }

    /// Reports a container that could not be refreshed at all: the container ended meanwhile, or
    /// was refused.
    fn report_error(&self, container: &Container, error: &RefreshError) -> Vec<String> {
        let problem = error_chain(error);
        self.metrics.refreshed(RefreshResult::of_error(error));
        let mut line = line_about(container);
        line.problems.push(problem.clone());
        let known = &mut *self.known();
        let is_new = known.is_new_problem(&container.id, &problem);
        self.reporting.refreshed(line, is_new, &mut known.standing);
        vec![format!("refresh {}: {problem}", container.name)]
    }

    /// News are a replaced mount, a failed notification, and a new reason why a mount is still
    /// stale.
    fn hand_over(&self, line: RefreshLine) {
        let is_left = |mount: &&RefreshedMount| {
            !mount.outcome.is_replaced() && mount.outcome != MountResult::Restless
        };
        let left: Vec<_> = line.mounts.iter().filter(is_left).cloned().collect();
        let is_done = line.mounts.iter().any(|mount| mount.outcome.is_replaced());
        let known = &mut *self.known();
        let is_new = known.leaves(&line.id, left) || is_done || line.notification.is_some();
        self.reporting.refreshed(line, is_new, &mut known.standing);
    }

    fn act(&self, notify: &Notify) -> RefreshAct {
        match self.policy.stale_subpaths {
            Mode::Repair => RefreshAct::Replace(notify.clone()),
            Mode::Report | Mode::Off => RefreshAct::Look,
        }
    }

    /// Counts and logs the results, and returns the warnings.
    fn report(&self, name: &str, line: &RefreshLine) -> Vec<String> {
        let mut warnings = Vec::new();
        for mount in &line.mounts {
            let RefreshedMount {
                destination,
                outcome,
                source,
                kind: _,
            } = mount;
            self.metrics.refreshed(RefreshResult::of(outcome));
            let why = mount.reason();
            match outcome {
                MountResult::Replaced { .. } => info!("refreshed {destination} of {name}"),
                // Each change of the volume causes a further refresh, which reports a result.
                MountResult::Restless => {}
                _ if mount.is_host_root() => warnings.push(format!(
                    "{destination} of {name} keeps mounts that the host unmounts: {}",
                    why.as_deref().unwrap_or("policy only reports it")
                )),
                _ => warnings.push(format!(
                    "{destination} of {name} does not show {source}: {}",
                    why.as_deref().unwrap_or("policy only reports it")
                )),
            }
        }
        let notification = line.notification.as_ref();
        if let Some(error) = notification.and_then(|notification| notification.error.as_ref()) {
            self.metrics.refreshed(RefreshResult::not_notified);
            warnings.push(format!("{name} is refreshed but not notified: {error}"));
        }
        warnings
    }

    /// Logs the warnings that are new for this pod or container.
    pub fn warn(&self, about: &str, warnings: Vec<String>) {
        self.known().warn(about, warnings);
    }

    /// Forgets the findings about pods and containers that are gone. `is_here` gets the uid of a
    /// pod or the id of a container.
    pub fn forget_others(&self, is_here: impl Fn(&str) -> bool) {
        self.known().forget_others(is_here);
    }

    /// True if a warning about this pod or container is remembered.
    #[cfg(test)]
    pub fn has_warned(&self, about: &str) -> bool {
        self.known().warned.contains_key(about)
    }

    /// Counts a thread that goes on after a panic.
    pub fn count_restart(&self) {
        self.metrics.restarts.inc();
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    fn is_new_problem(&mut self, id: &str, problem: &str) -> bool {
        let before = self.problems.insert(id.to_owned(), problem.to_owned());
        before.is_none_or(|before| before != problem)
    }

    /// Remembers the stale mounts of a container, and returns true if the mounts changed.
    fn leaves(&mut self, id: &str, left: Vec<RefreshedMount>) -> bool {
        let before = self.left.remove(id).unwrap_or_default();
        let is_changed = left != before;
        if !left.is_empty() {
            self.left.insert(id.to_owned(), left);
        }
        is_changed
    }

    fn forget_others(&mut self, is_here: impl Fn(&str) -> bool) {
        self.warned
            .retain(|about, _| about == OF_NODE || is_here(about));
        self.left.retain(|id, _| is_here(id));
        self.problems.retain(|id, _| is_here(id));
    }

    fn warn(&mut self, about: &str, warnings: Vec<String>) {
        let before = self.warned.remove(about).unwrap_or_default();
        warnings
            .iter()
            .filter(|warning| !before.contains(warning))
            .for_each(|warning| warn!("{warning}"));
        if !warnings.is_empty() {
            self.warned.insert(about.to_owned(), warnings);
        }
    }
}

fn overlooked(name: &str, refreshed: &Refreshed) -> String {
    let count = refreshed.overlooked;
    format!(
        "{count} mounts of {name} are not checked: it has more than {MAX_MOUNTS_OF_FILE} of one file"
    )
}

fn line_about(container: &Container) -> RefreshLine {
    RefreshLine::new(Actor::Agent, &container.id, container.identity.clone())
}

/// The init of a container; `None` if the init ended. The pid may already belong to a new process.
fn held(container: &Container) -> Result<HeldProcess, Option<String>> {
    hold_init(&container.id, container.pid).map_err(|error| match error {
        NotInit::Process(ProcessError::Ended(_)) => None,
        NotInit::Process(_) | NotInit::Cgroup { .. } | NotInit::Record { .. } => {
            Some(error_chain(&error))
        }
    })
}

/// True if the init ends. Before its end it has neither namespaces nor, with cgroup v1, a cgroup.
fn ends(container: &Container) -> bool {
    match HeldProcess::open(container.pid) {
        Ok(process) => process.ends_within(END_TIMEOUT),
        Err(error) => matches!(error, ProcessError::Ended(_)),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bindguard_core::identity::Identity;
    use bindguard_core::spec::SpecUsers;
    use bindguard_guard::refresh::PodVolumes;
    use bindguard_testing::held_memory::Executing;
    use bindguard_testing::helper;
    use bindguard_testing::{Cgroup, Exiting};
    use nix::sched::{CloneFlags, unshare};

    use super::*;
    use crate::sinks::events::Events;
    use crate::sinks::journal::JournalWriter;
    use crate::threads::IdleMemory;

    #[test]
    fn findings_about_a_container_that_is_gone_are_forgotten() {
        let mut known = Known::default();
        for about in [OF_NODE, "here", "gone"] {
            known.warn(about, vec!["why".to_owned()]);
        }
        let stale = || RefreshedMount::new("/d".as_ref(), "/s".as_ref(), MountResult::Restless);
        for id in ["here", "gone"] {
            assert!(known.leaves(id, vec![stale()]) && known.is_new_problem(id, "why"));
        }
        known.forget_others(|about| about == "here");
        let mut warned: Vec<_> = known.warned.keys().map(String::as_str).collect();
        warned.sort_unstable();
        assert_eq!(warned, [OF_NODE, "here"]);
        assert_eq!(known.left.keys().collect::<Vec<_>>(), ["here"]);
        assert_eq!(known.problems.keys().collect::<Vec<_>>(), ["here"]);
        assert!(!known.leaves("here", vec![stale()]) && !known.is_new_problem("here", "why"));
    }

    /// Its init hangs in execve(2), so a reader of its program is late. On a busy node every reader
    /// may be.
    #[test]
    fn a_first_turn_that_is_late_has_not_failed() {
        let enter_own = || unshare(CloneFlags::CLONE_NEWNS).unwrap_or_default();
        let Some(cgroup) = Cgroup::make("executes") else {
            return;
        };
        let Some(executing) = Executing::start_after(enter_own) else {
            return;
        };
        cgroup.add(executing.pid());
        let metrics = Metrics::new();
        let (first, last) = both_turns(&metrics, container(&cgroup, executing.pid()));
        drop(executing);
        assert_eq!(first.warnings, Vec::<String>::new());
        // A kernel that takes no lock for the program lets the refresh go on.
        if let [warning] = &last.warnings[..] {
            assert!(warning.contains("blocks its readers"), "{warning}");
            assert!(first.is_out_of_time && last.is_out_of_time);
            let counted = "bindguard_refreshes_total{outcome=\"failed\"} 1\n";
            assert!(metrics.text().unwrap().contains(counted));
        }
    }

    /// The init has no namespaces any more, and its process ends a moment later: a container that
    /// is removed after an update.
    #[test]
    fn a_container_that_exits_during_its_refresh_has_not_failed() {
        for in_cgroup in [true, false] {
            let Some(cgroup) = Cgroup::make("exits") else {
                return;
            };
            let enter = || {
                // With cgroup v1, an exiting process counts in the root cgroup: the case `false`.
                if in_cgroup {
                    cgroup.add(std::process::id());
                }
                unshare(CloneFlags::CLONE_NEWNS).unwrap();
            };
            let exiting = Exiting::start_after(enter, Duration::from_millis(400));
            let metrics = Metrics::new();
            let (first, last) = both_turns(&metrics, container(&cgroup, exiting.pid()));
            assert_eq!(first.warnings, Vec::<String>::new());
            assert_eq!(last.warnings, Vec::<String>::new());
            let failed = "bindguard_refreshes_total{outcome=\"failed\"} 0\n";
            assert!(metrics.text().unwrap().contains(failed));
        }
    }

    fn both_turns(
        metrics: &Arc<Metrics>,
        container: Container,
    ) -> (RefreshedContainer, RefreshedContainer) {
        let policy = Policy::default();
        let reporting = Reporting {
            events: Events::off(Arc::clone(metrics)),
            journal: JournalWriter::off(Arc::clone(metrics)),
            memory: IdleMemory::default(),
        };
        let refresher = Refresher::new(helper(), metrics, &reporting, &policy);
        let folder = tempfile::tempdir().unwrap();
        let files = PodVolumes::open(folder.path()).unwrap();
        let time = Duration::from_millis(300);
        let refreshed = |turn| refresher.refresh(turn, time, &container, &[&files], &Notify::None);
        (refreshed(Turn::First), refreshed(Turn::Last))
    }

    fn container(cgroup: &Cgroup, pid: u32) -> Container {
        Container {
            name: cgroup.id().to_owned(),
            id: cgroup.id().to_owned(),
            pid,
            spec: Some(Arc::new(SpecUsers::from_spec(b"{}").unwrap())),
            identity: Identity::without_pod(cgroup.id()),
        }
    }
}
