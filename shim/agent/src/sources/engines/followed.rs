//! The containers of Docker and Podman that opted in, and the refresh of each.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bindguard_config::RefreshMode;
use bindguard_core::error_chain;
use bindguard_core::identity::Identity;
use bindguard_core::paths::lies_in;
use bindguard_core::places::Places;
use bindguard_core::refresh_request::{Notify, OptIn, RefreshRequest, RequestedBinds};
use bindguard_core::spec::{SpecUsers, SpecView};
use bindguard_guard::refresh::{BoundFiles, BoundMounts, CurrentFiles, FileBind};
use bindguard_operator::engines::{
    ContainersOfNode, Engine, EngineContainer, engine_containers, state_folders,
};
use bindguard_sys::bundle::read_spec;

use super::labels::{Labelled, annotated, labelled};
use crate::container::Container;
use crate::sources::files::{FollowedFiles, Watches};
use crate::work::pod_refreshes::noted;
use crate::work::refresh_queue::{Turn, retry_pause};
use crate::work::refresher::{OF_NODE, Refresher};

/// The time limit of a container's refresh in the first turn, and in each later turn.
const FIRST_TURN: Duration = Duration::from_millis(300);
const LAST_TURN: Duration = Duration::from_secs(2);

/// A container that opted in.
#[derive(Debug)]
struct FollowedContainer {
    container: Container,
    bundle: PathBuf,
    binds: Vec<FileBind>,
    requested: RequestedBinds,
    /// The sources of all binds.
    sources: HashSet<PathBuf>,
    notify: Notify,
    problems: Vec<String>,
}

/// A container that needed more time than its first turn.
#[derive(Debug)]
struct LateContainer {
    id: String,
    since: Instant,
    turn: Turn,
    due: Instant,
}

/// The containers of the engines.
#[derive(Debug)]
pub struct Followed<'a> {
    refresher: &'a Refresher<'a>,
    root: PathBuf,
    running: ContainersOfNode,
    mode: RefreshMode,
    places: Places,
    containers: HashMap<String, FollowedContainer>,
    late: Vec<LateContainer>,
    /// The last answers of the engines. While an engine does not answer, its containers keep their
    /// requests.
    labels: HashMap<Engine, HashMap<String, Labelled>>,
}

impl FollowedFiles for Followed<'_> {
    fn survey(&mut self, watches: &mut Watches) -> bool {
        let mut warnings = Vec::new();
        let folders = state_folders(&self.root);
        let before = watches.begin();
        // Watched first: a container that starts meanwhile is found, or reported by an event.
        for (_, folder) in &folders {
            warnings.extend(
                watches
                    .watch_state(folder)
                    .err()
                    .map(|error| error_chain(&error)),
            );
        }
        let running = engine_containers(&folders);
        self.read_labels(&running, &mut warnings);
        let mut containers = HashMap::new();
        for container in &running {
            if let Some(opted_in) = self.opted_in(container, &mut warnings) {
                containers.insert(container.id.clone(), opted_in);
            }
        }
        self.containers = containers;
        let mut is_complete = warnings.is_empty();
        for opted_in in self.containers.values_mut() {
            is_complete &= opted_in.watch(watches);
        }
        watches.remove_unused(&before);
        self.refresher.warn(OF_NODE, warnings);
        self.refresher
            .forget_others(|id| self.containers.contains_key(id));
        let ids: Vec<String> = self.containers.keys().cloned().collect();
        ids.iter().for_each(|id| self.refresh(id));
        is_complete
    }

    fn refresh(&mut self, id: &str) {
        let is_out_of_time = self.refresh_in(Turn::First, FIRST_TURN, id);
        if !is_out_of_time {
            self.late.retain(|late| late.id != id);
        } else if !self.late.iter().any(|late| late.id == id) {
            let now = Instant::now();
            self.late.push(LateContainer {
                id: id.to_owned(),
                since: now,
                turn: Turn::Last,
                due: now,
            });
        }
    }

    fn has_mounts(&self) -> bool {
        let mut containers = self.containers.values();
        containers.any(|container| container.requested.volumes || !container.binds.is_empty())
    }

    fn with_mounts_at(&self, places: &[PathBuf]) -> Vec<String> {
        let has_one = |container: &&FollowedContainer| {
            let is_at = |place: &PathBuf| {
                container.requested.volumes && container.sources.contains(place)
                    || container
                        .binds
                        .iter()
                        .any(|bind| lies_in(&bind.directory, place))
            };
            places.iter().any(is_at)
        };
        let containers = self.containers.values().filter(has_one);
        containers
            .map(|container| container.container.id.clone())
            .collect()
    }

    fn late_turn(&self) -> Option<Instant> {
        self.late.iter().map(|late| late.due).min()
    }

    fn refresh_late(&mut self) {
        let now = Instant::now();
        let Some(index) = self.late.iter().position(|late| late.due <= now) else {
            return;
        };
        let mut late = self.late.remove(index);
        if self.refresh_in(late.turn, LAST_TURN, &late.id) {
            late.turn = Turn::Retry;
            late.due = Instant::now() + retry_pause(late.since);
            self.late.push(late);
        }
    }
}

