//! The CRI's answers in the agent's terms: opted-in pods by their uids, and init processes.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bindguard_core::refresh_request::RefreshRequest;
use bindguard_core::spec::SpecUsers;
use bindguard_operator::cri::{Container, ContainerInfo, Cri, CriError, POD_UID, PodSandbox};

use super::Pod;
use crate::host::RuntimeNamespace;
use crate::pods::{Listing, NamedContainer};

/// Time limit of a call.
const CALL_TIMEOUT: Duration = Duration::from_secs(2);

/// A client of this socket. The client connects at the first call.
pub fn client(socket: &Path) -> Cri {
    Cri::of(socket, CALL_TIMEOUT)
}

/// A client of a runtime whose mount namespace this process entered.
pub fn client_in(namespace: RuntimeNamespace, socket: &Path) -> Cri {
    Cri::of_accepted(socket, CALL_TIMEOUT, move |stream| namespace.accept(stream))
}

/// The pod with this uid, if it has a running sandbox; without its containers.
///
/// # Errors
/// If the CRI does not answer.
pub async fn pod(cri: &Cri, uid: &str) -> Result<Option<Pod>, CriError> {
    let label = HashMap::from([(POD_UID.to_owned(), uid.to_owned())]);
    Ok(newest(cri.ready_sandboxes(label).await?).remove(uid))
}

/// All running pods by their uids, without their containers.
///
/// # Errors
/// If the CRI does not answer.
pub async fn running_pods(cri: &Cri) -> Result<HashMap<String, Pod>, CriError> {
    Ok(newest(cri.ready_sandboxes(HashMap::new()).await?))
}

/// All running pods with their running containers.
///
/// # Errors
/// If the CRI does not answer.
pub async fn listing(cri: &Cri) -> Result<Listing, CriError> {
    let began = Instant::now();
    let pods = running_pods(cri).await?;
    let mut containers: HashMap<String, Vec<NamedContainer>> = HashMap::new();
    for listed in cri.running_containers(None).await? {
        containers
            .entry(listed.pod_sandbox_id.clone())
            .or_default()
            .push(listed.into());
    }
    Ok(Listing::new(began, pods, containers))
}

/// The running containers of a sandbox.
///
/// # Errors
/// If the CRI does not answer.
pub async fn containers(cri: &Cri, sandbox: &str) -> Result<Vec<NamedContainer>, CriError> {
    let listed = cri.running_containers(Some(sandbox)).await?;
    Ok(listed.into_iter().map(NamedContainer::from).collect())
}

/// The init process of a container.
#[derive(Debug, Clone)]
pub struct Init {
    pub pid: u32,
    /// The user namespaces in the spec that the runtime recorded. `None` if the CRI reports no spec
    /// that can be read.
    pub spec: Option<Arc<SpecUsers>>,
}

impl Init {
    /// The init in the runtime's facts; `None` if it ended, or the runtime has no such process.
    pub fn from_info(info: &ContainerInfo) -> Option<Self> {
        let spec = info.spec().map(SpecUsers::from_spec);
        Some(Self {
            pid: info.pid()?,
            spec: spec.and_then(Result::ok).map(Arc::new),
        })
    }
}

/// The pods of these sandboxes, by uid. If a pod has two sandboxes, the newer sandbox counts.
fn newest(mut sandboxes: Vec<PodSandbox>) -> HashMap<String, Pod> {
    sandboxes.sort_by_key(|sandbox| sandbox.created_at);
    let mut pods = HashMap::new();
    for sandbox in sandboxes {
        if let Some(uid) = sandbox.labels.get(POD_UID).map(str::to_owned) {
            pods.insert(uid, Pod::from(sandbox));
        }
    }
    pods
}

impl From<Container> for NamedContainer {
    fn from(listed: Container) -> Self {
        Self {
            id: listed.id,
            name: listed.metadata.name,
        }
    }
}

impl From<PodSandbox> for Pod {
    fn from(sandbox: PodSandbox) -> Self {
        Self {
            sandbox: sandbox.id,
            name: sandbox.metadata.name,
            namespace: sandbox.metadata.namespace,
            request: RefreshRequest::from_annotations(|name| sandbox.annotations.get(name)),
        }
    }
}
