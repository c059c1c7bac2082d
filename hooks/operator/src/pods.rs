//! Pods by the names that people use and by the uids in the kubelet's folders.
//!
//! The kubelet's folders contain only a pod's uid; an operator knows its name. Code that knows both
//! (a container runtime's CRI, the annotations of bundles) fills in [`PodName`]s.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::path::{Path, PathBuf};

use bindguard_core::error_chain;
use bindguard_core::identity::{Identity, PodName};
use bindguard_core::kubelet::PodPath;
use bindguard_core::mount_table::MountTable;
use bindguard_core::places::Places;
use bindguard_core::refresh_request::{OptIn, REFRESH, RefreshRequest};
use bindguard_core::text::{cut, serialize_path, shell_word};
use serde::Serialize;

/// The state of a container, with the names and the numbers of the CRI.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, prost::Enumeration, strum::Display)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
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
#[derive(Debug, Serialize)]
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
        let names = self.pods.iter().map(PodName::display_name);
        let names: Vec<String> = names
            .map(|it| it.unwrap_or_else(|| "?".to_owned()))
            .collect();
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
    /// Its names, as the journal has them.
    pub fn identity(&self) -> Identity {
        Identity {
            container: self.name.clone(),
            pod: self.pod.clone(),
        }
    }

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
        let mut found = Vec::new();
        for (version, pods) in versions {
            found.push(PodsOfVersion {
                version: version.to_owned(),
                pods: pods.into_iter().cloned().collect(),
            });
        }
        found
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

/// True if an argument of the command line names this pod: `UID`, `NAME` or `NAMESPACE/NAME`. Neither
/// uids nor names contain a slash.
pub fn is_called(pod: &PodName, argument: &str) -> bool {
    let names = [&pod.uid, &pod.name, &pod.display_name()];
    names.map(Option::as_deref).contains(&Some(argument))
}

// Annotations for live refresh that have no effect: a value that is not understood, or a name that
// no container of the pod has. `True` in place of `true` would otherwise go unnoticed until an update
// does not arrive.

/// A pod with such an annotation.
#[derive(Debug)]
pub struct IgnoredRequest {
    pub pod: PodName,
    /// Values that are not understood.
    pub problems: Vec<String>,
    /// Names that no container of the pod has. A container that has yet to start is not known,
    /// either: only a name that stays unknown is wrong.
    pub unknown_names: Vec<String>,
}

/// The pods with such annotations.
pub fn ignored_requests(pods: &Pods) -> Vec<IgnoredRequest> {
    let mut names = BTreeMap::<&str, Vec<&str>>::new();
    for container in &pods.containers {
        if let (Some(uid), Some(name)) = (container.pod.uid.as_deref(), container.name.as_deref()) {
            names.entry(uid).or_default().push(name);
        }
    }
    let mut ignored = Vec::new();
    for (uid, request) in &pods.refresh_requests {
        let mut unknown_names = Vec::new();
        if let OptIn::Named(wanted) = &request.containers {
            let known = names.get(uid.as_str());
            for name in wanted {
                if known.is_none_or(|known| !known.contains(&name.as_str())) {
                    unknown_names.push(cut(name, 64).into());
                }
            }
        }
        if !request.problems.is_empty() || !unknown_names.is_empty() {
            ignored.push(IgnoredRequest {
                pod: pods.of_uid(uid),
                problems: request.problems.clone(),
                unknown_names,
            });
        }
    }
    ignored
}

impl IgnoredRequest {
    /// The problems in words. A name counts if the earlier findings have the name as well.
    pub fn confirmed_by(&self, earlier: &[Self]) -> Vec<String> {
        let mut problems = self.problems.clone();
        if let Some(before) = earlier.iter().find(|it| it.pod.uid == self.pod.uid) {
            for name in &self.unknown_names {
                if before.unknown_names.contains(name) {
                    problems.push(format!(
                        "ignoring {REFRESH}: the pod has no container {name:?}"
                    ));
                }
            }
        }
        problems
    }
}

// The command that deletes a pod, unless the deletion would erase files of the host, and the mounts
// of the host whose files would be erased.
//
// The kubelet removes an emptyDir, and each volume that wraps an emptyDir, with all files below.
// The removal goes on through a mount of the host in the volume: kubernetes#129550, #115054.

