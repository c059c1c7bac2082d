//! The existing pods of this node, from the kubelet or the API server.
//!
//! A caller removes the leftovers of all other pods, so every doubt is an error. Doubts are an
//! answer without a list, a part of a list, a pod without a uid, or another machine under this
//! node's name. A static pod has its manifest's hash as uid; the API server knows only its mirror,
//! which repeats the hash in an annotation (`pkg/kubelet/types/pod_update.go`).

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use serde_json::Value;

use crate::access::{Access, Kubelet};
use crate::client::{ApiClient, ApiError};

/// The annotations of a static pod's mirror.
const STATIC_POD_UIDS: [&str; 2] = ["kubernetes.io/config.hash", "kubernetes.io/config.mirror"];

/// The annotation with which a kubelet records the source of a pod: `api`, `file` or `http`.
const CONFIG_SOURCE: &str = "kubernetes.io/config.source";

/// Why the pods of this node are not known.
#[derive(Debug, thiserror::Error)]
pub enum NoPods {
    /// There was no answer, or an error.
    #[error(transparent)]
    Api(#[from] ApiError),
    /// The answer is no JSON.
    #[error("parse the answer")]
    Json(#[from] serde_json::Error),
    /// The kubelet has no pod of the API server.
    #[error(
        "the kubelet has no pod of the API server: it may not have reached the API server since its start"
    )]
    WithoutApiServer,
    /// The answer is not a whole list of pods.
    #[error("the answer is no whole list of pods: {0}")]
    NoList(&'static str),
    /// The API server knows the node as another machine, or by an earlier boot.
    #[error("the API server's node {0} has another boot id than this machine")]
    OtherMachine(String),
}

/// The uids of the pods that the kubelet has, static pods included.
///
/// # Errors
/// If it does not answer, or not with a whole list.
pub async fn pods_of_kubelet(kubelet: Kubelet) -> Result<BTreeSet<String>, NoPods> {
    let mut client = ApiClient::new(Arc::new(Access::Kubelet(kubelet)));
    uids_of_kubelet(&client.get_list("/pods").await?)
}

/// The uids of the pods that the API server has for the node of this name, which must be this
/// machine.
///
/// # Errors
/// If the API server does not answer with a whole list, or if the node's boot id differs.
pub async fn pods_of_api_server(
    kubeconfig: PathBuf,
    node: &str,
    boot_id: &str,
) -> Result<BTreeSet<String>, NoPods> {
    let mut client = ApiClient::new(Arc::new(Access::Kubeconfig(kubeconfig)));
    let object: Value = serde_json::from_str(&client.get(&format!("/api/v1/nodes/{node}")).await?)?;
    if object["status"]["nodeInfo"]["bootID"].as_str() != Some(boot_id) {
        return Err(NoPods::OtherMachine(node.to_owned()));
    }
    let path = format!("/api/v1/pods?fieldSelector=spec.nodeName%3D{node}");
    uids(&serde_json::from_str(&client.get_list(&path).await?)?)
}

/// After its start a kubelet has its static pods alone, until the API server has sent all others at
/// once (`kubernetes.io/config.source`, `pkg/kubelet/config/config.go`).
fn uids_of_kubelet(answer: &str) -> Result<BTreeSet<String>, NoPods> {
    let list: Value = serde_json::from_str(answer)?;
    let known = uids(&list)?;
    let mut pods = list["items"].as_array().into_iter().flatten();
    let is_of_api_server = |pod: &Value| pod["metadata"]["annotations"][CONFIG_SOURCE] == "api";
    match pods.any(is_of_api_server) {
        true => Ok(known),
        false => Err(NoPods::WithoutApiServer),
    }
}

fn uids(list: &Value) -> Result<BTreeSet<String>, NoPods> {
    if list["kind"] != "PodList" {
        return Err(NoPods::NoList("its kind is not PodList"));
    }
    if list["metadata"]["continue"]
        .as_str()
        .is_some_and(|token| !token.is_empty())
    {
        return Err(NoPods::NoList("it continues"));
    }
    let items = match list.get("items") {
        // Go's JSON of a slice without elements.
        Some(Value::Null) => return Ok(BTreeSet::new()),
        Some(Value::Array(items)) => items,
        _ => return Err(NoPods::NoList("it has no items")),
    };
    let mut uids = BTreeSet::new();
    for pod in items {
        let metadata = &pod["metadata"];
        let uid = metadata["uid"].as_str().filter(|uid| !uid.is_empty());
        uids.insert(uid.ok_or(NoPods::NoList("a pod has no uid"))?.to_owned());
        let of_static_pod = STATIC_POD_UIDS
            .iter()
            .filter_map(|name| metadata["annotations"][name].as_str());
        uids.extend(of_static_pod.map(str::to_owned));
    }
    Ok(uids)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::*;

    fn read(answer: &str) -> Result<BTreeSet<String>, NoPods> {
        uids(&serde_json::from_str(answer)?)
    }

    #[test]
    fn a_static_pod_is_known_by_its_own_uid_and_by_that_of_its_mirror() {
        let list = r#"{"kind":"PodList","items":[
            {"metadata":{"uid":"mirror","annotations":{"kubernetes.io/config.hash":"own"}}},
            {"metadata":{"uid":"u-2"}}]}"#;
        let known = read(list).unwrap();
        assert_eq!(Vec::from_iter(known), ["mirror", "own", "u-2"]);
        assert!(
            read(r#"{"kind":"PodList","items":null}"#)
                .unwrap()
                .is_empty()
        );
    }

    /// A kubelet that did not reach the API server since its start lists its static pods alone.
    #[test]
    fn a_kubelet_without_a_pod_of_the_api_server_is_no_answer() {
        let list = |source: &str| {
            format!(
                r#"{{"kind":"PodList","items":[{{"metadata":{{"uid":"u-1","annotations":
                    {{"kubernetes.io/config.source":"{source}"}}}}}}]}}"#
            )
        };
        assert_eq!(
            Vec::from_iter(uids_of_kubelet(&list("api")).unwrap()),
            ["u-1"]
        );
        for answer in [
            list("file"),
            list("http"),
            r#"{"kind":"PodList","items":[{"metadata":{"uid":"u-1"}}]}"#.to_owned(),
            r#"{"kind":"PodList","items":null}"#.to_owned(),
        ] {
            let refused = uids_of_kubelet(&answer);
            assert!(matches!(refused, Err(NoPods::WithoutApiServer)), "{answer}");
        }
    }

    /// Pods would be taken for ended that only the answer lacks.
    #[test]
    fn anything_but_a_whole_list_is_no_answer() {
        for answer in [
            "",
            "{}",
            r#"{"kind":"Status","items":[]}"#,
            r#"{"kind":"PodList"}"#,
            r#"{"kind":"PodList","items":{}}"#,
            r#"{"kind":"PodList","items":[{"metadata":{"name":"web"}}]}"#,
            r#"{"kind":"PodList","items":[{"metadata":{"uid":""}}]}"#,
            r#"{"kind":"PodList","metadata":{"continue":"next"},"items":[]}"#,
        ] {
            assert!(read(answer).is_err(), "{answer}");
        }
    }
}
