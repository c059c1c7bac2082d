//! The inits of running containers, for surveys that read the containers' mount tables.
//!
//! A survey takes a while, and containers end meanwhile: these containers are skipped. A container
//! that cannot be read, for example because its mount table is too large, is kept with the reason.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use bindguard_core::report::RefreshedMount;
use bindguard_guard::refresh::{CurrentFiles, RefreshError, find_stale};
use bindguard_sys::enter::{HeldProcess, ProcessError};
use bindguard_sys::process_files::ProcessFile;

use crate::node::{NotInit, hold_init, inits_of};
use crate::pods::PodContainer;

/// The inits of running containers, and the containers that could not be read.
pub(crate) struct ContainerInits<'p> {
    inits: BTreeMap<&'p str, u32>,
    unread: Vec<UnreadContainer>,
}

/// A container whose init or mount table could not be read, for example because the table is too
/// large.
#[derive(Debug)]
pub struct UnreadContainer {
    /// The container, with its pod.
    pub container: PodContainer,
    /// The reason.
    pub why: ProcessError,
}

impl<'p> ContainerInits<'p> {
    /// Finds the inits of these containers.
    pub(crate) fn of(containers: impl IntoIterator<Item = &'p PodContainer>) -> Self {
        let ids = containers
            .into_iter()
            .map(|container| container.id.as_str());
        Self {
            inits: inits_of(ids),
            unread: Vec::new(),
        }
    }

    /// Opens the init of a container. `None` if the container ended, or is unread.
    pub(crate) fn hold(&mut self, container: &PodContainer) -> Option<HeldProcess> {
        let init = *self.inits.get(container.id.as_str())?;
        let process = match hold_init(&container.id, init) {
            Ok(process) => Ok(process),
            Err(NotInit::Process(error)) => Err(error),
            // The kernel gave the pid to another process after the container had ended.
            Err(NotInit::Cgroup { .. } | NotInit::Record { .. }) => Err(ProcessError::Ended(init)),
        };
        self.unless_ended(container, process)
    }

    /// The result of reading a container. `None` if the container ended, or is unread.
    pub(crate) fn unless_ended<T>(
        &mut self,
        container: &PodContainer,
        result: Result<T, ProcessError>,
    ) -> Option<T> {
        match result {
            Ok(read) => Some(read),
            Err(ProcessError::Ended(_)) => None,
            Err(why) => {
                let container = container.clone();
                self.unread.push(UnreadContainer { container, why });
                None
            }
        }
    }

    /// The containers that could not be read.
    pub(crate) fn into_unread(self) -> Vec<UnreadContainer> {
        self.unread
    }

    /// The containers that could not be read, for people.
    pub(crate) fn into_problems(self) -> impl Iterator<Item = String> {
        let unread = self.unread.into_iter();
        unread.map(|unread| unread.container.problem(&unread.why))
    }
}

/// The mounts of a container that do not show these files. Empty for a container that every refresh
/// refuses.
pub(crate) fn stale_mounts(
    process: &HeldProcess,
    files: &dyn CurrentFiles,
) -> Result<Vec<RefreshedMount>, ProcessError> {
    match find_stale(process, files) {
        Ok(seen) => Ok(seen.mounts.iter().map(RefreshedMount::from).collect()),
        Err(RefreshError::Process(error)) => Err(error),
        Err(
            RefreshError::MountsOfNode(_)
            | RefreshError::Sandbox(_)
            | RefreshError::Locked(_)
            | RefreshError::NoSpec
            | RefreshError::OldKernel(_)
            | RefreshError::Namespace(_),
        ) => Ok(Vec::new()),
    }
}

// The container and the pod of a process, by the names of its cgroups.
//
// ```text
// /kubepods/besteffort/pod<uid>/<id>                                                       cgroupfs driver
// /kubepods.slice/kubepods-besteffort-pod<uid with _>.slice/cri-containerd-<id>.scope      systemd driver
// /system.slice/docker-<id>.scope        /machine.slice/libpod-<id>.scope                  Docker, Podman
// /<namespace>/<id>                                                                        ctr
// ```

/// Possible ids of the process's container: names of its cgroups, innermost first.
pub fn container_ids(cgroup: &str) -> Vec<&str> {
    let paths = cgroup.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    let mut names: Vec<&str> = paths
        .flat_map(|path| path.rsplit('/').filter(|name| !name.is_empty()))
        .map(id)
        .collect();
    let mut seen = std::collections::BTreeSet::new();
    names.retain(|name| seen.insert(*name));
    names
}

/// Removes the prefix and suffix that the systemd driver adds to an id.
fn id(name: &str) -> &str {
    let name = name.strip_suffix(".scope").unwrap_or(name);
    match name.rsplit_once('-') {
        Some((_, last)) if looks_like_an_id(last) => last,
        _ => name,
    }
}

