//! The running containers of this node, by the records of their runtimes in folders of root: the
//! bundle with the spec that each was started with, and the init process.
//!
//! | engine | folder | bundle | init process |
//! |---|---|---|---|
//! | containerd's CRI, Docker | containerd's tasks in the namespace `k8s.io`, `moby` | the folder | its `init.pid` |
//! | CRI-O, Podman | state of crun or runc | `bundle` in the state | in the state |
//!
//! The records are right while no engine runs: Podman has no daemon, and containers outlive dockerd
//! (docs/decisions/0028).

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use bindguard_core::identity::{MANAGER, START_TIME, container_of, stat_number};
use bindguard_core::places::Places;
use bindguard_core::refresh::SpecBind;
use bindguard_core::spec::SpecView;
use bindguard_guard::refresh::FileBind;
use bindguard_guard::{Probes, bundle_and_pid, kubelet_roots_by_all_names};
use bindguard_sys::enter::{HeldProcess, ProcessError};
use bindguard_sys::files::read_spec;
use bindguard_sys::observe::children;
use bindguard_sys::process_files::{ProcessFile, contents};

use crate::node::pids;

/// The state folders of crun and runc that Podman or CRI-O calls as root.
const STATES: [&str; 2] = ["run/crun", "run/runc"];

/// containerd's task folders, with a folder for each namespace: `moby` of dockerd, `k8s.io` of the
/// kubelet.
const TASKS: [&str; 6] = [
    "run/containerd/io.containerd.runtime.v2.task",
    "run/docker/containerd/daemon/io.containerd.runtime.v2.task",
    "run/snap.docker/containerd/daemon/io.containerd.runtime.v2.task",
    "run/k3s/containerd/io.containerd.runtime.v2.task",
    "run/k0s/containerd/io.containerd.runtime.v2.task",
    "var/snap/microk8s/common/run/containerd/io.containerd.runtime.v2.task",
];

/// The task folders of dockerd: with the node's containerd, with a containerd of its own, as a snap.
const DOCKERS: usize = 3;

/// The record of a container.
#[derive(Debug)]
pub(crate) struct Record {
    pub id: String,
    pub bundle: PathBuf,
    /// `None` if the container is not started yet.
    pub init: Option<u32>,
}

impl Record {
    /// The record in a folder of containerd's tasks.
    fn of_task(task: PathBuf) -> Option<Self> {
        let pid = fs::read_to_string(task.join("init.pid")).ok();
        Some(Self {
            id: task.file_name()?.to_str()?.to_owned(),
            init: pid.and_then(|pid| pid.trim().parse().ok()),
            bundle: task,
        })
    }

    /// The record in a state folder of crun or runc.
    fn of_state(state: &Path) -> Option<Self> {
        let (bundle, init) = bundle_and_pid(state)?;
        Some(Self {
            id: state.file_name()?.to_str()?.to_owned(),
            bundle,
            init: Some(init),
        })
    }

    /// All records on a node whose `/` is at `root`.
    pub fn all(root: &Path) -> Vec<Self> {
        let states = STATES.iter().flat_map(|folder| entries(&root.join(folder)));
        let mut found: Vec<Self> = states.filter_map(|it| Self::of_state(&it)).collect();
        found.extend(tasks(root).filter_map(Self::of_task));
        found
    }

    /// The possible records of a container: containerd's, then the first of crun or runc. No id is a
    /// path. containerd's folders may not exist.
    fn of_container(root: &Path, id: &str) -> Vec<Self> {
        let mut found = Vec::new();
        if !id.contains('/') && !["", ".", ".."].contains(&id) {
            for namespace in namespaces(root) {
                found.extend(Self::of_task(namespace.join(id)));
            }
            let mut states = STATES.iter().map(|folder| root.join(folder).join(id));
            found.extend(states.find_map(|state| Self::of_state(&state)));
        }
        found
    }
}

/// The folders in which a running container of a pod has a folder, on a node whose `/` is at `root`.
/// Not all of them exist.
pub fn pod_state_folders(root: &Path) -> Vec<PathBuf> {
    let tasks = TASKS.map(|folder| root.join(folder).join("k8s.io"));
    let states = STATES.map(|folder| root.join(folder));
    tasks.into_iter().chain(states).collect()
}

/// The bundles in containerd's task folders, on a node whose `/` is at `root`.
pub fn tasks(root: &Path) -> impl Iterator<Item = PathBuf> {
    namespaces(root).flat_map(|namespace| entries(&namespace))
}

