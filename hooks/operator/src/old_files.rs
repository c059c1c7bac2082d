//! Running containers that read old files of a configMap, secret, projected or downwardAPI volume.
//!
//! A `subPath` file of a running container never changes (kubernetes#50345). The container's own mount table shows which of
//! its mounts are stale. Nothing is entered and nothing is changed.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use bindguard_core::error_chain;
use bindguard_core::report::{MountResult, RefreshedMount};
use bindguard_guard::refresh::{PodVolumes, RefreshAct, TuckRecords, refresh_container};
use serde::Serialize;

use crate::node::{hold_init, inits_of};
use crate::pods::{ContainerState, PodContainer, PodName, Pods};

/// A running container, and the old files that it reads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct OldFiles {
    /// Its pod.
    pub pod: PodName,
    /// The container.
    pub container: PodContainer,
    /// True if the container opted in to live refresh; none if the pod's annotations are not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub opted_in: Option<bool>,
    /// The stale files and folders.
    pub files: Vec<RefreshedMount>,
    /// The command that shows the container the current files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
}

impl OldFiles {
    /// True if the container should read the current files: it opted in. Otherwise old files are documented behaviour.
    pub fn is_finding(&self) -> bool {
        self.opted_in == Some(true)
    }
}

/// The containers that read old files, of the pods whose folders are `wanted`; and the reasons why others are not checked.
pub(crate) fn old_files<'r>(
    kubelet_roots: impl Iterator<Item = &'r Path> + Clone,
    pods: &Pods,
    wanted: impl Fn(&Path) -> bool,
) -> (Vec<OldFiles>, Vec<String>) {
    let is_running = |it: &&PodContainer| matches!(it.state, None | Some(ContainerState::Running)) && it.name.is_some();
    let mut by_pod = BTreeMap::<PathBuf, Vec<&PodContainer>>::new();
    for container in pods.containers.iter().filter(is_running) {
        let folder = container.pod.uid.as_deref().and_then(|uid| folder_of(uid, kubelet_roots.clone()));
        if let Some(folder) = folder.filter(|folder| wanted(folder)) {
            by_pod.entry(folder).or_default().push(container);
        }
    }
    let inits = inits_of(by_pod.values().flatten().map(|container| container.id.as_str()));
    let (mut found, mut problems) = (Vec::new(), Vec::new());
    for (folder, containers) in by_pod {
        match PodVolumes::open(&folder) {
            Ok(volumes) => {
                let of_container = |container: &&PodContainer| {
                    of_container(container, *inits.get(container.id.as_str())?, &volumes, pods)
                };
                found.extend(containers.iter().filter_map(of_container));
            }
            // A pod that is deleted meanwhile.
            Err(_) if folder.symlink_metadata().is_err() => {}
            Err(error) => problems.push(error_chain(&error)),
        }
    }
    (found, problems)
}

/// The folder of a pod that has a subPath: a pod without one is not checked any further.
fn folder_of<'r>(uid: &str, mut kubelet_roots: impl Iterator<Item = &'r Path>) -> Option<PathBuf> {
    let has_subpaths = |folder: &PathBuf| folder.join("volume-subpaths").symlink_metadata().is_ok();
    kubelet_roots.find_map(|root| Some(root.join("pods").join(uid)).filter(has_subpaths))
}

/// `None` if all files are current, or if the container ended.
fn of_container(container: &PodContainer, init: u32, volumes: &PodVolumes, pods: &Pods) -> Option<OldFiles> {
    let process = hold_init(&container.id, init).ok()?;
    let seen = refresh_container(&process, volumes, RefreshAct::Look, &TuckRecords::default()).ok()?;
    let mounts = seen.mounts.iter().map(RefreshedMount::from);
    let files: Vec<_> = mounts.filter(|mount| mount.outcome == MountResult::Stale).collect();
    if files.is_empty() {
        return None;
    }
    let pod = container.pod.clone();
    let opted_in = pods.opted_in(pod.uid.as_deref()?, container.name.as_deref()?);
    let command = pod.for_people().map(|pod| format!("bindguard refresh --pod {pod}"));
    Some(OldFiles { pod, container: container.clone(), opted_in, files, command })
}