/// The folders of the plugins whose volumes the kubelet removes with all files.
const REMOVED: [&str; 6] = [
    "kubernetes.io~empty-dir",
    "kubernetes.io~configmap",
    "kubernetes.io~secret",
    "kubernetes.io~projected",
    "kubernetes.io~downward-api",
    "kubernetes.io~git-repo",
];

/// A mount of the host below a volume that the kubelet removes with its pod.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MountInVolume {
    pub pod: PodName,
    #[serde(serialize_with = "serialize_path")]
    pub mount_point: PathBuf,
    /// The type of its filesystem.
    pub fs_type: String,
    /// True if the kubelet can remove the files below the mount point.
    pub erased: bool,
    /// The command that saves the files.
    pub command: String,
}

impl MountInVolume {
    /// The effect on a deletion of the pod.
    pub fn effect(&self) -> &'static str {
        if self.erased {
            "the kubelet removes all files below this mount when the pod is deleted (kubernetes#129550), and the pod stays Terminating: unmount it before"
        } else {
            "the pod stays Terminating when it is deleted, until this is unmounted"
        }
    }
}

/// The commands that delete a pod.
#[derive(Debug, PartialEq)]
pub(crate) enum Deletion {
    /// The pod's names are not known.
    Unnamed,
    /// `kubectl delete pod`
    Command(String),
    /// These mounts of the host are in volumes of the pod: the deletion would erase their files.
    Erases(Vec<PathBuf>),
}

impl Deletion {
    /// The deletion of a pod on the node with this mount table.
    pub(crate) fn of(pod: &PodName, own: &MountTable, places: &Places) -> Self {
        let mut mounts = Vec::new();
        for entry in own.entries() {
            let uid = removed_volume(&entry.mount_point, places).map(|(uid, _)| uid);
            if uid.is_some() && uid == pod.uid.as_deref() {
                mounts.push(entry.mount_point.clone());
            }
        }
        if !mounts.is_empty() {
            // the innermost first, as they can be unmounted
            mounts.reverse();
            return Self::Erases(mounts);
        }
        match pod.names() {
            Some((namespace, name)) => {
                Self::Command(format!("kubectl -n {namespace} delete pod {name}"))
            }
            None => Self::Unnamed,
        }
    }
}

/// The mounts of the host below volumes that the kubelet removes with their pods, the innermost
/// first.
pub fn mounts_in_volumes(table: &MountTable, pods: &Pods, places: &Places) -> Vec<MountInVolume> {
    let mut found = Vec::new();
    for entry in table.entries().iter().rev() {
        let path = &entry.mount_point;
        let Some((uid, volume)) = removed_volume(path, places) else {
            continue;
        };
        // Of an emptyDir in memory the kubelet only unmounts the tmpfs, which is then busy.
        let is_mount = table.entries().iter().any(|it| it.mount_point == volume);
        found.push(MountInVolume {
            pod: pods.of_uid(uid),
            mount_point: path.clone(),
            fs_type: entry.fs_type.0.clone(),
            erased: !is_mount && !entry.is_read_only(),
            command: format!("umount {}", shell_word(path)),
        });
    }
    found
}