impl<'a> Followed<'a> {
    /// The containers on a node whose `/` is at `root`. A survey finds them.
    pub fn new(
        refresher: &'a Refresher<'a>,
        root: &Path,
        mode: RefreshMode,
        places: &Places,
    ) -> Self {
        let running = ContainersOfNode::at(root);
        let (containers, late, labels) = Default::default();
        Self {
            refresher,
            root: root.to_owned(),
            running,
            mode,
            places: places.clone(),
            containers,
            late,
            labels,
        }
    }

    /// Returns true if the time was over.
    fn refresh_in(&self, turn: Turn, time: Duration, id: &str) -> bool {
        let Some(opted_in) = self.containers.get(id) else {
            return false;
        };
        let (files, errors) = BoundFiles::open(
            opted_in.binds.clone(),
            opted_in.container.pid,
            &self.running,
        );
        let mut warnings = opted_in.problems.clone();
        warnings.extend(
            errors
                .iter()
                .map(|error| format!("{}: {}", opted_in.container.name, error_chain(error))),
        );
        let (bundle, requested) = (&opted_in.bundle, opted_in.requested);
        let mut unread = None;
        let roots = requested
            .host_root
            .then(|| noted(self.refresher.host_roots(bundle, &self.places), &mut unread));
        let roots = roots.flatten().filter(|roots| !roots.is_empty());
        let mounts = requested.volumes.then(|| {
            let (running, places) = (&self.running, &self.places);
            let mounts = BoundMounts::of_engine(bundle, running, places, roots.as_ref());
            noted(mounts, &mut unread)
        });
        let mounts = mounts.flatten();
        let mut kinds: Vec<&dyn CurrentFiles> = vec![&files];
        kinds.extend(mounts.as_ref().map(|mounts| mounts as &dyn CurrentFiles));
        kinds.extend(roots.as_ref().map(|roots| roots as &dyn CurrentFiles));
        let (container, notify) = (&opted_in.container, &opted_in.notify);
        let done = self
            .refresher
            .refresh(turn, time, container, &kinds, notify);
        warnings.extend(done.warnings);
        let is_unread = unread.is_some() && bundle.symlink_metadata().is_ok();
        if let Some(why) = unread.filter(|_| is_unread) {
            let name = &container.name;
            warnings.push(format!(
                "binds of {name} are not refreshed: {why}; trying again"
            ));
        }
        self.refresher.warn(id, warnings);
        done.is_out_of_time || is_unread
    }

    fn read_labels(&mut self, running: &[EngineContainer], warnings: &mut Vec<String>) {
        for engine in [Engine::Docker, Engine::Podman] {
            if !running.iter().any(|container| container.engine == engine) {
                self.labels.remove(&engine);
                continue;
            }
            match labelled(&self.root, engine) {
                Ok(labelled) => drop(self.labels.insert(engine, labelled)),
                Err(error) => {
                    warnings.push(format!(
                        "labels of {} are not known: {error:#}",
                        engine.name()
                    ));
                }
            }
        }
    }

    /// The container with its binds; `None` if the container has no request.
    fn opted_in(
        &self,
        container: &EngineContainer,
        warnings: &mut Vec<String>,
    ) -> Option<FollowedContainer> {
        let (engine, id) = (container.engine.name(), &container.id);
        let bytes = match read_spec(&container.bundle) {
            Ok(bytes) => bytes,
            Err(error) => {
                // A container that ended meanwhile has no bundle.
                if container.bundle.symlink_metadata().is_ok() {
                    warnings.push(format!("{engine} container {id}: {}", error_chain(&error)));
                }
                return None;
            }
        };
        let spec = match SpecView::from_bytes(&bytes) {
            Ok(spec) => spec,
            Err(error) => {
                warnings.push(format!("{engine} container {id}: {}", error_chain(&error)));
                return None;
            }
        };
        let label = self
            .labels
            .get(&container.engine)
            .and_then(|labels| labels.get(&container.id));
        let request = annotated(&spec).or_else(|| label.map(|label| label.request.clone()));
        let RefreshRequest {
            containers,
            binds: requested,
            notify,
            mut problems,
        } = request.unwrap_or_default();
        let is_in = self.mode == RefreshMode::All || containers == OptIn::All;
        if !is_in && !requested.any() && problems.is_empty() {
            return None;
        }
        // As the engines print it.
        let short = || container.id.get(..12).unwrap_or(&container.id).to_owned();
        let name = label
            .and_then(|label| label.name.clone())
            .unwrap_or_else(short);
        let name = format!("{} container {name}", container.engine.name());
        problems
            .iter_mut()
            .for_each(|problem| *problem = format!("{name}: {problem}"));
        // Directories need no watch: a container sees new files in a bound directory.
        let mut binds = if is_in {
            FileBind::of_spec(&spec)
        } else {
            Vec::new()
        };
        binds.retain(|bind| !bind.is_of_directory());
        let sources = spec.binds().iter().map(|bind| bind.source().to_owned());
        let sources = sources.collect();
        let users = SpecUsers::from_spec(&bytes).ok().map(Arc::new);
        let followed = Container {
            identity: Identity::without_pod(&name),
            id: container.id.clone(),
            name,
            pid: container.pid,
            spec: users,
        };
        Some(FollowedContainer {
            container: followed,
            bundle: container.bundle.clone(),
            binds,
            requested,
            sources,
            notify,
            problems,
        })
    }
}

