//! A sandbox that shows whether a runtime's handler starts pods: run, then removed.
//!
//! The label marks the sandbox: it is found and removed also if the CRI's answer never came, or if
//! an earlier process that ran such a sandbox was killed.

use std::collections::HashMap;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tokio::time::sleep;

use super::messages::{
    ImageAnswer, LinuxSandbox, OF_NODE, PodSandboxMetadata, RunSandbox, SandboxConfig, With,
};
use super::{Cri, CriError, block_on};

const LABEL: (&str, &str) = ("bindguard.io/trial", "true");
/// The namespace, the name and the uid of the sandbox's pod, which no API server has.
const NAMES: [&str; 3] = ["bindguard", "trial", "bindguard-trial"];
/// The time limit of each call: a sandbox on a busy node takes many seconds.
const CALL_TIMEOUT: Duration = Duration::from_secs(60);
/// The time limit for the removal. The runtime may first have to end a call that was given up.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(60);
/// A sandbox whose call failed can appear in the list after its error.
const APPEARANCE_TIMEOUT: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(100);

/// Longer than [`try_sandbox`] takes if each call reaches its limit.
pub const LIMIT: Duration = Duration::from_secs(600);

/// Runs a sandbox in the host's network through a handler, and removes it. Returns why the sandbox
/// was not tried: without its image, the runtime would pull the image.
///
/// # Errors
/// If the sandbox does not start, or cannot be removed.
pub fn try_sandbox(
    socket: &Path,
    handler: &str,
    image: &str,
    cgroup_parent: &str,
) -> Result<Option<String>> {
    block_on(async {
        let cri = Cri::connect(socket, CALL_TIMEOUT).await?;
        remove(&cri, Duration::ZERO).await?;
        let name = With {
            first: image.to_owned(),
        };
        let answer: ImageAnswer = cri.call("ImageStatus", name).await?;
        if answer.image.is_none() {
            return Ok(Some(format!("the image {image} is not on this node")));
        }
        let request = request(handler, cgroup_parent);
        let ran = cri.call::<()>("RunPodSandbox", request).await;
        let appears = match ran {
            Ok(_) => Duration::ZERO,
            Err(_) => APPEARANCE_TIMEOUT,
        };
        let removed = remove(&cri, appears).await;
        ran.with_context(|| format!("run a sandbox through the handler {handler}"))?;
        removed.map(|()| None)
    })
}

fn request(handler: &str, cgroup_parent: &str) -> RunSandbox {
    let [namespace, name, uid] = NAMES.map(str::to_owned);
    let (label, value) = LABEL;
    RunSandbox {
        config: SandboxConfig {
            metadata: PodSandboxMetadata {
                name,
                uid,
                namespace,
            },
            labels: HashMap::from([(label.to_owned(), value.to_owned())]),
            linux: LinuxSandbox {
                cgroup_parent: cgroup_parent.to_owned(),
                security_context: With { first: OF_NODE },
            },
        },
        runtime_handler: handler.to_owned(),
    }
}

/// Removes such sandboxes, until none has been seen for this time.
async fn remove(cri: &Cri, appears: Duration) -> Result<()> {
    let start = Instant::now();
    let mut last_seen = start;
    loop {
        match remove_seen(cri, &mut last_seen).await {
            Ok(()) if last_seen.elapsed() >= appears => return Ok(()),
            Err(failure) if start.elapsed() > REMOVAL_TIMEOUT => {
                let [namespace, name, _] = NAMES;
                return Err(failure).with_context(|| {
                    format!("remove the sandbox of the pod {namespace}/{name}; run crictl rmp -f with its id")
                });
            }
            Ok(()) | Err(_) => sleep(PAUSE).await,
        }
    }
}

/// Ends and removes the sandboxes of trials. Returns the last failure.
async fn remove_seen(cri: &Cri, last_seen: &mut Instant) -> Result<(), CriError> {
    let (label, value) = LABEL;
    let labels = HashMap::from([(label.to_owned(), value.to_owned())]);
    let mut removed = Ok(());
    for sandbox in cri.list_sandboxes(None, labels).await? {
        *last_seen = Instant::now();
        for method in ["StopPodSandbox", "RemovePodSandbox"] {
            if let Err(failure) = cri.call::<()>(method, sandbox.id.clone()).await {
                removed = Err(failure);
                break;
            }
        }
    }
    removed
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use k8s_cri::v1;
    use prost::Message;

    use super::*;

    #[test]
    fn the_request_is_that_of_the_published_protocol() {
        let bytes = request("bindguard", "system.slice").encode_to_vec();
        let read = v1::RunPodSandboxRequest::decode(bytes.as_slice()).unwrap();
        assert_eq!(read.runtime_handler, "bindguard");
        let config = read.config.unwrap();
        assert_eq!(config.metadata.unwrap().uid, "bindguard-trial");
        assert_eq!(config.labels["bindguard.io/trial"], "true");
        let linux = config.linux.unwrap();
        assert_eq!(linux.cgroup_parent, "system.slice");
        let options = linux.security_context.unwrap().namespace_options.unwrap();
        assert_eq!(options.network(), v1::NamespaceMode::Node);
        assert_eq!(options.pid(), v1::NamespaceMode::Pod);
    }
}
