//! Refreshes running containers, and reports what could not be done.
//!
//! Several threads may use one refresher, each for a different container: a container can make its
//! own refresh wait, and must not delay the host's re-binds.

use std::error::Error;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use bindguard_config::RefreshMode;
use bindguard_core::error_chain;
use bindguard_core::policy::Mode;
use bindguard_core::refresh_request::Notify;
use bindguard_core::report::{Actor, MountResult, RefreshLine, RefreshedMount};
use bindguard_guard::OpenError;
use bindguard_guard::refresh::{
    BoundFiles, CurrentFiles, FileBind, HeldProcess, HelperProcess, HostRoots, MAX_MOUNTS_OF_FILE,
    ProcessError, RefreshAct, TuckRecords, refresh_container,
};
use bindguard_operator::containers::{NotInit, hold_init};
use bindguard_operator::writers::ContainersOfNode;
use tracing::info;

use crate::limits::SayOnce;
use crate::pods::Container;
use crate::sinks::AgentLine;
use crate::sinks::metrics::{NOT_NOTIFIED, TotalBy};
use crate::work::Node;
use crate::work::queue::{Turn, TurnEnd};

/// The place of a pod or a container in warnings that concern the whole node.
pub const OF_NODE: &str = "";

/// The time limit of a container's refresh in the first turn.
const FIRST_TURN: Duration = Duration::from_millis(300);

/// The pause between two checks if a child has ended.
const CHILD_INTERVAL: Duration = Duration::from_millis(50);

/// Limit of the wait for the end of an init that cannot be read.
const END_TIMEOUT: Duration = Duration::from_secs(1);

/// The refresh of a container: the files and volumes that are due, and the reasons for stale mounts.
pub struct ContainerRefresh<'f> {
    container: &'f Container,
    notify: &'f Notify,
    bundle: Option<&'f Path>,
    kinds: Vec<Box<dyn CurrentFiles + 'f>>,
    /// The reason for which some binds are not known.
    pub unread: Option<String>,
    /// The reasons for which mounts stay stale.
    pub warnings: Vec<String>,
}

impl<'f> ContainerRefresh<'f> {
    pub fn of(container: &'f Container, notify: &'f Notify, bundle: Option<&'f Path>) -> Self {
        Self {
            container,
            notify,
            bundle,
            kinds: Vec::new(),
            unread: None,
            warnings: Vec::new(),
        }
    }

    pub fn add(&mut self, files: impl CurrentFiles + 'f) {
        self.kinds.push(Box::new(files));
    }

    pub fn add_read<E: Error + 'static>(&mut self, read: Result<impl CurrentFiles + 'f, E>) {
        if let Some(files) = self.noted(read) {
            self.add(files);
        }
    }

    /// Adds files of the host.
    pub fn add_files(&mut self, binds: Vec<FileBind>, running: &'f ContainersOfNode) {
        let (files, errors) = BoundFiles::open(binds, self.container.pid, running);
        self.add(files);
        let name = &self.container.name;
        for error in errors {
            self.warnings
                .push(format!("{name}: {}", error_chain(&error)));
        }
    }

    /// The result; an error is noted as the reason for which binds are not refreshed.
    pub fn noted<T, E: Error + 'static>(&mut self, read: Result<T, E>) -> Option<T> {
        read.map_err(|error| self.unread = Some(error_chain(&error)))
            .ok()
    }

    /// Needs a further turn. Returns true.
    fn out_of_time(&mut self, turn: Turn, why: &str) -> bool {
        if turn != Turn::First {
            let name = &self.container.name;
            self.warnings.push(format!("refresh {name}: {why}"));
        }
        true
    }
}

/// Refreshes containers, and remembers what was said of each.
#[derive(Debug)]
pub struct Refresher {
    pub node: &'static Node,
    helper: &'static HelperProcess,
    records: TuckRecords,
    /// Locked for a look-up, never during a refresh.
    said: Mutex<Said>,
}

/// The findings of earlier refreshes, by the uid of a pod or the id of a container.
#[derive(Debug, Default)]
struct Said {
    warned: SayOnce<String>,
    standing: SayOnce<String>,
    /// The journaled mounts that could not be replaced.
    left: SayOnce<String>,
    /// The journaled reason for which a container could not be refreshed at all.
    problems: SayOnce<String>,
}

impl Refresher {
    /// `None` if the node refreshes no container.
    pub fn of(node: &'static Node) -> Option<Self> {
        let is_on = node.config.agent().refresh != RefreshMode::Off;
        Some(Self::new(node.helper.filter(|_| is_on)?, node))
    }

