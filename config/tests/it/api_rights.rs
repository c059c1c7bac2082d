//! The rights of bindguard at the API server: nothing is read or watched, and each right has a
//! value that turns it off.

use std::fs;

use serde_json::{Value, json};

use crate::helm::{container, folder, helm, object, program, render, run, text};
use crate::kube::{documents, taken_by_kind};

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
const PODS: &str = r#"["patch"] ["pods"]"#;

#[test]
fn the_chart_has_the_rights_that_its_values_want() {
    let Some(helm) = helm() else { return };
    let state = [
        "agent.stateAnnotation.enabled=true",
        "stateAnnotation.enabled=true",
    ];
    assert_eq!(rights(&render(&helm, &[])), [EVENTS]);
    assert_eq!(rights(&render(&helm, &state)), [EVENTS, PODS, PODS]);
    assert_eq!(rights(&render(&helm, &["agent.enabled=false"])), [""; 0]);
    assert_eq!(rights(&render(&helm, &["mode=remove", state[1]])), [""; 0]);
    let none = render(&helm, &["agent.events=off"]);
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

#[test]
fn the_api_has_every_field_of_them() {
    let Some(helm) = helm() else { return };
    let rendered = render(
        &helm,
        &[
            "agent.stateAnnotation.enabled=true",
            "stateAnnotation.enabled=true",
        ],
    );
    rendered
        .iter()
        .for_each(|document| assert_eq!(taken_by_kind(document).unwrap(), *document));
    let policies = rendered
        .iter()
        .filter(|document| document["kind"] == "ValidatingAdmissionPolicy")
        .count();
    assert_eq!(policies, 2);
    let without = render(
        &helm,
        &[
            "agent.stateAnnotation.enabled=true",
            "agent.stateAnnotation.admissionPolicy=false",
        ],
    );
    assert!(
        without
            .iter()
            .all(|document| document["kind"] != "ValidatingAdmissionPolicy")
    );
}

/// The container that installs has no token, and the one beside it runs `bindguard status`.
#[test]
fn the_token_is_in_one_container_of_the_installers_pod() {
    let Some(helm) = helm() else { return };
    let rendered = render(&helm, &["stateAnnotation.enabled=true"]);
    let pod = &object(&rendered, "DaemonSet", "bindguard").unwrap()["spec"]["template"]["spec"];
    assert_eq!(
        (
            &pod["automountServiceAccountToken"],
            &pod["serviceAccountName"]
        ),
        (&json!(false), &json!("bindguard-installer"))
    );
    let has_token = |container: &Value| {
        container["volumeMounts"]
            .to_string()
            .contains("serviceaccount")
    };
    assert!(!has_token(&pod["containers"][0]) && has_token(&pod["containers"][1]));
    let command = pod["containers"][1]["command"].as_array().unwrap();
    assert_eq!(command[..3], ["bindguard-agent", "annotate-pod", "--"]);
}

#[test]
fn kustomize_adds_the_component_to_the_base() {
    let Some(kubectl) = program("BINDGUARD_ENGINES", "engines", "kubectl") else {
        return;
    };
    let overlay = tempfile::tempdir_in(folder("../target")).unwrap();
    let lines = "resources: [../../config]\ncomponents: [../../config/node-state]\n";
    fs::write(overlay.path().join("kustomization.yaml"), lines).unwrap();
    let built = run(
        &kubectl,
        &["kustomize", &overlay.path().display().to_string()],
    );
    assert!(built.status.success(), "{built:?}");
    let documents = documents(&text(&built.stdout));
    documents
        .iter()
        .for_each(|document| assert_eq!(taken_by_kind(document).unwrap(), *document));
    assert_eq!(rights(&documents), [EVENTS, PODS]);
    assert!(
        container(&documents, "bindguard-agent")["command"]
            .to_string()
            .contains("--node-state")
    );
}