fn namespaces(root: &Path) -> impl Iterator<Item = PathBuf> {
    TASKS.iter().flat_map(|folder| entries(&root.join(folder)))
}

/// The paths in a folder; an unreadable folder counts as empty.
fn entries(folder: &Path) -> Vec<PathBuf> {
    children(folder).unwrap_or_default()
}

/// The spec of a container, on a node whose `/` is at `root`. `None` if no bundle is found.
pub fn spec_of_container(root: &Path, id: &str) -> Option<Vec<u8>> {
    let mut records = Record::of_container(root, id).into_iter();
    records.find_map(|record| read_spec(&record.bundle).ok())
}

/// The bundle of a container, on a node whose `/` is at `root`.
pub fn bundle_of_container(root: &Path, id: &str) -> Option<PathBuf> {
    let records = Record::of_container(root, id).into_iter();
    let mut bundles = records.map(|record| record.bundle);
    bundles.find(|bundle| bundle.join("config.json").symlink_metadata().is_ok())
}

/// The binds in the spec of a container, on a node whose `/` is at `root`. Empty if no bundle is
/// found.
pub fn binds_of_container(root: &Path, id: &str) -> Vec<SpecBind> {
    let bytes = spec_of_container(root, id).unwrap_or_default();
    let spec = SpecView::from_bytes(&bytes);
    spec.map(|spec| SpecBind::of_spec(&spec))
        .unwrap_or_default()
}

/// The binds of a pod's container that may be single files of the host. `None` if no bundle is
/// found.
pub fn host_files_of_container(root: &Path, id: &str, places: &Places) -> Option<Vec<FileBind>> {
    let bytes = spec_of_container(root, id)?;
    let spec = SpecView::from_bytes(&bytes).ok()?;
    let roots = kubelet_roots_by_all_names(places, &Probes::for_create());
    Some(FileBind::of_pod(&spec, &roots))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Engine {
    Docker,
    /// Podman, as root.
    Podman,
}

/// A container of an engine, which may end at any time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineContainer {
    pub id: String,
    pub engine: Engine,
    /// The bundle with its spec.
    pub bundle: PathBuf,
    pub pid: u32,
}

impl Engine {
    pub fn name(self) -> &'static str {
        match self {
            Self::Docker => "Docker",
            Self::Podman => "Podman",
        }
    }
}

/// The folders in which running containers have a folder, on a node whose `/` is at `root`. Not all
/// of them exist.
pub fn state_folders(root: &Path) -> Vec<(Engine, PathBuf)> {
    let docker = TASKS[..DOCKERS].iter();
    let docker = docker.map(|folder| (Engine::Docker, root.join(folder).join("moby")));
    let podman = STATES.map(|folder| (Engine::Podman, root.join(folder)));
    docker.chain(podman).collect()
}

/// The running containers whose state is in these folders.
pub fn engine_containers(folders: &[(Engine, PathBuf)]) -> Vec<EngineContainer> {
    let mut found = Vec::new();
    for (engine, folder) in folders {
        for state in entries(folder) {
            found.extend(container(*engine, &state));
        }
    }
    found
}

/// The container with this state folder. `None` if it is not started yet, ended meanwhile, or is no
/// container of the engine.
pub fn container(engine: Engine, state: &Path) -> Option<EngineContainer> {
    let record = match engine {
        Engine::Docker => Record::of_task(state.to_owned())?,
        Engine::Podman => {
            let record = Record::of_state(state)?;
            // CRI-O has its state in the same folders; its containers belong to pods.
            let spec = read_spec(&record.bundle).ok()?;
            let spec = SpecView::from_bytes(&spec).ok()?;
            if spec.annotation(MANAGER) != Some("libpod") {
                return None;
            }
            record
        }
    };
    Some(EngineContainer {
        id: record.id,
        engine,
        bundle: record.bundle,
        pid: record.init?,
    })
}

/// The user whose rootless container this is. The host paths of such a container belong to a mount
/// namespace of the user.
pub fn rootless_owner(root: &Path, id: &str) -> Option<String> {
    for user in entries(&root.join("run/user")) {
        for states in STATES {
            let state = user.join(states.trim_start_matches("run/")).join(id);
            if state.metadata().is_ok() {
                return Some(user.file_name()?.to_string_lossy().into_owned());
            }
        }
    }
    None
}

/// Why a process is not taken for a container's init.
#[derive(Debug, thiserror::Error)]
pub enum NotInit {
    /// It ended, or cannot be read.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// It is in no cgroup of the container.
    #[error("process {pid} is in no cgroup of container {container}")]
    Cgroup { pid: u32, container: String },
    /// The runtime has recorded another process.
    #[error(
        "process {pid} is not the init of container {container}: its runtime recorded process {recorded}"
    )]
    Record {
        pid: u32,
        container: String,
        /// The pid in the record.
        recorded: u32,
    },
}

