//! podDetailCollector: the Pod object, from the API server. Only pods of this node: the processors
//! are reachable without credentials, and must not show more of the cluster than the node's own
//! pods.

use std::sync::Arc;

use serde::Deserialize;
use tokio::sync::Mutex;

use super::Strings;
use super::contract::{POD_DETAIL, POD_NAME, POD_NAMESPACE};
use bindguard_kubernetes::{Access, ApiClient, ApiError};

/// Reads pods of this node.
#[derive(Debug)]
pub struct PodReader {
    /// `None` without credentials.
    client: Option<Mutex<ApiClient>>,
    node: String,
}

/// Why there is no Pod.
#[derive(Debug, thiserror::Error)]
pub enum NoPod {
    #[error(
        "the request does not name a pod: {POD_NAMESPACE} and {POD_NAME} are the names of Kubernetes objects"
    )]
    NotNamed,
    #[error("there are no credentials for the API server; set [agent.kubernetes] kubeconfig")]
    NoAccess,
    #[error(transparent)]
    Api(#[from] ApiError),
    #[error("the API server's answer is no Pod")]
    Json(#[from] serde_json::Error),
    #[error("it runs on node {found:?}, and this is node {node:?}")]
    OtherNode {
        /// The pod's node.
        found: String,
        /// The agent's.
        node: String,
    },
}

impl PodReader {
    /// A reader with these credentials, for the node of this name.
    pub fn new(access: Option<Arc<Access>>, node: String) -> Self {
        Self {
            client: access.map(|access| Mutex::new(ApiClient::new(access))),
            node,
        }
    }

    /// The Pod that the parameters name.
    ///
    /// # Errors
    /// If it cannot be read, or runs on another node.
    pub async fn detail(&self, parameters: &Strings) -> Result<Strings, NoPod> {
        let name = |key: &str| {
            parameters
                .get(key)
                .filter(|name| is_object_name(name))
                .ok_or(NoPod::NotNamed)
        };
        let (namespace, pod) = (name(POD_NAMESPACE)?, name(POD_NAME)?);
        let text = self
            .read(&format!("/api/v1/namespaces/{namespace}/pods/{pod}"))
            .await?;
        let PodPlace { spec } = serde_json::from_str(&text)?;
        if spec.node_name != self.node {
            return Err(NoPod::OtherNode {
                found: spec.node_name,
                node: self.node.clone(),
            });
        }
        Ok(Strings::from([(POD_DETAIL.to_owned(), text)]))
    }

    async fn read(&self, path: &str) -> Result<String, NoPod> {
        let mut client = self.client.as_ref().ok_or(NoPod::NoAccess)?.lock().await;
        Ok(client.get(path).await?)
    }
}

/// A name that is one part of a path: RFC 1123, as all names of pods and namespaces.
fn is_object_name(name: &str) -> bool {
    let is_part = |byte: u8| {
        byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-' || byte == b'.'
    };
    !name.is_empty() && name.len() <= 253 && name.bytes().all(is_part) && !name.starts_with('.')
}

#[derive(Debug, Deserialize)]
struct PodPlace {
    #[serde(default)]
    spec: PlaceInSpec,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct PlaceInSpec {
    node_name: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_cannot_lead_to_another_object() {
        for name in ["web", "web-0.example", "0"] {
            assert!(is_object_name(name), "{name}");
        }
        for name in [
            "",
            ".",
            "..",
            "a/b",
            "a?watch=1",
            "Web",
            "a%2fb",
            &"x".repeat(254),
        ] {
            assert!(!is_object_name(name), "{name}");
        }
    }
}
