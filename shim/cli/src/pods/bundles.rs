//! The running containers, from the annotations of containerd's bundles.

use std::fs;
use std::path::Path;

use bindguard_core::handover::VERSION_FILE;
use bindguard_core::identity::Identity;
use bindguard_core::spec::SpecView;
use bindguard_operator::bundles::tasks;
use bindguard_operator::pods::PodContainer;
use bindguard_sys::bundle::read_spec;

use super::supervisors::is_wrapper;

/// The containers that have a bundle of containerd, on a node whose `/` is at `root`.
pub fn containers(root: &Path) -> Vec<PodContainer> {
    tasks(root)
        .filter_map(|bundle| container(&bundle))
        .collect()
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

/// The shim writes its version into the bundle of the pod's first container. The bundles of later
/// containers of a pod have no version file.
fn shim_version(bundle: &Path) -> Option<String> {
    let version = fs::read_to_string(bundle.join(VERSION_FILE)).ok()?;
    Some(version.trim().to_owned()).filter(|version| !version.is_empty())
}