impl FollowedContainer {
    /// Returns false if a file is not watched.
    fn watch(&mut self, watches: &mut Watches) -> bool {
        let problems = self.problems.len();
        // To add a watch is a walk.
        for bind in self.binds.iter().filter(|bind| bind.answers()) {
            if let Err(error) = watches.watch_file(&self.container.id, &bind.directory, &bind.name)
            {
                self.problems
                    .push(format!("{}: {}", self.container.name, error_chain(&error)));
            }
        }
        self.problems.len() == problems
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::fs;
    use std::thread;

    use bindguard_core::policy::Policy;
    use bindguard_testing::live::{self, Inside};
    use bindguard_testing::{Cgroup, helper, mount_of, own_namespace};

    use super::*;
    use crate::sinks::events::Events;
    use crate::sinks::journal::JournalWriter;
    use crate::sinks::metrics::Metrics;
    use crate::sinks::reporting::Reporting;
    use crate::sources::watch::Inotify;
    use crate::threads::IdleMemory;

    fn silent(metrics: &Arc<Metrics>) -> Reporting {
        Reporting {
            events: Events::off(Arc::clone(metrics)),
            journal: JournalWriter::off(Arc::clone(metrics)),
            memory: IdleMemory::default(),
        }
    }

    /// A container of Docker that was busy for some seconds showed the old file until the next
    /// survey, which is minutes away.
    #[test]
    fn a_container_that_was_too_late_twice_is_tried_again_before_the_next_survey() {
        if !own_namespace() {
            return;
        }
        let (host, root) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let file = host.path().join("app.conf");
        fs::write(&file, "0").unwrap();
        let inside = Inside::of(file.clone(), "app.conf");
        // The container ends before its cgroup.
        let Some(cgroup) = Cgroup::make("late") else {
            return;
        };
        let running = live::Container::start(root.path(), &[inside]);
        cgroup.add(running.process.pid());
        let (node, metrics, policy) = (
            tempfile::tempdir().unwrap(),
            Metrics::new(),
            Policy::default(),
        );
        let reporting = silent(&metrics);
        let refresher = Refresher::new(helper(), &metrics, &reporting, &policy);
        let places = Places::default();
        let mut followed = Followed::new(&refresher, node.path(), RefreshMode::All, &places);
        let spec = serde_json::json!({"mounts": [mount_of(&file, "/app.conf", "rprivate")]});
        let spec = spec.to_string().into_bytes();
        let id = cgroup.id().to_owned();
        let container = Container {
            name: id.clone(),
            id: id.clone(),
            pid: running.process.pid(),
            spec: Some(Arc::new(running.spec().clone())),
            identity: Identity::without_pod(&id),
        };
        let opted_in = FollowedContainer {
            container,
            bundle: node.path().to_owned(),
            binds: FileBind::of_spec(&SpecView::from_bytes(&spec).unwrap()),
            requested: RequestedBinds::default(),
            sources: HashSet::new(),
            notify: Notify::None,
            problems: Vec::new(),
        };
        followed.containers.insert(id.clone(), opted_in);
        // A mount may cover the folder of the file.
        let places = [host.path().to_owned()];
        assert!(followed.has_mounts() && followed.with_mounts_at(&places) == [id.clone()]);
        fs::write(host.path().join("new"), "1").unwrap();
        fs::rename(host.path().join("new"), &file).unwrap();
        // Another refresh, or the container itself, has the lock meanwhile.
        let namespace = running.namespace();
        let lock = namespace.try_lock().unwrap().unwrap();
        followed.refresh(&id);
        assert!(followed.late_turn().is_some(), "the first turn was in time");
        followed.refresh_late();
        assert_eq!(running.read("app.conf").as_deref(), Some("0"));
        let again = followed.late_turn().expect("no further try is planned");
        assert!(again > Instant::now(), "the thread would not wait");
        drop(lock);
        let start = Instant::now();
        while running.read("app.conf").as_deref() != Some("1") {
            assert!(start.elapsed() < Duration::from_secs(60), "it stays old");
            followed.refresh_late();
            thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn a_survey_forgets_the_warnings_about_containers_that_are_gone() {
        let (root, metrics, policy) = (
            tempfile::tempdir().unwrap(),
            Metrics::new(),
            Policy::default(),
        );
        let reporting = silent(&metrics);
        let refresher = Refresher::new(helper(), &metrics, &reporting, &policy);
        refresher.warn("gone", vec!["why".to_owned()]);
        let places = Places::default();
        let mut followed = Followed::new(&refresher, root.path(), RefreshMode::All, &places);
        followed.survey(&mut Watches::new(Inotify::new().unwrap()));
        assert!(!refresher.has_warned("gone"));
    }
}
