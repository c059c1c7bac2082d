//! The init process of a container, by the container's id: the check that all programs share.
//!
//! Two things must agree: the process is in a cgroup with the container's id, and the runtime has
//! recorded its pid. The cgroup alone proves nothing: a user of the node with a delegated cgroup
//! can name a cgroup after any container. The pid alone proves nothing either: the kernel may have
//! given the pid to another process. Only where no record is found, and only for readers, the
//! oldest process counts.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use bindguard_core::cgroup::container_of;
use bindguard_core::process_stat::{START_TIME, number};
use bindguard_guard::bundle_and_pid;
use bindguard_sys::enter::{HeldProcess, ProcessError};
use bindguard_sys::process_files::{ProcessFile, contents};

use crate::bundles::{STATES, init_of_task, namespaces};
use crate::node::pids;

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

/// Opens the init of a container. `pid` is from the CRI or from the runtime's record, and may
/// belong to another process by now.
///
/// # Errors
/// If the process ended, or is not the container's init.
pub fn hold_init(container: &str, pid: u32) -> Result<HeldProcess, NotInit> {
    hold_init_at(Path::new("/"), container, pid)
}

fn hold_init_at(root: &Path, container: &str, pid: u32) -> Result<HeldProcess, NotInit> {
    let process = HeldProcess::open(pid)?;
    let cgroup = process.read("cgroup")?;
    let cgroup = String::from_utf8_lossy(&cgroup);
    if container_of(&cgroup, &BTreeSet::from([container])).is_none() {
        let container = container.to_owned();
        return Err(NotInit::Cgroup { pid, container });
    }
    match recorded_pid(root, container) {
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
    match hold_init(container, pid) {
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

/// The pid of a container's init in its runtime's record. `None` without a record. For callers that
/// enter the container, which must not guess a pid.
pub fn recorded_init_of(container: &str) -> Option<u32> {
    recorded_pid(Path::new("/"), container)
}

/// The pids of the inits of these containers, for callers that only read: the oldest process counts
/// for a container without a record. It takes at most a single pass over the processes.
pub fn inits_of<'c>(containers: impl IntoIterator<Item = &'c str>) -> BTreeMap<&'c str, u32> {
    inits_at(Path::new("/"), containers)
}

fn inits_at<'c>(
    root: &Path,
    containers: impl IntoIterator<Item = &'c str>,
) -> BTreeMap<&'c str, u32> {
    let (mut inits, mut unrecorded) = (BTreeMap::new(), BTreeSet::new());
    for container in containers {
        match recorded_pid(root, container) {
            Some(pid) if hold_init_at(root, container, pid).is_ok() => {
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
        if let Some(started) = number(&String::from_utf8_lossy(&stat), START_TIME) {
            let first = oldest.entry(container).or_insert((started, pid));
            *first = (*first).min((started, pid));
        }
    }
    inits.extend(oldest.into_iter().map(|(id, (_, pid))| (id, pid)));
    inits
}

/// The pid that the container's runtime has recorded, on a node whose `/` is at `root`. Only root
/// writes into these folders.
fn recorded_pid(root: &Path, container: &str) -> Option<u32> {
    if container.contains('/') || ["", ".", ".."].contains(&container) {
        return None;
    }
    let mut tasks = namespaces(root).map(|namespace| namespace.join(container));
    let of_task = tasks.find_map(|task| init_of_task(&task));
    let mut states = STATES.iter().map(|state| root.join(state).join(container));
    let recorded = of_task.or_else(|| Some(states.find_map(|state| bundle_and_pid(&state))?.1));
    recorded.filter(|pid| *pid > 0)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::path::PathBuf;
    use std::process::{Child, Command};

    use super::*;
    use crate::bundles::TASKS;

    #[test]
    fn a_process_has_a_time_and_no_container_has_none() {
        assert!(number(&fs::read_to_string("/proc/self/stat").unwrap(), START_TIME).is_some());
        assert_eq!(recorded_init_of(""), None);
        assert!(inits_of(["", "no-such-container"]).is_empty());
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
        let of = |container: &str| recorded_pid(root.path(), container);
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
            inits_at(root.path(), [id.as_str()]),
            BTreeMap::from([(id.as_str(), init.process.id())])
        );
        assert!(hold_init_at(root.path(), &id, init.process.id()).is_ok());
        let refused = hold_init_at(root.path(), &id, user.process.id()).unwrap_err();
        assert!(matches!(refused, NotInit::Record { .. }), "{refused}");
        let own = hold_init_at(root.path(), &id, std::process::id()).unwrap_err();
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
        let refused = hold_init_at(root.path(), &id, other.process.id()).unwrap_err();
        assert!(matches!(refused, NotInit::Cgroup { .. }), "{refused}");
    }
}