/// Opens the init of a container, on a node whose `/` is at `root`. `pid` is from the CRI or from the runtime's record, and may
/// belong to another process by now.
///
/// # Errors
/// If the process ended, or is not the container's init.
pub fn hold_init(root: &Path, container: &str, pid: u32) -> Result<HeldProcess, NotInit> {
    // Two things must agree. The cgroup alone proves nothing: a user of the node with a delegated
    // cgroup can name a cgroup after any container. The pid alone proves nothing either: the kernel
    // may have given the pid to another process.
    let process = HeldProcess::open(pid)?;
    let cgroup = process.read("cgroup")?;
    let cgroup = String::from_utf8_lossy(&cgroup);
    if container_of(&cgroup, &BTreeSet::from([container])).is_none() {
        let container = container.to_owned();
        return Err(NotInit::Cgroup { pid, container });
    }
    match recorded_init_of(root, container) {
        Some(recorded) if recorded != pid => Err(NotInit::Record {
            pid,
            container: container.to_owned(),
            recorded,
        }),
        Some(_) | None => Ok(process.of_container(container)),
    }
}

/// Opens the init of a container for a survey, which takes a while: containers end meanwhile.
/// `None` if the container ended.
///
/// # Errors
/// If the process cannot be read, for example because it blocks its readers.
pub(crate) fn hold_running(container: &str, pid: u32) -> Result<Option<HeldProcess>, ProcessError> {
    match hold_init(Path::new("/"), container, pid) {
        Ok(process) => Ok(Some(process)),
        Err(NotInit::Process(error)) => unless_ended(Err(error)),
        // The kernel gave the pid to another process after the container had ended.
        Err(NotInit::Cgroup { .. } | NotInit::Record { .. }) => Ok(None),
    }
}

/// Reads a running container by its init. `None` if the container ended.
///
/// # Errors
/// If the process cannot be read.
pub(crate) fn read_running<T>(
    container: &str,
    pid: u32,
    read: impl FnOnce(&HeldProcess) -> Result<T, ProcessError>,
) -> Result<Option<T>, ProcessError> {
    match hold_running(container, pid)? {
        Some(process) => unless_ended(read(&process)),
        None => Ok(None),
    }
}

/// The result of reading a container. `None` if the container ended.
pub(crate) fn unless_ended<T>(read: Result<T, ProcessError>) -> Result<Option<T>, ProcessError> {
    match read {
        Err(ProcessError::Ended(_)) => Ok(None),
        read => read.map(Some),
    }
}

/// The pids of the inits of these containers, for callers that only read: the oldest process counts
/// for a container without a record. It takes at most a single pass over the processes.
pub fn inits_of<'c>(
    root: &Path,
    containers: impl IntoIterator<Item = &'c str>,
) -> BTreeMap<&'c str, u32> {
    let (mut inits, mut unrecorded) = (BTreeMap::new(), BTreeSet::new());
    for container in containers {
        match recorded_init_of(root, container) {
            Some(pid) if hold_init(root, container, pid).is_ok() => {
                inits.insert(container, pid);
            }
            // The container ended, and its record is still there.
            Some(_) => {}
            None if container.is_empty() => {}
            None => drop(unrecorded.insert(container)),
        }
    }
    if unrecorded.is_empty() {
        return inits;
    }
    // the first started process in the container's cgroups
    let (mut found, mut files) = (Vec::new(), Vec::new());
    for pid in pids() {
        let cgroup = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        if let Some(container) = container_of(&cgroup, &unrecorded) {
            found.push((pid, container));
            files.push(ProcessFile::of(pid, "stat"));
        }
    }
    let mut oldest = BTreeMap::<&str, (u64, u32)>::new();
    for ((pid, container), stat) in found.into_iter().zip(contents(&files)) {
        let stat = stat.unwrap_or_default();
        if let Some(started) = stat_number(&String::from_utf8_lossy(&stat), START_TIME) {
            let first = oldest.entry(container).or_insert((started, pid));
            *first = (*first).min((started, pid));
        }
    }
    inits.extend(oldest.into_iter().map(|(id, (_, pid))| (id, pid)));
    inits
}

