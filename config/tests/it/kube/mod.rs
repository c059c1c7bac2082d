//! Documents of Kubernetes, read with the types of its API.

use k8s_openapi::api::admissionregistration::v1::{
    ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
};
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, ServiceAccount};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::node::v1::RuntimeClass;
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, Role, RoleBinding};
use serde::Serialize;
use serde::de::{Deserialize, DeserializeOwned};
use serde_json::Value;

pub fn documents(text: &str) -> Vec<Value> {
    let documents = serde_norway::Deserializer::from_str(text)
        .map(|document| Value::deserialize(document).unwrap());
    documents.filter(|document| !document.is_null()).collect()
}

/// The part of a document that the API accepts, without unknown fields.
fn taken<T: DeserializeOwned + Serialize>(document: &Value) -> Result<Value, serde_json::Error> {
    serde_json::from_value::<T>(document.clone()).and_then(serde_json::to_value)
}

pub fn taken_by_kind(document: &Value) -> Result<Value, serde_json::Error> {
    match (document["apiVersion"].as_str(), document["kind"].as_str()) {
        (Some("node.k8s.io/v1"), Some("RuntimeClass")) => taken::<RuntimeClass>(document),
        (Some("v1"), Some("Pod")) => taken::<Pod>(document),
        (Some("v1"), Some("ConfigMap")) => taken::<ConfigMap>(document),
        (Some("v1"), Some("ServiceAccount")) => taken::<ServiceAccount>(document),
        (Some("networking.k8s.io/v1"), Some("NetworkPolicy")) => taken::<NetworkPolicy>(document),
        (Some("apps/v1"), Some("DaemonSet")) => taken::<DaemonSet>(document),
        (Some("coordination.k8s.io/v1"), Some("Lease")) => taken::<Lease>(document),
        (Some("batch/v1"), Some("Job")) => taken::<Job>(document),
        (Some("rbac.authorization.k8s.io/v1"), Some("Role")) => taken::<Role>(document),
        (Some("rbac.authorization.k8s.io/v1"), Some("RoleBinding")) => {
            taken::<RoleBinding>(document)
        }
        (Some("rbac.authorization.k8s.io/v1"), Some("ClusterRole")) => {
            taken::<ClusterRole>(document)
        }
        (Some("rbac.authorization.k8s.io/v1"), Some("ClusterRoleBinding")) => {
            taken::<ClusterRoleBinding>(document)
        }
        (Some("admissionregistration.k8s.io/v1"), Some("ValidatingAdmissionPolicy")) => {
            taken::<ValidatingAdmissionPolicy>(document)
        }
        (Some("admissionregistration.k8s.io/v1"), Some("ValidatingAdmissionPolicyBinding")) => {
            taken::<ValidatingAdmissionPolicyBinding>(document)
        }
        other => panic!("no such kind here: {other:?}"),
    }
}
