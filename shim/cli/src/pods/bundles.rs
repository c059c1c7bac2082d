//! The running containers, from the annotations of containerd's bundles.

use std::fs;
use std::path::{Path, PathBuf};

use bindguard_core::handover::VERSION_FILE;
use bindguard_core::identity::Identity;
use bindguard_core::spec::SpecView;
use bindguard_operator::engines::bundle_of;
use bindguard_operator::pods::PodContainer;
use bindguard_sys::bundle::read_spec;

use super::supervisors::is_wrapper;

/// containerd's state directories: its own default, k3s', k0s', MicroK8s'.
const STATES: [&str; 4] = [
    "run/containerd",
    "run/k3s/containerd",
    "run/k0s/containerd",
    "var/snap/microk8s/common/run/containerd",
];
const TASKS: &str = "io.containerd.runtime.v2.task";

/// The containers that have a bundle, on a node whose `/` is at `root`.
pub fn containers(root: &Path) -> Vec<PodContainer> {
    let tasks = STATES.iter().map(|state| root.join(state).join(TASKS));
    let namespaces = tasks.flat_map(|tasks| entries(&tasks));
    namespaces
        .flat_map(|namespace| entries(&namespace))
        .filter_map(|bundle| container(&bundle))
        .collect()
}

/// The spec of a container: that of containerd's bundle, or of the bundle that crun or runc
/// recorded.
pub fn spec_of(root: &Path, id: &str) -> Option<Vec<u8>> {
    let tasks = STATES
        .iter()
        .flat_map(|state| entries(&root.join(state).join(TASKS)));
    let mut bundles = tasks
        .map(|namespace| namespace.join(id))
        .chain(bundle_of(root, id));
    bundles.find_map(|bundle| read_spec(&bundle).ok())
}

/// A bundle may disappear while it is read: its container is then gone as well.
fn container(bundle: &Path) -> Option<PodContainer> {
    let bytes = read_spec(bundle).ok()?;
    let Identity {
        container: name,
        pod,
    } = Identity::from_spec(&SpecView::from_bytes(&bytes).ok()?);
    Some(PodContainer {
        id: bundle.file_name()?.to_str()?.to_owned(),
        name,
        state: None,
        attempt: None,
        pod,
        guarded: calls_the_wrapper(bundle).then_some(true),
        shim_version: shim_version(bundle),
    })
}

/// A shim writes the name of its OCI runtime into the bundle, and calls it until the container is
/// deleted.
fn calls_the_wrapper(bundle: &Path) -> bool {
    fs::read_to_string(bundle.join("runtime")).is_ok_and(|runtime| is_wrapper(runtime.trim()))
}

/// The shim writes its version when it starts. A later container of the same pod has no such file.
fn shim_version(bundle: &Path) -> Option<String> {
    let version = fs::read_to_string(bundle.join(VERSION_FILE)).ok()?;
    Some(version.trim().to_owned()).filter(|version| !version.is_empty())
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .collect()
}