    /// A refresher that has done nothing.
    pub fn new(helper: &'static HelperProcess, node: &'static Node) -> Self {
        Self {
            node,
            helper,
            records: TuckRecords::default(),
            said: Mutex::default(),
        }
    }

    /// The host-root binds of the container with this bundle, by the node's policy.
    ///
    /// # Errors
    /// If the bundle has no spec.
    pub fn host_roots(&self, bundle: &Path) -> Result<HostRoots, OpenError> {
        let config = &self.node.config;
        HostRoots::open(bundle, config.policy(), config.places())
    }

    /// Refreshes a container, and adds what could not be done to the warnings. `later`: the time limit
    /// in a later turn. Returns true if the container needs more time, or a later try may succeed.
    pub fn refresh(&self, turn: Turn, later: Duration, refresh: &mut ContainerRefresh<'_>) -> bool {
        let time = match turn {
            Turn::First => FIRST_TURN,
            Turn::Last | Turn::Retry => later,
        };
        let is_out_of_time = self.refresh_mounts(turn, time, refresh);
        // A container that ended meanwhile has no bundle.
        let has_ended = |bundle: &Path| bundle.symlink_metadata().is_err();
        let Some(why) = &refresh.unread else {
            return is_out_of_time;
        };
        if refresh.bundle.is_some_and(has_ended) {
            return is_out_of_time;
        }
        let name = &refresh.container.name;
        let warning = format!("binds of {name} are not refreshed: {why}; trying again");
        refresh.warnings.push(warning);
        true
    }

    /// A container that needs more time than its first turn has is not reported: its next turn
    /// continues, once the child of the earlier refresh ended.
    fn refresh_mounts(
        &self,
        turn: Turn,
        time: Duration,
        refresh: &mut ContainerRefresh<'_>,
    ) -> bool {
        let (container, node) = (refresh.container, self.node);
        let (metrics, reporting) = (node.metrics, &node.reporting);
        let (id, name) = (&container.id, &container.name);
        let is_first = turn == Turn::First;
        let began = Instant::now();
        while metrics.hanging_children.are_in(id) {
            if turn != Turn::Last || began.elapsed() > time {
                return refresh.out_of_time(turn, "an earlier refresh still hangs in it");
            }
            thread::sleep(CHILD_INTERVAL);
        }
        let time = time.saturating_sub(began.elapsed());
        let start = Instant::now();
        let process = match hold_init(Path::new("/"), id, container.pid) {
            Ok(process) => process,
            // The pid may already belong to a new process.
            Err(NotInit::Process(ProcessError::Ended(_))) => return false,
            Err(_) if !is_first && ends(container) => return false,
            Err(error) => return refresh.out_of_time(turn, &error_chain(&error)),
        };
        let act = match node.config.policy().stale_subpaths {
            Mode::Repair => RefreshAct::Replace(refresh.notify.clone()),
            Mode::Report | Mode::Off => RefreshAct::Look,
        };
        let mut line = RefreshLine::new(Actor::Agent, id, container.identity.clone());
        let (spec, records) = (container.spec.as_deref(), &self.records);
        let files: Vec<&dyn CurrentFiles> = refresh.kinds.iter().map(|kind| &**kind).collect();
        let refreshed = refresh_container(self.helper, time, &process, spec, &files, act, records);
        let mut refreshed = match refreshed {
            Ok(refreshed) => refreshed,
            Err(error) if error.may_pass() && is_first => return true,
            Err(error) if error.may_pass() && ends(container) => return false,
            Err(error) => {
                let problem = error_chain(&error);
                metrics.not_refreshed(&error);
                refresh.warnings.push(format!("refresh {name}: {problem}"));
                line.problems.push(problem.clone());
                let said = &mut *self.said();
                let is_new = !said.problems.news(id.clone(), vec![problem]).is_empty();
                reporting.repaired(AgentLine::Refresh(line), is_new, &mut said.standing);
                return error.may_pass();
            }
        };
        if refreshed.replaced() > 0 {
            let took = start.elapsed().as_secs_f64();
            metrics.refresh_seconds.observe(took);
        }
        let is_out_of_time = refreshed.is_out_of_time || refreshed.abandoned.is_some();
        let is_replaced = |mount: &RefreshedMount| mount.outcome.is_replaced();
        if is_first && is_out_of_time {
            refreshed.mounts.retain(is_replaced);
        }
        line.mounts = std::mem::take(&mut refreshed.mounts);
        line.notification = refreshed.notification.take();
        line.set_duration(start.elapsed());
        self.report_mounts(name, &line, &mut refresh.warnings);
        if refreshed.overlooked > 0 {
            let overlooked = format!(
                "{} mounts of {name} are not checked: it has more than {MAX_MOUNTS_OF_FILE} of one file",
                refreshed.overlooked
            );
            if !line.mounts.is_empty() {
                line.problems.push(overlooked.clone());
            }
            refresh.warnings.push(overlooked);
        }
        // News are a replaced mount, a failed notification, and a new reason why a mount is still
        // stale.
        let mut left = line.mounts.clone();
        left.retain(|mount| !is_replaced(mount) && mount.outcome != MountResult::Restless);
        let said = &mut *self.said();
        said.problems.news::<String>(id.clone(), Vec::new());
        let is_new = !said.left.news(id.clone(), left).is_empty()
            || line.mounts.iter().any(is_replaced)
            || line.notification.is_some();
        reporting.repaired(AgentLine::Refresh(line), is_new, &mut said.standing);
        if let Some(child) = refreshed.abandoned {
            metrics.hanging_children.add(id, name, child);
        }
        is_out_of_time
    }

