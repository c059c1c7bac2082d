//! Containers of Docker and Podman. A bound file is refreshed once the file's name leads to a
//! different file on the host (moby#15793). If the container opted in, new mounts of the host and
//! host-root binds are refreshed too.
//!
//! One thread follows all containers, and workers refresh them: a bound file on a server that hangs
//! delays the survey of the other containers, and nothing else.
//!
//! A request is an annotation in the spec, or a label of the container engine. No engine writes
//! labels to the spec. Annotations need no engine to run, and are checked first.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use std::{io, thread};

use anyhow::{Context, Result};
use bindguard_config::RefreshMode;
use bindguard_core::error_chain;
use bindguard_core::identity::Identity;
use bindguard_core::policy::Mode;
use bindguard_core::refresh_request::{
    NOTIFY_LABEL, OptIn, REFRESH_BINDS_LABEL, REFRESH_LABEL, RefreshRequest,
};
use bindguard_core::spec::{SpecUsers, SpecView};
use bindguard_core::text::lies_in;
use bindguard_guard::refresh::{BoundMounts, FileBind};
use bindguard_operator::containers::{Engine, EngineContainer, engine_containers, state_folders};
use bindguard_operator::unix_http;
use bindguard_operator::writers::ContainersOfNode;
use bindguard_sys::files::read_spec;
use serde::Deserialize;

use crate::pods::Container;
use crate::sources::watch::{self, Rules, Schedule, Source, Watches};
use crate::work::Node;
use crate::work::queue::{Planned, RefreshQueue, TurnEnd};
use crate::work::refresher::{ContainerRefresh, OF_NODE, Refresher};

/// The times after the start of a container at which its state may be complete. The folder appears
/// first, then the spec, then the init process.
const AFTER_START: [Duration; 3] = [
    Duration::from_millis(200),
    Duration::from_secs(1),
    Duration::from_secs(5),
];

/// The time limit of a container's refresh in a later turn.
const LATER_TURN: Duration = Duration::from_secs(2);

/// A container that opted in.
#[derive(Debug)]
struct FollowedContainer {
    container: Container,
    bundle: PathBuf,
    binds: Vec<FileBind>,
    /// The sources of all binds.
    sources: HashSet<PathBuf>,
    request: RefreshRequest,
}

/// Refreshes containers of Docker and Podman that opted in, on a node with or without a kubelet.
pub fn follow_engines(node: &'static Node) {
    let is_off = node.config.policy().stale_subpaths == Mode::Off;
    let Some(refresher) = Refresher::of(node).filter(|_| !is_off) else {
        return;
    };
    let engines: &EngineContainers =
        Box::leak(Box::new(EngineContainers::new(refresher, Path::new("/"))));
    node.retry_with_backoff("refresh the containers of Docker and Podman", || {
        let worker = thread::Builder::new().name("engine-refresh".to_owned());
        worker.spawn(|| {
            engines
                .refreshes
                .run(node, "", |planned| engines.refresh(planned))
        })?;
        Ok(())
    });
    watch::follow(node, "follow the containers of Docker and Podman", || {
        let rules = Rules::of_files(node.config.agent().survey, &AFTER_START);
        Ok((FollowedEngines::new(engines)?, rules))
    });
}

/// The containers that opted in, for the thread that follows them and for the workers.
#[derive(Debug)]
struct EngineContainers {
    refresher: Refresher,
    /// The node's `/`.
    root: PathBuf,
    refreshes: RefreshQueue,
    containers: Mutex<HashMap<String, Arc<FollowedContainer>>>,
}

impl EngineContainers {
    /// The containers on a node whose `/` is at `root`. A survey finds them.
    fn new(refresher: Refresher, root: &Path) -> Self {
        Self {
            refresher,
            root: root.to_owned(),
            refreshes: RefreshQueue::default(),
            containers: Mutex::default(),
        }
    }

    fn refresh(&self, planned: &Planned) -> TurnEnd {
        let id = &planned.id;
        let opted_in = self.containers().get(id).cloned();
        let Some(opted_in) = opted_in else {
            return TurnEnd::Done;
        };
        let (container, bundle) = (&opted_in.container, opted_in.bundle.as_path());
        let (request, refresher) = (&opted_in.request, &self.refresher);
        let running = ContainersOfNode(self.root.clone());
        let mut refresh = ContainerRefresh::of(container, &request.notify, Some(bundle));
        refresh.warnings.clone_from(&request.problems);
        refresh.add_files(opted_in.binds.clone(), &running);
        let mut roots = None;
        if request.binds.host_root {
            roots = refresh.noted(refresher.host_roots(bundle));
            roots = roots.filter(|roots| !roots.is_empty());
        }
        if request.binds.volumes {
            let places = refresher.node.config.places();
            let mounts = BoundMounts::of_engine(bundle, &running, places, roots.as_ref());
            refresh.add_read(mounts);
        }
        if let Some(roots) = roots {
            refresh.add(roots);
        }
        let is_out_of_time = refresher.refresh(planned.turn, LATER_TURN, &mut refresh);
        refresher.ended(id, refresh.warnings, is_out_of_time)
    }

