//! The pods in two lists of the CRI.

use bindguard_core::identity::PodName;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

use bindguard_core::refresh_request::RefreshRequest;

use serde_json::Value;

use super::messages::{Container, PodSandbox, PodSandboxMetadata, READY};
use crate::pods::{ContainerState, PodContainer, Pods};

/// Builds pods from the CRI's sandboxes and containers.
pub(super) fn pods(sandboxes: Vec<PodSandbox>, containers: Vec<Container>) -> Pods {
    let mut pods = Pods::default();
    let mut names = HashMap::new();
    for sandbox in sandboxes {
        let is_ready = sandbox.state == READY;
        let PodSandboxMetadata {
            name,
            namespace,
            uid,
        } = sandbox.metadata;
        if is_ready {
            let annotation = |name: &str| sandbox.annotations.get(name);
            pods.refresh_requests
                .insert(uid.clone(), RefreshRequest::from_annotations(annotation));
        }
        let pod = PodName {
            uid: Some(uid),
            namespace: Some(namespace),
            name: Some(name),
        };
        let state = if is_ready {
            ContainerState::Running
        } else {
            ContainerState::Exited
        };
        names.insert(sandbox.id.clone(), pod.clone());
        pods.containers.push(container(sandbox.id, pod, state));
    }
    for listed in containers {
        let pod = names.get(&listed.pod_sandbox_id).cloned();
        let state = ContainerState::try_from(listed.state).unwrap_or(ContainerState::Unknown);
        pods.containers.push(PodContainer {
            name: Some(listed.metadata.name),
            attempt: Some(listed.metadata.attempt),
            ..container(listed.id, pod.unwrap_or_default(), state)
        });
    }
    pods
}

/// The root and the state folder of containerd, in the config that its CRI plugin reports. The
/// plugin's own `stateDir` is a folder of the state folder.
pub(super) fn directories(config: &str) -> Vec<PathBuf> {
    let config: Value = serde_json::from_str(config).unwrap_or_default();
    let path = |key: &str| config[key].as_str().map(Path::new);
    let state = path("stateDir").and_then(Path::parent);
    let found = path("containerdRootDir").into_iter().chain(state);
    found.map(Path::to_owned).collect()
}

fn container(id: String, pod: PodName, state: ContainerState) -> PodContainer {
    PodContainer {
        id,
        name: None,
        state: Some(state),
        attempt: None,
        pod,
        guarded: None,
        shim_version: None,
    }
}