/// The pid of a container's init in its runtime's record, on a node whose `/` is at `root`. Only root
/// writes the records. For callers that enter the container, which must not guess a pid.
pub fn recorded_init_of(root: &Path, container: &str) -> Option<u32> {
    let mut records = Record::of_container(root, container).into_iter();
    records.find_map(|it| it.init).filter(|pid| *pid > 0)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::process::{Child, Command};

    use super::*;

    #[test]
    fn a_process_has_a_time_and_no_container_has_none() {
        assert!(stat_number(&fs::read_to_string("/proc/self/stat").unwrap(), START_TIME).is_some());
        assert_eq!(recorded_init_of(Path::new("/"), ""), None);
        assert!(inits_of(Path::new("/"), ["", "no-such-container"]).is_empty());
    }

    #[test]
    fn a_container_that_ended_is_no_problem() {
        // A process of the node, as if the kernel had given the init's pid to it.
        for pid in [std::process::id(), u32::MAX] {
            let held = hold_running("no-such-container", pid);
            assert!(matches!(held, Ok(None)), "{held:?}");
        }
        let ended = unless_ended(Err::<(), _>(ProcessError::Ended(7)));
        assert!(matches!(ended, Ok(None)), "{ended:?}");
        let name = "mountinfo";
        let blocked = unless_ended(Err::<(), _>(ProcessError::Blocked { pid: 7, name }));
        let problem = blocked.unwrap_err().to_string();
        assert!(problem.contains("read mountinfo of process 7"), "{problem}");
    }

    #[test]
    fn a_record_is_found_by_a_plain_name_alone() {
        let root = tempfile::tempdir().unwrap();
        let task = root.path().join(TASKS[0]).join("k8s.io/c1");
        fs::create_dir_all(&task).unwrap();
        fs::write(task.join("init.pid"), "17\n").unwrap();
        let state = root.path().join("run/crun/c2");
        fs::create_dir_all(&state).unwrap();
        fs::write(state.join("status"), r#"{"pid":18,"bundle":"/b"}"#).unwrap();
        let of = |container: &str| recorded_init_of(root.path(), container);
        assert_eq!((of("c1"), of("c2"), of("c3")), (Some(17), Some(18), None));
        assert_eq!((of("../k8s.io/c1"), of(".."), of("")), (None, None, None));
    }

    /// A process in a cgroup of its own.
    struct InCgroup {
        process: Child,
        cgroup: PathBuf,
    }

    impl InCgroup {
        /// `None` without the right to make cgroups.
        fn start(path: &str) -> Option<Self> {
            let hierarchies =
                ["unified", "pids", ""].map(|name| Path::new("/sys/fs/cgroup").join(name));
            let has_processes =
                |folder: &&PathBuf| folder.join("cgroup.procs").symlink_metadata().is_ok();
            let cgroup = hierarchies.iter().find(has_processes)?.join(path);
            if fs::create_dir_all(&cgroup).is_err() {
                eprintln!("SKIPPED: no right to make a cgroup");
                return None;
            }
            let process = Command::new("sleep").arg("1000").spawn().unwrap();
            fs::write(cgroup.join("cgroup.procs"), process.id().to_string()).unwrap();
            Some(Self { process, cgroup })
        }
    }

    impl Drop for InCgroup {
        fn drop(&mut self) {
            self.process.kill().unwrap();
            self.process.wait().unwrap();
            for cgroup in self.cgroup.ancestors().take(2) {
                let _ = fs::remove_dir(cgroup);
            }
        }
    }

    /// A user of the node has a delegated cgroup, and names a cgroup in it after a container. The
    /// process is older than the container.
    #[test]
    fn a_process_in_a_cgroup_with_the_containers_name_is_not_its_init() {
        let id = format!("c{}", std::process::id());
        let Some(user) = InCgroup::start(&format!("bindguard-{id}-user/{id}")) else {
            return;
        };
        let Some(init) = InCgroup::start(&format!("bindguard-{id}-pods/{id}")) else {
            return;
        };
        let root = tempfile::tempdir().unwrap();
        let task = root.path().join(TASKS[0]).join("k8s.io").join(&id);
        fs::create_dir_all(&task).unwrap();
        fs::write(task.join("init.pid"), init.process.id().to_string()).unwrap();

        assert_eq!(
            inits_of(root.path(), [id.as_str()]),
            BTreeMap::from([(id.as_str(), init.process.id())])
        );
        assert!(hold_init(root.path(), &id, init.process.id()).is_ok());
        let refused = hold_init(root.path(), &id, user.process.id()).unwrap_err();
        assert!(matches!(refused, NotInit::Record { .. }), "{refused}");
        let own = hold_init(root.path(), &id, std::process::id()).unwrap_err();
        assert!(matches!(own, NotInit::Cgroup { .. }), "{own}");
    }

    /// The id is a whole part of the path: a substring is another container's.
    #[test]
    fn a_cgroup_whose_name_only_contains_the_id_is_another_containers() {
        let id = format!("c{}", std::process::id());
        let Some(other) = InCgroup::start(&format!("bindguard-{id}-other/x{id}x")) else {
            return;
        };
        let root = tempfile::tempdir().unwrap();
        let refused = hold_init(root.path(), &id, other.process.id()).unwrap_err();
        assert!(matches!(refused, NotInit::Cgroup { .. }), "{refused}");
    }

    fn write(path: PathBuf, text: &str) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// The files as dockerd 20.10 with containerd 1.6, Podman 4.3 with crun 1.8 and runc 1.1, and
    /// CRI-O leave them.
    #[test]
    fn containers_are_found_by_the_state_of_their_runtimes() {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().join(path);
        write(
            at("run/containerd/io.containerd.runtime.v2.task/moby/d1/init.pid"),
            "11",
        );
        write(
            at("run/containerd/io.containerd.runtime.v2.task/moby/created/config.json"),
            "{}",
        );
        write(
            at("run/containerd/io.containerd.runtime.v2.task/k8s.io/k1/init.pid"),
            "12",
        );
        for (id, manager) in [("p1", "libpod"), ("p2", "libpod"), ("c1", "cri-o")] {
            write(
                at(&format!("b/{id}/config.json")),
                &format!(r#"{{"annotations":{{"{MANAGER}":"{manager}"}}}}"#),
            );
        }
        let bundle = |id: &str| at(&format!("b/{id}")).display().to_string();
        let crun = |id: &str, pid: u32| {
            format!(
                r#"{{"pid":{pid},"process-start-time":1,"bundle":"{}"}}"#,
                bundle(id)
            )
        };
        write(at("run/crun/p1/status"), &crun("p1", 13));
        write(at("run/crun/c1/status"), &crun("c1", 14));
        let runc = format!(
            r#"{{"init_process_pid":15,"config":{{"labels":["a=b","bundle={}"]}}}}"#,
            bundle("p2")
        );
        write(at("run/runc/p2/state.json"), &runc);
        write(at("run/user/1000/crun/r1/status"), "{}");
        let mut found = engine_containers(&state_folders(root.path()));
        found.sort_by_key(|container| container.pid);
        let found: Vec<_> = found
            .iter()
            .map(|it| (it.engine, it.id.as_str(), it.pid))
            .collect();
        assert_eq!(
            found,
            [
                (Engine::Docker, "d1", 11),
                (Engine::Podman, "p1", 13),
                (Engine::Podman, "p2", 15)
            ]
        );
        write(
            at("b/c1/config.json"),
            r#"{"mounts":[{"type":"bind","source":"/s","destination":"/d"}]}"#,
        );
        let bind = SpecBind {
            destination: "/d".into(),
            source: "/s".into(),
        };
        assert_eq!(binds_of_container(root.path(), "c1"), [bind]);
        assert_eq!(binds_of_container(root.path(), "created"), []);
        assert_eq!(binds_of_container(root.path(), "gone"), []);
        assert_eq!(rootless_owner(root.path(), "r1").as_deref(), Some("1000"));
        assert_eq!(rootless_owner(root.path(), "p1"), None);
    }

    /// Also those of pods: any container may be able to write a folder of the host.
    #[test]
    fn the_state_of_each_runtime_names_a_container_and_its_spec() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| write(root.path().join(path), text);
        let tasks = "run/containerd/io.containerd.runtime.v2.task";
        write(&format!("{tasks}/k8s.io/k1/init.pid"), "12");
        write(&format!("{tasks}/moby/created/config.json"), "{}");
        write(
            "run/crun/p1/status",
            r#"{"pid":13,"process-start-time":1,"bundle":"/b/p1"}"#,
        );
        write("run/runc/unreadable/state.json/folder", "");
        let found = Record::all(root.path());
        let task = |id: &str| root.path().join(tasks).join(id);
        let mut found: Vec<_> = found
            .iter()
            .map(|it| (&*it.id, &it.bundle, it.init))
            .collect();
        found.sort();
        let bundles = ["moby/created", "k8s.io/k1"].map(task);
        let expected = [
            ("created", &bundles[0], None),
            ("k1", &bundles[1], Some(12)),
            ("p1", &PathBuf::from("/b/p1"), Some(13)),
        ];
        assert_eq!(found, expected);
    }
}