    /// Counts and logs the results, and adds the warnings.
    fn report_mounts(&self, name: &str, line: &RefreshLine, warnings: &mut Vec<String>) {
        for mount in &line.mounts {
            let (destination, source) = (&mount.destination, &mount.source);
            self.node.metrics.refreshed(&mount.outcome);
            match mount.outcome {
                MountResult::Replaced { .. } => {
                    info!("refreshed {destination} of {name}");
                    continue;
                }
                // Each change of the volume causes a further refresh, which reports a result.
                MountResult::Restless => continue,
                _ => {}
            }
            let why = mount.reason();
            let why = why.as_deref().unwrap_or("policy only reports it");
            warnings.push(match mount.is_host_root() {
                true => {
                    format!("{destination} of {name} keeps mounts that the host unmounts: {why}")
                }
                false => format!("{destination} of {name} does not show {source}: {why}"),
            });
        }
        if let Some(notification) = &line.notification
            && let Some(error) = &notification.error
        {
            let refreshes = TotalBy::Refreshes;
            self.node.metrics.count_by(refreshes, NOT_NOTIFIED, 1);
            warnings.push(format!("{name} is refreshed but not notified: {error}"));
        }
    }

    /// Logs the warnings that are new for this pod or container, at the end of its turn.
    pub fn ended(&self, about: &str, warnings: Vec<String>, is_out_of_time: bool) -> TurnEnd {
        self.warn(about, warnings);
        match is_out_of_time {
            true => TurnEnd::OutOfTime,
            false => TurnEnd::Done,
        }
    }

    /// Logs the warnings that are new for this pod or container.
    pub fn warn(&self, about: &str, warnings: Vec<String>) {
        self.said().warned.warn(about.to_owned(), warnings);
    }

    fn said(&self) -> MutexGuard<'_, Said> {
        self.said.lock().unwrap_or_else(PoisonError::into_inner)
    }
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
        let node = Node::silent("");
        let [first, last] = both_turns(node, container(&cgroup, executing.pid()));
        drop(executing);
        assert_eq!(first.0, Vec::<String>::new());
        // A kernel that takes no lock for the program lets the refresh go on.
        if let [warning] = &last.0[..] {
            assert!(warning.contains("blocks its readers"), "{warning}");
            assert!(first.1 && last.1);
            let counted = "bindguard_refreshes_total{outcome=\"failed\"} 1\n";
            assert!(node.metrics.text().unwrap().contains(counted));
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
            let node = Node::silent("");
            let [first, last] = both_turns(node, container(&cgroup, exiting.pid()));
            assert_eq!(first.0, Vec::<String>::new());
            assert_eq!(last.0, Vec::<String>::new());
            let failed = "bindguard_refreshes_total{outcome=\"failed\"} 0\n";
            assert!(node.metrics.text().unwrap().contains(failed));
        }
    }

    /// The warnings of the first and of the last turn, and if the turn was out of time.
    fn both_turns(node: &'static Node, container: Container) -> [(Vec<String>, bool); 2] {
        let refresher = Refresher::new(helper(), node);
        let folder = tempfile::tempdir().unwrap();
        [Turn::First, Turn::Last].map(|turn| {
            let mut refresh = ContainerRefresh::of(&container, &Notify::None, None);
            refresh.add(PodVolumes::open(folder.path()).unwrap());
            let is_out_of_time = refresher.refresh(turn, FIRST_TURN, &mut refresh);
            (refresh.warnings, is_out_of_time)
        })
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
