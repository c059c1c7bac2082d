//! The rights of bindguard at the API server: nothing is read or watched, and each right has a
//! value that turns it off.

use serde_json::Value;

use crate::helm::{container, helm, object, render};
use crate::kube::documents;

/// Verbs and resources of all roles, sorted.
fn rights(documents: &[Value]) -> Vec<String> {
    let is_role = |document: &&Value| {
        document["kind"]
            .as_str()
            .is_some_and(|kind| kind.ends_with("Role"))
    };
    let rules = documents
        .iter()
        .filter(is_role)
        .flat_map(|role| role["rules"].as_array().unwrap());
    let mut rights: Vec<_> = rules
        .map(|rule| format!("{} {}", rule["verbs"], rule["resources"]))
        .collect();
    rights.sort();
    rights
}

const EVENTS: &str = r#"["create","patch"] ["events"]"#;
const NODES: &str = r#"["patch"] ["nodes"]"#;
const READS_PODS: &str = r#"["get"] ["pods"]"#;

#[test]
fn the_chart_has_the_rights_that_its_values_want() {
    let Some(helm) = helm() else { return };
    assert_eq!(rights(&render(&helm, &[])), [EVENTS, NODES]);
    assert_eq!(
        rights(&render(&helm, &["agent.kubediag.enabled=true"])),
        [EVENTS, READS_PODS, NODES]
    );
    assert_eq!(rights(&render(&helm, &["agent.enabled=false"])), [NODES]);
    assert_eq!(rights(&render(&helm, &["mode=remove"])), [NODES]);
    assert_eq!(rights(&render(&helm, &["mode=none"])), [EVENTS]);
    let none = render(&helm, &["agent.events=off", "nodeLabel=off"]);
    assert_eq!(rights(&none), [""; 0]);
    assert!(
        none.iter()
            .all(|document| document["kind"] != "ServiceAccount"),
        "an account without a use"
    );
    let agent = object(&none, "DaemonSet", "bindguard-agent").unwrap();
    assert_eq!(
        agent["spec"]["template"]["spec"]["automountServiceAccountToken"],
        false
    );
    assert!(
        !container(&none, "bindguard-agent")["command"]
            .to_string()
            .contains("--events")
    );
}

/// The right to patch pods is root on all nodes. Neither the chart nor a manifest requests it, and
/// the installer's pod has no token.
#[test]
fn no_file_asks_for_the_right_to_patch_pods() {
    let Some(helm) = helm() else { return };
    let manifests = [
        include_str!("../../agent.yaml"),
        include_str!("../../daemonset.yaml"),
        include_str!("../../kubediag/rbac.yaml"),
    ];
    let mut everything = manifests.map(documents).concat();
    everything.extend(render(
        &helm,
        &[
            "agent.kubediag.enabled=true",
            "agent.events=all",
            "nodeLabel=off",
        ],
    ));
    let patches_pods = |right: &String| right.contains("patch") && right.contains("pods");
    assert!(!rights(&everything).iter().any(patches_pods));
    let pods = everything
        .iter()
        .filter(|it| it["kind"] == "DaemonSet" && it["metadata"]["name"] == "bindguard");
    for pod in pods.map(|set| &set["spec"]["template"]["spec"]) {
        assert_eq!(pod["containers"].as_array().unwrap().len(), 1);
        assert_eq!(pod["automountServiceAccountToken"], false);
    }
}
