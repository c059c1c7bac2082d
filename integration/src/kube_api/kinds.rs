//! The discovery answers that `kubectl apply` needs: the kinds and their schemas.

use std::collections::BTreeSet;

use serde_json::{Value, json};

/// Group and version, kind, and the plural name of what is namespaced or not.
const KINDS: [(&str, &str, &str, bool); 13] = [
    ("v1", "ConfigMap", "configmaps", true),
    ("v1", "Pod", "pods", true),
    ("v1", "Node", "nodes", false),
    ("v1", "ServiceAccount", "serviceaccounts", true),
    (
        "rbac.authorization.k8s.io/v1",
        "ClusterRole",
        "clusterroles",
        false,
    ),
    (
        "rbac.authorization.k8s.io/v1",
        "ClusterRoleBinding",
        "clusterrolebindings",
        false,
    ),
    ("rbac.authorization.k8s.io/v1", "Role", "roles", true),
    (
        "rbac.authorization.k8s.io/v1",
        "RoleBinding",
        "rolebindings",
        true,
    ),
    ("coordination.k8s.io/v1", "Lease", "leases", true),
    (
        "diagnosis.kubediag.org/v1",
        "Operation",
        "operations",
        false,
    ),
    (
        "diagnosis.kubediag.org/v1",
        "OperationSet",
        "operationsets",
        false,
    ),
    ("node.k8s.io/v1", "RuntimeClass", "runtimeclasses", false),
    ("apps/v1", "DaemonSet", "daemonsets", true),
];

/// The answer to a GET of a path that is no object's.
pub(super) fn discovered(path: &str) -> Option<Value> {
    let group_versions = || {
        BTreeSet::from(KINDS.map(|(version, ..)| version))
            .into_iter()
            .filter(|version| version.contains('/'))
    };
    Some(match path {
        "/version" => json!({"major": "1", "minor": "32", "gitVersion": "v1.32.0"}),
        "/api" => json!({"kind": "APIVersions", "versions": ["v1"]}),
        "/apis" => {
            let groups: Vec<Value> = group_versions().map(group).collect();
            json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
        }
        "/openapi/v3" => {
            let path = |(version, ..): &(&str, &str, &str, bool)| {
                let root = root(version);
                (
                    root[1..].to_owned(),
                    json!({"serverRelativeURL": format!("/openapi/v3{root}")}),
                )
            };
            let paths: serde_json::Map<String, Value> = KINDS.iter().map(path).collect();
            json!({ "paths": paths })
        }
        path if path.starts_with("/openapi/v3/") => schema(&path["/openapi/v3".len()..]),
        path if KINDS.iter().any(|(version, ..)| path == root(version)) => resources(path),
        _ => return None,
    })
}

fn root(version: &str) -> String {
    format!(
        "/{}/{version}",
        if version.contains('/') { "apis" } else { "api" }
    )
}

fn group(group_version: &str) -> Value {
    let version = json!({"groupVersion": group_version, "version": "v1"});
    json!({"name": group_version.trim_end_matches("/v1"), "versions": [version], "preferredVersion": version})
}

fn resources(path: &str) -> Value {
    let of = KINDS.iter().filter(|(version, ..)| path == root(version));
    let resource = |(_, kind, plural, namespaced): &(&str, &str, &str, bool)| json!({"name": plural, "singularName": "", "kind": kind, "namespaced": namespaced, "verbs": ["get", "create", "patch", "delete"]});
    let group_version = path
        .trim_start_matches("/apis/")
        .trim_start_matches("/api/");
    json!({"kind": "APIResourceList", "groupVersion": group_version, "resources": of.map(resource).collect::<Vec<_>>()})
}

/// A schema that announces field validation by the server: then kubectl does not validate.
fn schema(path: &str) -> Value {
    let of = KINDS.iter().filter(|(version, ..)| path == root(version));
    let paths = of.map(|(version, kind, plural, _)| {
        let kind = json!({"group": version.trim_end_matches("v1").trim_end_matches('/'), "version": "v1", "kind": kind});
        let patch = json!({"parameters": [{"name": "fieldValidation", "in": "query"}], "x-kubernetes-group-version-kind": kind});
        (format!("{}/{plural}/{{name}}", root(version)), json!({ "patch": patch }))
    });
    json!({"openapi": "3.0.0", "info": {"title": "here", "version": "1"}, "paths": paths.collect::<serde_json::Map<_, _>>()})
}