/// True for an id as containerd, CRI-O, Docker and Podman use it: 64 hexadecimal digits.
pub fn looks_like_an_id(name: &str) -> bool {
    name.len() == 64 && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// The uid of the process's pod.
pub fn pod_uid(cgroup: &str) -> Option<String> {
    let names = cgroup.lines().flat_map(|line| line.split('/'));
    names
        .filter_map(|name| {
            let name = name.strip_suffix(".slice").unwrap_or(name);
            let uid = name
                .strip_prefix("pod")
                .or_else(|| name.rsplit_once("-pod").map(|(_, uid)| uid))?;
            (uid.len() >= 32).then(|| uid.replace('_', "-"))
        })
        .next()
}

// The open files of all processes, some at a time: a process may have a million of them, and a
// container decides how many.

/// Limit of files that are in memory at a time.
const MAX_FILES: usize = 64 << 10;

/// Time limit for all files.
const FILES_TIMEOUT: Duration = Duration::from_secs(10);

/// Hands over all files, at most [`MAX_FILES`] at a time, with the time that is left to read them.
pub fn in_parts(
    mut files: impl Iterator<Item = ProcessFile>,
    mut read: impl FnMut(Vec<ProcessFile>, Duration),
) {
    let start = Instant::now();
    loop {
        let part: Vec<ProcessFile> = files.by_ref().take(MAX_FILES).collect();
        if part.is_empty() {
            return;
        }
        read(part, FILES_TIMEOUT.saturating_sub(start.elapsed()));
    }
}

#[cfg(test)]
mod tests {
    use bindguard_core::identity::PodName;

    use super::*;

    #[test]
    fn a_container_that_ended_is_no_problem() {
        let container = PodContainer {
            id: "no-such-container".to_owned(),
            name: Some("app".to_owned()),
            state: None,
            attempt: None,
            pod: PodName::of_uid("u-1"),
            guarded: None,
            shim_version: None,
        };
        let mut running = ContainerInits::of([&container]);
        assert!(running.hold(&container).is_none());
        // A process of the node, as if the kernel had given the init's pid to it.
        running.inits = BTreeMap::from([(container.id.as_str(), std::process::id())]);
        assert!(running.hold(&container).is_none());
        running.inits = BTreeMap::from([(container.id.as_str(), u32::MAX)]);
        assert!(running.hold(&container).is_none());
        let ended = Err::<(), _>(ProcessError::Ended(7));
        assert_eq!(running.unless_ended(&container, ended), None);
        assert!(running.unread.is_empty(), "{:?}", running.unread);
        let name = "mountinfo";
        let blocked = Err::<(), _>(ProcessError::Blocked { pid: 7, name });
        assert_eq!(running.unless_ended(&container, blocked), None);
        let problems: Vec<String> = running.into_problems().collect();
        assert!(
            problems[0].contains("read mountinfo of process 7"),
            "{problems:?}"
        );
    }
}

#[cfg(test)]
mod container_cgroup_tests {
    use super::*;

    const ID: &str = "2fdc5572f480c0eaa35b0b793e187da2930c2c41bef4b3d51483e5ff90038bea";

    #[test]
    fn ids_and_uids_are_found_under_both_drivers() {
        let cgroupfs =
            format!("4:memory:/kubepods/besteffort/podd3ddcaaf-0088-4d72-b57b-f31f05314446/{ID}\n");
        let systemd = format!(
            "0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-podd3ddcaaf_0088_4d72_b57b_f31f05314446.slice/cri-containerd-{ID}.scope\n"
        );
        for text in [cgroupfs, systemd] {
            assert_eq!(container_ids(&text)[0], ID);
            assert_eq!(
                pod_uid(&text).unwrap(),
                "d3ddcaaf-0088-4d72-b57b-f31f05314446"
            );
        }
        assert_eq!(
            container_ids("0::/default/web/init.scope\n"),
            ["init", "web", "default"]
        );
        assert_eq!(pod_uid("0::/system.slice/podman.service\n"), None);
    }
}

#[cfg(test)]
mod process_files_tests {
    use super::*;

    #[test]
    fn a_process_with_many_descriptors_is_read_in_parts() {
        let files = (0..=2 * MAX_FILES).map(|fd| ProcessFile::of(1, &format!("fd/{fd}")));
        let mut parts = Vec::new();
        in_parts(files, |part, left| {
            assert!(left <= FILES_TIMEOUT);
            parts.push(part.len());
        });
        assert_eq!(parts, [MAX_FILES, MAX_FILES, 1]);
    }
}
