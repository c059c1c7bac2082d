//! The chart, linted and rendered by helm, and the base for kustomize, built by kubectl: the API
//! has every field, and the pods run the commands that the values select.

use serde_json::{Value, json};

use crate::helm::{REGISTRY, container, folder, helm, program, render, run, text};
use crate::kube::{documents, taken_by_kind};

#[test]
fn helm_accepts_the_chart() {
    let Some(helm) = helm() else { return };
    let lint = run(
        &helm,
        &["lint", "--strict", &folder("chart"), "--set", REGISTRY],
    );
    assert!(lint.status.success(), "{lint:?}");
    let without = run(&helm, &["template", "b", &folder("chart")]);
    assert!(
        !without.status.success() && text(&without.stderr).contains("image.registry"),
        "{without:?}"
    );
    let wrong = run(
        &helm,
        &[
            "template",
            "b",
            &folder("chart"),
            "--set",
            REGISTRY,
            "--set",
            "mode=uninstall",
        ],
    );
    assert!(!wrong.status.success(), "an unknown mode is rendered");
}

#[test]
fn the_api_has_every_field() {
    let Some(helm) = helm() else { return };
    let removal = [
        "removal.enabled=true",
        "removal.kubectlImage=registry.example.com/kubectl:1",
    ];
    for values in [
        &[][..],
        &["mode=remove"],
        &["default=true", "wrapper=true", "podLabels.team=a"],
        &removal,
    ] {
        let rendered = render(&helm, values);
        assert!(!rendered.is_empty());
        for document in &rendered {
            // of an object without a value, the API's type keeps none
            assert_eq!(taken_by_kind(document).unwrap(), *document, "{values:?}");
        }
    }
}

#[test]
fn values_become_words_of_the_command() {
    let Some(helm) = helm() else { return };
    let words = |values: &[&str]| container(&render(&helm, values), "bindguard")["command"].clone();
    let install = json!([
        "bindguard",
        "install",
        "--root",
        "/host",
        "--restart",
        "--stay"
    ]);
    assert_eq!(words(&[]), install);
    let all = json!([
        "bindguard",
        "install",
        "--root",
        "/host",
        "--default",
        "--wrapper",
        "--prefix",
        "/opt",
        "--stay"
    ]);
    assert_eq!(
        words(&[
            "default=true",
            "wrapper=true",
            "restart=false",
            "extraArgs={--prefix,/opt}"
        ]),
        all
    );
    let remove = render(&helm, &["mode=remove"]);
    assert_eq!(container(&remove, "bindguard")["command"][1], "uninstall");
    assert_eq!(
        container(&remove, "bindguard")["readinessProbe"]["exec"]["command"][4],
        "--dry-run"
    );
    assert!(
        remove
            .iter()
            .all(|document| document["kind"] != "RuntimeClass"),
        "a class without a handler"
    );
}

/// The API server keeps the deprecated copy of a service account's name. A change that only leaves
/// the name out would leave pods with an account that is deleted, and no pod of `mode=remove` would
/// start.
#[test]
fn every_pod_names_its_service_account() {
    let Some(helm) = helm() else { return };
    for values in [&["mode=remove"][..], &["agent.events=off"], &[]] {
        let rendered = render(&helm, values);
        let daemon_sets = rendered
            .iter()
            .filter(|document| document["kind"] == "DaemonSet");
        let unnamed = daemon_sets
            .filter(|set| set["spec"]["template"]["spec"]["serviceAccountName"].is_null());
        assert_eq!(unnamed.count(), 0, "{values:?}");
    }
}

/// The end of a pod changes nothing, so nothing may run at the end of one, and no image comes from
/// a registry by default.
#[test]
fn no_pod_acts_at_its_end() {
    let Some(helm) = helm() else { return };
    let rendered = render(&helm, &[]);
    assert!(container(&rendered, "bindguard")["lifecycle"].is_null());
    assert_eq!(
        container(&rendered, "bindguard")["image"],
        "registry.example.com/ops/bindguard-node:0.1.0"
    );
}

#[test]
fn the_chart_has_the_version_of_the_programs() {
    let chart: Value = serde_norway::from_str(include_str!("../../chart/Chart.yaml")).unwrap();
    assert_eq!(chart["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(chart["appVersion"], env!("CARGO_PKG_VERSION"));
}

#[test]
fn kustomize_builds_the_base() {
    let Some(kubectl) = program("BINDGUARD_ENGINES", "engines", "kubectl") else {
        return;
    };
    let built = run(&kubectl, &["kustomize", &folder("")]);
    assert!(built.status.success(), "{built:?}");
    let documents = documents(&text(&built.stdout));
    let kinds: Vec<_> = documents
        .iter()
        .map(|document| document["kind"].as_str().unwrap())
        .collect();
    let account = ["ServiceAccount", "ClusterRole", "ClusterRoleBinding"];
    assert_eq!(
        kinds,
        [&account[..], &["DaemonSet", "DaemonSet", "RuntimeClass"]].concat()
    );
    documents
        .iter()
        .for_each(|document| assert_eq!(taken_by_kind(document).unwrap(), *document));
}
