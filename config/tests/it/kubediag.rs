//! The manifests for kubediag name the processors of the agent, at its default address.

use bindguard_config::Config;
use serde_json::Value;

use crate::helm::{container, helm, object, render};
use crate::kube::{documents, taken_by_kind};

const OPERATIONS: &str = include_str!("../../kubediag/operations.yaml");
const RBAC: &str = include_str!("../../kubediag/rbac.yaml");

/// The keys of `api/v1/operation_types.go` of kubediag v0.3.1.
#[test]
fn every_operation_leads_to_the_agent_of_the_node() {
    let listen = Config::from_toml("agent.kubediag.enabled = true")
        .unwrap()
        .agent()
        .kubediag
        .unwrap();
    let documents = documents(OPERATIONS);
    let operations: Vec<&Value> = documents
        .iter()
        .filter(|it| it["kind"] == "Operation")
        .collect();
    assert_eq!(operations.len(), 4);
    for operation in operations {
        let processor = &operation["spec"]["processor"];
        let server = &processor["httpServer"];
        assert_eq!(
            (
                server["scheme"].as_str(),
                processor["timeoutSeconds"].as_u64()
            ),
            (Some("http"), Some(30))
        );
        assert_eq!(
            server["address"].as_str(),
            Some(listen.ip().to_string().as_str())
        );
        assert_eq!(server["port"].as_u64(), Some(listen.port().into()));
        assert!(
            server["path"].as_str().unwrap().starts_with("/processor/"),
            "{operation}"
        );
    }
}

/// The graph's first node has no operation; each further node has an existing operation and one
/// successor.
#[test]
fn the_set_runs_the_operations_in_their_order() {
    let documents = documents(OPERATIONS);
    let names: Vec<&Value> = documents
        .iter()
        .filter(|it| it["kind"] == "Operation")
        .map(|it| &it["metadata"]["name"])
        .collect();
    let set = documents
        .iter()
        .find(|document| document["kind"] == "OperationSet")
        .unwrap();
    let nodes = set["spec"]["adjacencyList"].as_array().unwrap();
    assert_eq!(nodes.len(), names.len() + 1);
    assert!(nodes[0].get("operation").is_none());
    for (id, node) in nodes.iter().enumerate() {
        assert_eq!(node["id"], id);
        assert_eq!(
            node["to"][0].as_u64(),
            (id + 1 < nodes.len()).then_some(id as u64 + 1)
        );
    }
    let in_set: Vec<&Value> = nodes
        .iter()
        .skip(1)
        .map(|node| &node["operation"])
        .collect();
    assert_eq!(in_set, names);
}

#[test]
fn the_role_allows_to_get_pods_and_nothing_else() {
    for document in documents(RBAC) {
        assert_eq!(taken_by_kind(&document).unwrap(), document);
    }
    let rules = &documents(RBAC)[0]["rules"];
    assert_eq!(
        *rules,
        serde_json::json!([{"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}])
    );
}

/// kubediag's agent calls the loopback address of the node, which the agent binds in the network
/// namespace of the runtime. On the node's network, another process could answer the probes.
#[test]
fn the_chart_serves_the_processors_on_the_nodes_loopback_address() {
    let Some(helm) = helm() else { return };
    let (without, with) = (
        render(&helm, &[]),
        render(&helm, &["agent.kubediag.enabled=true", "agent.events=off"]),
    );
    let pod = |documents: &[Value]| {
        object(documents, "DaemonSet", "bindguard-agent").unwrap()["spec"]["template"]["spec"]
            .clone()
    };
    for documents in [&with, &without] {
        assert!(pod(documents).get("hostNetwork").is_none());
    }
    assert_eq!(pod(&with)["serviceAccountName"], "bindguard-agent");
    let words = container(&with, "bindguard-agent")["command"].to_string();
    assert!(
        words.contains(r#""--kubediag","127.0.0.1:9475""#),
        "{words}"
    );
    let role = object(&with, "ClusterRole", "bindguard-agent-kubediag").unwrap();
    assert_eq!(role["rules"], documents(RBAC)[0]["rules"]);
    assert!(object(&without, "ClusterRole", "bindguard-agent-kubediag").is_none());
    with.iter()
        .for_each(|document| assert_eq!(taken_by_kind(document).unwrap(), *document));
}
