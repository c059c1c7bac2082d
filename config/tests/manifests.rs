//! The manifests match the Kubernetes API's own schema: the API has every field, and with the same type.

#![allow(clippy::unwrap_used, reason = "a test says what it expects")]

use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use k8s_openapi::api::node::v1::RuntimeClass;
use serde::Serialize;
use serde::de::{Deserialize, DeserializeOwned};
use serde_json::Value;

const RUNTIME_CLASS: &str = include_str!("../runtimeclass.yaml");
const POD: &str = include_str!("../pod.yaml");
const DAEMON_SET: &str = include_str!("../daemonset.yaml");
const AGENT: &str = include_str!("../agent.yaml");

fn documents(text: &str) -> Vec<Value> {
    serde_norway::Deserializer::from_str(text).map(|document| Value::deserialize(document).unwrap()).collect()
}

/// The part of a document that the API accepts, without unknown fields.
fn taken<T: DeserializeOwned + Serialize>(document: &Value) -> Result<Value, serde_json::Error> {
    serde_json::from_value::<T>(document.clone()).and_then(serde_json::to_value)
}

fn taken_by_kind(document: &Value) -> Result<Value, serde_json::Error> {
    match (document["apiVersion"].as_str(), document["kind"].as_str()) {
        (Some("node.k8s.io/v1"), Some("RuntimeClass")) => taken::<RuntimeClass>(document),
        (Some("v1"), Some("Pod")) => taken::<Pod>(document),
        (Some("v1"), Some("ConfigMap")) => taken::<ConfigMap>(document),
        (Some("apps/v1"), Some("DaemonSet")) => taken::<DaemonSet>(document),
        other => panic!("no such kind here: {other:?}"),
    }
}

#[test]
fn every_field_is_the_apis() {
    for text in [RUNTIME_CLASS, POD, DAEMON_SET, AGENT] {
        for document in documents(text) {
            assert_eq!(taken_by_kind(&document).unwrap(), document);
        }
    }
}

#[test]
fn a_field_that_is_misspelt_or_of_another_kind_is_noticed() {
    for (text, right, wrong) in [
        (DAEMON_SET, "mountPropagation", "mountPropogation"),
        (AGENT, "appArmorProfile", "apparmorProfile"),
        (DAEMON_SET, "terminationGracePeriodSeconds: 60", "terminationGracePeriodSeconds: soon"),
        (POD, "runtimeClassName", "runtimeclassName"),
        (RUNTIME_CLASS, "handler: bindguard", "handler: [bindguard]"),
    ] {
        let changed = text.replace(right, wrong);
        assert_ne!(changed, text);
        let noticed = |document: &Value| taken_by_kind(document).map_or(true, |taken| taken != *document);
        assert!(documents(&changed).iter().any(noticed), "{wrong} is not noticed");
    }
}

#[test]
fn pod_class_and_handler_have_one_name() {
    let (class, pods) = (&documents(RUNTIME_CLASS)[0], documents(POD));
    assert_eq!(class["handler"], "bindguard");
    let pod = pods.iter().find(|document| document["kind"] == "Pod").unwrap();
    assert_eq!(pod["spec"]["runtimeClassName"], class["metadata"]["name"]);
}
