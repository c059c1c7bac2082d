//! Running containers that read old files of a configMap, secret, projected, downwardAPI or inline
//! CSI volume.
//!
//! A `subPath` file of a running container never changes (kubernetes#50345). The container's own
//! mount table shows which of its mounts are stale. Nothing is entered and nothing is changed.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::path::{Path, PathBuf};

use bindguard_core::error_chain;
use bindguard_core::identity::PodName;
use bindguard_core::report::{MountResult, RefreshedMount};
use bindguard_guard::refresh::PodVolumes;
use serde::Serialize;

use crate::bundles::binds_of_container;
use crate::container_inits::{ContainerInits, stale_mounts};
use crate::pods::{PodContainer, Pods};

/// A running container, and the old files that it reads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct OldFiles {
    pub pod: PodName,
    pub container: PodContainer,
    /// True if the container opted in to live refresh; none if the pod's annotations are not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub opted_in: Option<bool>,
    /// The stale files and folders.
    pub files: Vec<RefreshedMount>,
    /// The command that shows the container the current files; none if a refresh cannot help.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
}

impl OldFiles {
    /// True if the container should read the current files: it opted in. Otherwise old files are
    /// documented behaviour.
    pub fn is_finding(&self) -> bool {
        self.opted_in == Some(true)
    }
}

/// The containers that read old files, of the pods whose folders are `wanted`; and the reasons why
/// containers are not checked.
pub(crate) fn old_files<'r>(
    kubelet_roots: impl Iterator<Item = &'r Path> + Clone,
    pods: &Pods,
    wanted: impl Fn(&Path) -> bool,
) -> (Vec<OldFiles>, Vec<String>) {
    let mut by_pod = BTreeMap::<PathBuf, Vec<&PodContainer>>::new();
    for container in pods.running() {
        let folder = container
            .pod
            .uid
            .as_deref()
            .and_then(|uid| folder_of(uid, kubelet_roots.clone()));
        if let Some(folder) = folder.filter(|folder| wanted(folder)) {
            by_pod.entry(folder).or_default().push(container);
        }
    }
    let mut running = ContainerInits::of(by_pod.values().flatten().copied());
    let (mut found, mut problems) = (Vec::new(), Vec::new());
    for (folder, containers) in by_pod {
        // A look is harmless also where a container can write the volume.
        let none_writable = || Ok::<_, Infallible>(Vec::new());
        let volumes = PodVolumes::open(&folder);
        match volumes.and_then(|volumes| volumes.with_drivers(&folder, none_writable)) {
            Ok(volumes) => {
                for container in containers {
                    let Some(process) = running.hold(container) else {
                        continue;
                    };
                    let binds = binds_of_container(Path::new("/"), &container.id);
                    let mounts = stale_mounts(&process, &volumes.for_container(binds));
                    if let Some(mounts) = running.unless_ended(container, mounts) {
                        found.extend(report(container, mounts, pods));
                    }
                }
            }
            // A pod that is deleted meanwhile.
            Err(_) if folder.symlink_metadata().is_err() => {}
            Err(error) => problems.push(error_chain(&error)),
        }
    }
    problems.extend(running.into_problems());
    (found, problems)
}

/// The folder of a pod that has a subPath: a pod without a subPath is not checked any further.
fn folder_of<'r>(uid: &str, mut kubelet_roots: impl Iterator<Item = &'r Path>) -> Option<PathBuf> {
    let has_subpaths = |folder: &PathBuf| folder.join("volume-subpaths").symlink_metadata().is_ok();
    kubelet_roots.find_map(|root| Some(root.join("pods").join(uid)).filter(has_subpaths))
}

/// `None` if all files are current.
fn report(
    container: &PodContainer,
    mut files: Vec<RefreshedMount>,
    pods: &Pods,
) -> Option<OldFiles> {
    let is_old = |mount: &RefreshedMount| match mount.outcome {
        MountResult::Stale | MountResult::KeyGone | MountResult::Missing => true,
        MountResult::Replaced { .. } | MountResult::Hidden | MountResult::Occupied => false,
        MountResult::Restless | MountResult::Refused { .. } | MountResult::Failed { .. } => false,
    };
    files.retain(is_old);
    if files.is_empty() {
        return None;
    }
    let pod = container.pod.clone();
    let opted_in = pods.opted_in(pod.uid.as_deref()?, container.name.as_deref()?);
    // A removed key does not come back by a refresh, and a bind that is gone only by a restart.
    let helps = files.iter().any(|file| file.outcome == MountResult::Stale);
    let command = pod
        .display_name()
        .filter(|_| helps)
        .map(|pod| format!("bindguard refresh --pod {pod}"));
    Some(OldFiles {
        pod,
        container: container.clone(),
        opted_in,
        files,
        command,
    })
}