/// The pod's uid and the volume's folder, for a path strictly below a volume that the kubelet removes
/// with all files.
pub(crate) fn removed_volume<'p>(path: &'p Path, places: &Places) -> Option<(&'p str, &'p Path)> {
    let pod = PodPath::from_path(path, places.kubelet_roots())?;
    let [volumes, plugin, _, below @ ..] = pod.names.as_slice() else {
        return None;
    };
    let is_removed = *volumes == "volumes" && REMOVED.iter().any(|removed| plugin == removed);
    let volume = path.ancestors().nth(below.len())?;
    (is_removed && !below.is_empty()).then_some((pod.pod_uid, volume))
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
            assert_eq!(is_called(&web(), argument), is_meant, "{argument}");
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

#[cfg(test)]
mod ignored_tests {
    use super::*;

    fn pods(value: &'static str) -> Pods {
        let container = |name: Option<&str>| PodContainer {
            id: "c".to_owned(),
            name: name.map(str::to_owned),
            state: None,
            attempt: None,
            pod: PodName::of_uid("u"),
            guarded: None,
            shim_version: None,
        };
        let request = RefreshRequest::from_annotations(|name| (name == REFRESH).then_some(value));
        let refresh_requests = [("u".to_owned(), request)].into();
        Pods {
            containers: vec![container(None), container(Some("app"))],
            runtime_directories: Vec::new(),
            refresh_requests,
        }
    }

    #[test]
    fn only_an_annotation_without_effect_is_found() {
        for (value, problems, names) in [
            ("true", 0, 0),
            ("false", 0, 0),
            ("app", 0, 0),
            ("True", 1, 0),
            ("yes", 0, 1),
            ("app,sidecar", 0, 1),
            ("YES,on", 1, 1),
        ] {
            let found = ignored_requests(&pods(value));
            let sum = |of: fn(&IgnoredRequest) -> usize| found.iter().map(of).sum::<usize>();
            assert_eq!(
                (
                    sum(|it| it.problems.len()),
                    sum(|it| it.unknown_names.len())
                ),
                (problems, names),
                "{value}"
            );
        }
    }

    /// The container may start a moment later.
    #[test]
    fn a_name_is_wrong_once_it_stays_unknown() {
        let found = ignored_requests(&pods("yes"));
        assert_eq!(found[0].confirmed_by(&[]), [""; 0]);
        assert_eq!(
            found[0].confirmed_by(&found),
            [r#"ignoring bindguard.io/refresh: the pod has no container "yes""#]
        );
        let found = ignored_requests(&pods("True"));
        assert_eq!(found[0].confirmed_by(&[]).len(), 1);
    }
}

#[cfg(test)]
mod deletion_tests {
    use super::*;

    fn deletion(mount_point: &str) -> Deletion {
        let line = format!("1 0 8:1 / / rw - ext4 a rw\n2 1 8:2 / {mount_point} rw - ext4 b rw\n");
        let own = MountTable::from_mountinfo(line.as_bytes()).unwrap();
        let pod = PodName {
            namespace: Some("shop".to_owned()),
            name: Some("web".to_owned()),
            ..PodName::of_uid("u-1")
        };
        Deletion::of(&pod, &own, &Places::default())
    }

    #[test]
    fn a_pod_is_not_deleted_with_a_mount_of_the_host_in_its_empty_dir() {
        const PODS: &str = "/var/lib/kubelet/pods";
        for place in [
            "kubernetes.io~empty-dir/scratch/disk",
            "kubernetes.io~configmap/c/a/b",
        ] {
            let place = format!("{PODS}/u-1/volumes/{place}");
            assert_eq!(
                deletion(&place),
                Deletion::Erases(vec![place.clone().into()])
            );
        }
        for place in [
            // a tmpfs of medium Memory is the volume itself
            "u-1/volumes/kubernetes.io~empty-dir/scratch",
            "u-2/volumes/kubernetes.io~empty-dir/scratch/disk",
            "u-1/volumes/kubernetes.io~csi/pvc/mount",
            "u-1/volume-subpaths/scratch/app/0",
        ] {
            let command = "kubectl -n shop delete pod web".to_owned();
            assert_eq!(
                deletion(&format!("{PODS}/{place}")),
                Deletion::Command(command),
                "{place}"
            );
        }
    }

    #[test]
    fn files_stay_below_a_tmpfs_of_the_kubelet_and_in_a_read_only_mount() {
        const ED: &str = "/var/lib/kubelet/pods/u-1/volumes/kubernetes.io~empty-dir";
        let text = format!(
            "1 0 8:1 / / rw - ext4 a rw\n2 1 0:9 / {ED}/mem rw - tmpfs tmpfs rw\n3 2 8:2 / {ED}/mem/a rw - ext4 b rw\n\
             4 1 8:2 / {ED}/disk/b ro - ext4 b rw\n5 1 8:2 / {ED}/disk/c rw - ext4 b rw\n"
        );
        let table = MountTable::from_mountinfo(text.as_bytes()).unwrap();
        let found = mounts_in_volumes(&table, &Pods::default(), &Places::default());
        let found: Vec<_> = found
            .iter()
            .map(|it| (it.command.as_str(), it.erased))
            .collect();
        let command = |place: &str| format!("umount {ED}/{place}");
        let expected = [("disk/c", true), ("disk/b", false), ("mem/a", false)];
        let expected = expected.map(|(place, erased)| (command(place), erased));
        let expected = expected.iter().map(|(place, erased)| (&**place, *erased));
        assert_eq!(found, Vec::from_iter(expected));
    }
}
