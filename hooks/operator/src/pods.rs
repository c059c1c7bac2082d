//! Pods by the names that people use and by the uids in the kubelet's folders.
//!
//! The kubelet's folders contain only a pod's uid; an operator knows its name. Code that knows both
//! (a container runtime's CRI, the annotations of bundles) fills in [`PodName`]s. All other code
//! selects pods with [`PodSelector`].

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::fmt;
use std::path::PathBuf;

use bindguard_core::error_chain;
use bindguard_core::identity::PodName;
use bindguard_core::places::Places;
use bindguard_core::refresh_request::{OptIn, RefreshRequest};
use serde::Serialize;

/// The state of a container, with the names and the numbers of the CRI.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, prost::Enumeration)]
#[serde(rename_all = "kebab-case")]
#[repr(i32)]
pub enum ContainerState {
    /// Not started.
    Created = 0,
    Running = 1,
    /// Ended.
    Exited = 2,
    /// Not known to the runtime.
    Unknown = 3,
}

impl fmt::Display for ContainerState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Created => "created",
            Self::Running => "running",
            Self::Exited => "exited",
            Self::Unknown => "unknown",
        })
    }
}

/// A container of a pod, as its runtime reports it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct PodContainer {
    pub id: String,
    /// Its name in the pod; none for the pod's sandbox.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The container's state; none if no source reports a state.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<ContainerState>,
    /// The number of times the container was created again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attempt: Option<u32>,
    #[serde(skip)]
    pub pod: PodName,
    /// True if the guard runs before the container's create; `None` if no running process gives
    /// evidence.
    #[serde(skip)]
    pub guarded: Option<bool>,
    /// The version of the bindguard shim that was started for the container. `None` under a foreign
    /// shim, and for a container that joined its pod's shim.
    #[serde(skip)]
    pub shim_version: Option<String>,
}

/// Pods that run under the same version of bindguard's shim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PodsOfVersion {
    pub version: String,
    pub pods: Vec<PodName>,
}

impl PodsOfVersion {
    /// The version and the number of its pods; the names, if it is not the version of this program.
    pub fn summary(&self) -> String {
        let count = self.pods.len();
        if self.version == env!("CARGO_PKG_VERSION") {
            return format!("{count} under {}", self.version);
        }
        let name = |pod: &PodName| pod.display_name().unwrap_or_else(|| "?".to_owned());
        let names: Vec<String> = self.pods.iter().map(name).collect();
        format!("{count} under {}: {}", self.version, names.join(", "))
    }
}

/// All pods of a node whose names are known.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pods {
    /// Their sandboxes and containers.
    pub containers: Vec<PodContainer>,
    /// The requests for live refresh by the pod's uid, of every pod whose annotations are known.
    pub refresh_requests: BTreeMap<String, RefreshRequest>,
    /// The directories in which the running runtime mounts, as the runtime reports them.
    pub runtime_directories: Vec<PathBuf>,
}

impl PodContainer {
    /// Its name for people.
    pub(crate) fn display_name(&self) -> String {
        let pod = self.pod.display_name().unwrap_or_default();
        format!(
            "{pod} container {}",
            self.name.as_deref().unwrap_or(&self.id)
        )
    }

    /// A problem with the container, for people.
    pub(crate) fn problem(&self, error: &dyn Error) -> String {
        format!("{}: {}", self.display_name(), error_chain(error))
    }
}

impl Pods {
    /// The places with the directories of the running runtime.
    pub fn with_runtime(&self, places: &Places) -> Places {
        places.with_directories(self.runtime_directories.iter().map(PathBuf::as_path))
    }

    /// The containers that run, or of which no state is known; without sandboxes.
    pub fn running(&self) -> impl Iterator<Item = &PodContainer> {
        self.containers.iter().filter(|container| {
            matches!(container.state, None | Some(ContainerState::Running))
                && container.name.is_some()
        })
    }

