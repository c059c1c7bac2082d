//! The bundles of running containers, which containerd, crun and runc record in folders of root.

use std::fs;
use std::path::{Path, PathBuf};

use bindguard_core::places::Places;
use bindguard_core::refresh::SpecBind;
use bindguard_core::spec::SpecView;
use bindguard_guard::refresh::FileBind;
use bindguard_guard::{Probes, bundle_and_pid, kubelet_roots_by_all_names};
use bindguard_sys::bundle::read_spec;
use bindguard_sys::observe::children;

/// The state folders of crun and runc that Podman or CRI-O calls as root.
pub(crate) const STATES: [&str; 2] = ["run/crun", "run/runc"];

/// containerd's task folders, with a folder for each namespace: `moby` of dockerd, `k8s.io` of the
/// kubelet.
pub const TASKS: [&str; 6] = [
    "run/containerd/io.containerd.runtime.v2.task",
    "run/docker/containerd/daemon/io.containerd.runtime.v2.task",
    "run/snap.docker/containerd/daemon/io.containerd.runtime.v2.task",
    "run/k3s/containerd/io.containerd.runtime.v2.task",
    "run/k0s/containerd/io.containerd.runtime.v2.task",
    "var/snap/microk8s/common/run/containerd/io.containerd.runtime.v2.task",
];

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

pub(crate) fn namespaces(root: &Path) -> impl Iterator<Item = PathBuf> {
    TASKS.iter().flat_map(|folder| entries(&root.join(folder)))
}

/// The folders that are the container's bundle, if they exist: containerd's, or those of a container
/// that crun or runc started as root, of Podman or of CRI-O.
fn bundles_of(root: &Path, id: &str) -> impl Iterator<Item = PathBuf> {
    let recorded = STATES
        .iter()
        .find_map(|folder| bundle_and_pid(&root.join(folder).join(id)));
    let bundles = namespaces(root).map(move |namespace| namespace.join(id));
    bundles.chain(recorded.map(|(bundle, _)| bundle))
}

/// The spec of a container, on a node whose `/` is at `root`. `None` if no bundle is found.
pub fn spec_of_container(root: &Path, id: &str) -> Option<Vec<u8>> {
    bundles_of(root, id).find_map(|bundle| read_spec(&bundle).ok())
}

/// The bundle of a container, on a node whose `/` is at `root`.
pub fn bundle_of_container(root: &Path, id: &str) -> Option<PathBuf> {
    bundles_of(root, id).find(|bundle| bundle.join("config.json").symlink_metadata().is_ok())
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

/// The init process that containerd's shim has recorded in the folder of a task.
pub(crate) fn init_of_task(task: &Path) -> Option<u32> {
    let pid = fs::read_to_string(task.join("init.pid")).ok()?;
    pid.trim().parse().ok()
}

/// The paths in a folder; an unreadable folder counts as empty.
pub(crate) fn entries(folder: &Path) -> Vec<PathBuf> {
    children(folder).unwrap_or_default()
}