    fn containers(&self) -> MutexGuard<'_, HashMap<String, Arc<FollowedContainer>>> {
        self.containers
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// The container with its binds; `None` if the container has no request.
    fn opted_in(
        &self,
        container: &EngineContainer,
        labels: &HashMap<Engine, HashMap<String, Labelled>>,
        warnings: &mut Vec<String>,
    ) -> Option<FollowedContainer> {
        let (engine, id) = (container.engine.name(), &container.id);
        let bytes = read_spec(&container.bundle);
        // A container that ended meanwhile has no bundle.
        if bytes.is_err() && container.bundle.symlink_metadata().is_err() {
            return None;
        }
        let mut unreadable = |why: String| warnings.push(format!("{engine} container {id}: {why}"));
        let bytes = bytes.map_err(|error| unreadable(error_chain(&error)));
        let bytes = bytes.ok()?;
        let spec = SpecView::from_bytes(&bytes);
        let spec = spec.map_err(|error| unreadable(error_chain(&error))).ok()?;
        let label = labels.get(&container.engine);
        let label = label.and_then(|labels| labels.get(id));
        let annotated = RefreshRequest::from_labels(|name| spec.annotation(name));
        let mut request = match label {
            Some(label) if annotated.is_none() && annotated.problems.is_empty() => {
                label.request.clone()
            }
            _ => annotated,
        };
        let mode = self.refresher.node.config.agent().refresh;
        let is_in = mode == RefreshMode::All || request.containers == OptIn::All;
        if !is_in && !request.binds.any() && request.problems.is_empty() {
            return None;
        }
        let name = label.and_then(|label| label.name.as_deref());
        // As the engines print it.
        let name = name.unwrap_or_else(|| id.get(..12).unwrap_or(id));
        let name = format!("{engine} container {name}");
        for problem in &mut request.problems {
            *problem = format!("{name}: {problem}");
        }
        let mut binds = Vec::new();
        if is_in {
            binds = FileBind::of_spec(&spec);
            // Directories need no watch: a container sees new files in a bound directory.
            binds.retain(|bind| !bind.is_of_directory());
        }
        let mut sources = HashSet::new();
        for bind in spec.binds() {
            sources.insert(bind.source().to_owned());
        }
        Some(FollowedContainer {
            container: Container {
                identity: Identity::without_pod(&name),
                id: id.clone(),
                name,
                pid: container.pid,
                spec: SpecUsers::from_spec(&bytes).ok().map(Arc::new),
            },
            bundle: container.bundle.clone(),
            binds,
            sources,
            request,
        })
    }
}

/// The thread that follows the containers.
#[derive(Debug)]
struct FollowedEngines<'a> {
    engines: &'a EngineContainers,
    watches: Watches<String>,
    /// The last answers of the engines. While an engine does not answer, its containers keep their
    /// requests.
    labels: HashMap<Engine, HashMap<String, Labelled>>,
}

impl<'a> FollowedEngines<'a> {
    fn new(engines: &'a EngineContainers) -> io::Result<Self> {
        Ok(Self {
            engines,
            watches: Watches::new()?,
            labels: HashMap::new(),
        })
    }
}

impl Source for FollowedEngines<'_> {
    type Id = String;

    fn watches(&mut self) -> &mut Watches<String> {
        &mut self.watches
    }

    fn survey(&mut self, schedule: &mut Schedule<String>) -> bool {
        let folders = state_folders(&self.engines.root);
        // Watched first: a container that starts meanwhile is found, or reported by an event.
        let states = folders.iter().map(|(_, folder)| folder.clone());
        let mut warnings = self.watches.watch_states(states);
        let running = engine_containers(&folders);
        for engine in [Engine::Docker, Engine::Podman] {
            if !running.iter().any(|container| container.engine == engine) {
                self.labels.remove(&engine);
                continue;
            }
            match labelled(&self.engines.root, engine) {
                Ok(labelled) => drop(self.labels.insert(engine, labelled)),
                Err(error) => {
                    let name = engine.name();
                    warnings.push(format!("labels of {name} are not known: {error:#}"));
                }
            }
        }
        let mut containers = HashMap::new();
        let mut are_watched = true;
        for container in &running {
            let opted_in = self
                .engines
                .opted_in(container, &self.labels, &mut warnings);
            let Some(mut opted_in) = opted_in else {
                continue;
            };
            let name = &opted_in.container.name;
            for why in self.watches.watch_files(&container.id, &opted_in.binds) {
                opted_in.request.problems.push(format!("{name}: {why}"));
                are_watched = false;
            }
            schedule.plan_refresh(&container.id, Instant::now());
            containers.insert(container.id.clone(), Arc::new(opted_in));
        }
        *self.engines.containers() = containers;
        let is_complete = warnings.is_empty() && are_watched;
        self.engines.refresher.warn(OF_NODE, warnings);
        is_complete
    }

    /// A mount may cover the folder of a bound file.
    fn follows_mounts(&self) -> bool {
        let containers = self.engines.containers();
        let mut containers = containers.values();
        containers.any(|container| container.request.binds.volumes || !container.binds.is_empty())
    }

    fn take_mounts(&mut self, places: &[PathBuf], schedule: &mut Schedule<String>) {
        let now = Instant::now();
        for (id, container) in self.engines.containers().iter() {
            let is_at = |place: &PathBuf| {
                let mut binds = container.binds.iter();
                container.request.binds.volumes && container.sources.contains(place)
                    || binds.any(|bind| lies_in(&bind.directory, place))
            };
            if places.iter().any(is_at) {
                schedule.plan_with_rechecks(id, now);
                // A watch of a covered folder reports nothing of the mount.
                schedule.plan_surveys(now);
            }
        }
    }

    fn refresh(&mut self, due: Vec<String>, _: &mut Schedule<String>) {
        for id in due {
            self.engines.refreshes.plan(id);
        }
    }
}