    fn of_pod(&self, uid: &str) -> impl Iterator<Item = &PodContainer> {
        let containers = self.containers.iter();
        containers.filter(move |container| container.pod.uid.as_deref() == Some(uid))
    }

    /// The pod with this uid. If no more is known, it has only the uid.
    pub fn of_uid(&self, uid: &str) -> PodName {
        match self.of_pod(uid).next() {
            Some(container) => container.pod.clone(),
            None => PodName::of_uid(uid),
        }
    }

    /// The newest container of that name in a pod.
    pub fn container(&self, uid: &str, name: &str) -> Option<&PodContainer> {
        self.of_pod(uid)
            .filter(|container| container.name.as_deref() == Some(name))
            .max_by_key(|container| container.attempt)
    }

    /// True if a container of that name may be running; `None` if no container runtime reported any
    /// pod.
    pub fn may_run(&self, uid: &str, name: &str) -> Option<bool> {
        if self.containers.iter().all(|it| it.pod.uid.is_none()) {
            return None;
        }
        let container = self.container(uid, name);
        Some(container.is_some_and(|container| container.state != Some(ContainerState::Exited)))
    }

    /// True if the guard runs before the creates of a pod. All containers of a pod share its
    /// sandbox's runtime.
    pub fn is_guarded(&self, uid: &str) -> Option<bool> {
        self.of_pod(uid)
            .filter_map(|container| container.guarded)
            .reduce(|one, other| one || other)
    }

    /// The pods by the version of bindguard's shim under which they run. A pod without a running
    /// shim of bindguard's is in no list.
    pub fn by_shim_version(&self) -> Vec<PodsOfVersion> {
        let mut versions: BTreeMap<&str, BTreeSet<&PodName>> = BTreeMap::new();
        for container in &self.containers {
            if let Some(version) = &container.shim_version
                && container.state != Some(ContainerState::Exited)
            {
                versions.entry(version).or_default().insert(&container.pod);
            }
        }
        let versions = versions.into_iter().map(|(version, pods)| PodsOfVersion {
            version: version.to_owned(),
            pods: pods.into_iter().cloned().collect(),
        });
        versions.collect()
    }

    /// True if a container of that name opted in to live refresh; `None` if the pod's annotations
    /// are not known.
    pub fn opted_in(&self, uid: &str, name: &str) -> Option<bool> {
        let request = self.refresh_requests.get(uid)?;
        Some(request.containers.includes(name))
    }

    /// Opts every pod in, as the node's config does with `[refresh] mode = "all"`.
    pub fn opt_all_in(&mut self) {
        for container in &self.containers {
            if let Some(uid) = container.pod.uid.clone() {
                self.refresh_requests.entry(uid).or_default().containers = OptIn::All;
            }
        }
    }

    /// The container with this id.
    pub fn with_id(&self, id: &str) -> Option<&PodContainer> {
        self.containers.iter().find(|container| container.id == id)
    }
}

/// A pod named on the command line: `UID`, `NAME` or `NAMESPACE/NAME`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodSelector {
    namespace: Option<String>,
    name: String,
}

impl PodSelector {
    /// Parses an argument. Neither uids nor names contain a slash.
    pub fn from_argument(argument: &str) -> Self {
        let (namespace, name) = match argument.split_once('/') {
            Some((namespace, name)) => (Some(namespace.to_owned()), name),
            None => (None, argument),
        };
        Self {
            namespace,
            name: name.to_owned(),
        }
    }

    /// True if the argument names this pod.
    pub fn is(&self, pod: &PodName) -> bool {
        let is_name = pod.name.as_deref() == Some(self.name.as_str());
        match &self.namespace {
            Some(namespace) => is_name && pod.namespace.as_deref() == Some(namespace.as_str()),
            None => is_name || pod.uid.as_deref() == Some(self.name.as_str()),
        }
    }

    /// The argument as it was given.
    pub fn display_name(&self) -> String {
        match &self.namespace {
            Some(namespace) => format!("{namespace}/{}", self.name),
            None => self.name.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn web() -> PodName {
        let some = |word: &str| Some(word.to_owned());
        PodName {
            uid: some("u-1"),
            namespace: some("shop"),
            name: some("web"),
        }
    }

    #[test]
    fn a_pod_is_meant_by_uid_by_name_and_by_namespace_and_name() {
        for (argument, is_meant) in [
            ("u-1", true),
            ("web", true),
            ("shop/web", true),
            ("shop/u-1", false),
            ("other/web", false),
            ("we", false),
        ] {
            assert_eq!(
                PodSelector::from_argument(argument).is(&web()),
                is_meant,
                "{argument}"
            );
        }
    }

    #[test]
    fn the_newest_container_of_a_name_counts() {
        let container = |id: &str, attempt| PodContainer {
            id: id.to_owned(),
            name: Some("app".to_owned()),
            state: None,
            attempt: Some(attempt),
            pod: web(),
            guarded: None,
            shim_version: None,
        };
        let pods = Pods {
            containers: vec![container("b", 2), container("a", 0)],
            ..Pods::default()
        };
        assert_eq!(pods.container("u-1", "app").unwrap().id, "b");
        assert_eq!(pods.of_uid("u-1"), web());
        assert_eq!(pods.of_uid("u-2"), PodName::of_uid("u-2"));
    }

    #[test]
    fn one_guarded_container_shows_the_runtime_of_its_pod() {
        let container = |guarded| PodContainer {
            shim_version: None,
            id: "c".to_owned(),
            name: Some("app".to_owned()),
            state: None,
            attempt: None,
            pod: web(),
            guarded,
        };
        for (seen, expected) in [
            (vec![], None),
            (vec![None], None),
            (vec![None, Some(false)], Some(false)),
            (vec![Some(false), Some(true)], Some(true)),
        ] {
            let pods = Pods {
                containers: seen.into_iter().map(container).collect(),
                ..Pods::default()
            };
            assert_eq!(pods.is_guarded("u-1"), expected);
            assert_eq!(pods.is_guarded("u-2"), None);
        }
    }

    #[test]
    fn only_a_runtime_that_reported_pods_can_say_that_a_container_does_not_run() {
        let container = |state| PodContainer {
            id: "c".to_owned(),
            name: Some("app".to_owned()),
            state,
            attempt: None,
            pod: web(),
            guarded: None,
            shim_version: None,
        };
        let may_run = |containers: Vec<PodContainer>, name| {
            Pods {
                containers,
                ..Pods::default()
            }
            .may_run("u-1", name)
        };
        assert_eq!(may_run(vec![], "app"), None);
        assert_eq!(
            may_run(vec![container(Some(ContainerState::Running))], "app"),
            Some(true)
        );
        assert_eq!(
            may_run(vec![container(None)], "app"),
            Some(true),
            "its bundle is there"
        );
        assert_eq!(
            may_run(vec![container(Some(ContainerState::Exited))], "app"),
            Some(false)
        );
        assert_eq!(
            may_run(vec![container(Some(ContainerState::Running))], "other"),
            Some(false)
        );
    }

    #[test]
    fn a_pod_opts_in_by_its_annotation_or_by_the_nodes_config() {
        let request = |value| RefreshRequest::from_annotations(|_| Some(value));
        let container = PodContainer {
            id: "c".to_owned(),
            name: Some("app".to_owned()),
            state: None,
            attempt: None,
            pod: web(),
            guarded: None,
            shim_version: None,
        };
        let mut pods = Pods {
            containers: vec![container],
            ..Pods::default()
        };
        assert_eq!(
            pods.opted_in("u-1", "app"),
            None,
            "no runtime reported the annotations"
        );
        pods.refresh_requests
            .insert("u-1".to_owned(), request("side"));
        assert_eq!(
            (pods.opted_in("u-1", "side"), pods.opted_in("u-1", "app")),
            (Some(true), Some(false))
        );
        pods.opt_all_in();
        assert_eq!(pods.opted_in("u-1", "app"), Some(true));
    }
}