/// A running container with the label, as `GET /containers/json` lists it.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ListedContainer {
    id: String,
    #[serde(default)]
    names: Vec<String>,
    #[serde(default)]
    labels: OwnLabels,
}

/// The labels that bindguard reads. An image can have a hundred thousand others.
#[derive(Debug, Default, Deserialize)]
struct OwnLabels {
    #[serde(rename = "bindguard.refresh")]
    refresh: Option<String>,
    #[serde(rename = "bindguard.refresh-binds")]
    binds: Option<String>,
    #[serde(rename = "bindguard.refresh-notify")]
    notify: Option<String>,
}

#[derive(Debug)]
struct Labelled {
    name: Option<String>,
    request: RefreshRequest,
}

/// The containers with the label, by id. None if the engine has no socket: Podman has one only if
/// it was enabled.
fn labelled(root: &Path, engine: Engine) -> Result<HashMap<String, Labelled>> {
    let socket = root.join(match engine {
        Engine::Docker => "run/docker.sock",
        Engine::Podman => "run/podman/podman.sock",
    });
    let mut labelled = HashMap::new();
    if socket.symlink_metadata().is_err() {
        return Ok(labelled);
    }
    // A filter with two labels lists only containers that have each of them.
    for label in [REFRESH_LABEL, REFRESH_BINDS_LABEL] {
        // `filters={"label":["LABEL"]}` in the form of a URL
        let path = format!("/containers/json?filters=%7B%22label%22%3A%5B%22{label}%22%5D%7D");
        let text = unix_http::get(&socket, &path)?;
        let answer: Vec<ListedContainer> = serde_json::from_str(&text)
            .with_context(|| format!("parse the answer of {}", socket.display()))?;
        for ListedContainer { id, names, labels } in answer {
            let name = names.first();
            let name = name.map(|name| name.trim_start_matches('/').to_owned());
            let request = RefreshRequest::from_labels(|label| match label {
                REFRESH_LABEL => labels.refresh.as_deref(),
                REFRESH_BINDS_LABEL => labels.binds.as_deref(),
                NOTIFY_LABEL => labels.notify.as_deref(),
                _ => None,
            });
            labelled.insert(id, Labelled { name, request });
        }
    }
    Ok(labelled)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::fs;

    use bindguard_testing::live::{self, Inside};
    use bindguard_testing::{Cgroup, helper, mount_of, own_namespace};

    use super::*;
    use crate::work::queue::Turn;

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
        let node = tempfile::tempdir().unwrap();
        let refresher = Refresher::new(helper(), Node::silent("refresh.mode = 'all'"));
        let engines = EngineContainers::new(refresher, node.path());
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
            sources: HashSet::new(),
            request: RefreshRequest::from_labels(|_| None),
        };
        engines.containers().insert(id.clone(), Arc::new(opted_in));
        // A mount may cover the folder of the file.
        let mut followed = FollowedEngines::new(&engines).unwrap();
        let rules = Rules::of_files(Duration::from_secs(300), &AFTER_START);
        let mut schedule = Schedule::new(rules, Instant::now());
        followed.take_mounts(&[host.path().to_owned()], &mut schedule);
        assert!(followed.follows_mounts());
        assert_eq!(schedule.due(Instant::now()), [id.as_str()]);
        fs::write(host.path().join("new"), "1").unwrap();
        fs::rename(host.path().join("new"), &file).unwrap();
        // Another refresh, or the container itself, has the lock meanwhile.
        let namespace = running.namespace();
        let lock = namespace.try_lock().unwrap().unwrap();
        let planned = |turn| Planned {
            id: id.clone(),
            at: Instant::now(),
            turn,
            not_before: None,
        };
        for turn in [Turn::First, Turn::Last] {
            let ended = engines.refresh(&planned(turn));
            assert_eq!(ended, TurnEnd::OutOfTime, "{turn:?} was in time");
        }
        assert_eq!(running.read("app.conf").as_deref(), Some("0"));
        drop(lock);
        let start = Instant::now();
        while running.read("app.conf").as_deref() != Some("1") {
            assert!(start.elapsed() < Duration::from_secs(60), "it stays old");
            engines.refresh(&planned(Turn::Retry));
            thread::sleep(Duration::from_millis(10));
        }
    }
}
