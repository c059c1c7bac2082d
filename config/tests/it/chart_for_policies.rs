//! Values of the chart that the rules of a cluster require: labels, names, network policies, the pods
//! of the removal.

use serde_json::{Value, json};

use crate::helm::{container, helm, object, render};
use crate::kube::taken_by_kind;

const REMOVAL: [&str; 3] = [
    "restart=true",
    "removal.enabled=true",
    "removal.kubectlImage=registry.example.com/kubectl:1",
];

fn rendered(values: &[&str]) -> Option<Vec<Value>> {
    let rendered = render(&helm()?, &[&REMOVAL, values].concat());
    for document in &rendered {
        assert_eq!(taken_by_kind(document).unwrap(), *document, "{values:?}");
    }
    Some(rendered)
}

#[test]
fn every_object_has_the_common_labels_and_the_name() {
    let values = [
        "commonLabels.team=a",
        "fullnameOverride=guard",
        "config=journal.enabled = false",
        "networkPolicy.enabled=true",
        "agent.kubediag.enabled=true",
    ];
    let Some(rendered) = rendered(&values) else {
        return;
    };
    for object in rendered {
        let metadata = &object["metadata"];
        assert_eq!(metadata["labels"]["team"], "a", "{object}");
        let name = metadata["name"].as_str().unwrap();
        let is_class = object["kind"] == "RuntimeClass";
        assert!(is_class || name.starts_with("guard"), "{object}");
        let template = &object["spec"]["template"];
        if !template.is_null() {
            assert_eq!(template["metadata"]["labels"]["team"], "a", "{object}");
        }
        let account = &template["spec"]["serviceAccountName"];
        assert!(
            account
                .as_str()
                .is_none_or(|name| name.starts_with("guard"))
        );
    }
}

#[test]
fn the_pod_of_the_removals_job() {
    let values = [
        "imagePullSecrets[0].name=pull",
        "removal.nodeSelector.pool=system",
        "removal.tolerations[0].key=system",
        "removal.resources.limits.memory=64Mi",
        "removal.securityContext.runAsUser=1000",
    ];
    let Some(rendered) = rendered(&values) else {
        return;
    };
    let job = object(&rendered, "Job", "bindguard-removal").unwrap();
    let pod = &job["spec"]["template"]["spec"];
    assert_eq!(pod["imagePullSecrets"], json!([{ "name": "pull" }]));
    assert_eq!(pod["nodeSelector"]["pool"], "system");
    assert_eq!(pod["tolerations"][0]["key"], "system");
    let container = &pod["containers"][0];
    assert_eq!(container["resources"]["limits"]["memory"], "64Mi");
    let security = &container["securityContext"];
    assert_eq!(security["runAsUser"], 1000);
    assert_eq!(security["allowPrivilegeEscalation"], false);
}

#[test]
fn pods_of_both_daemon_sets() {
    let values = [
        "updateStrategy=OnDelete",
        "agent.updateStrategy=OnDelete",
        "revisionHistoryLimit=3",
        "readinessProbe.periodSeconds=7",
        "agent.readinessProbe.periodSeconds=8",
        "agent.livenessProbe.failureThreshold=9",
        "agent.logLevel=debug",
        "agent.logFormat=json",
        "serviceAccountAnnotations.owner=a",
    ];
    let Some(rendered) = rendered(&values) else {
        return;
    };
    for name in ["bindguard", "bindguard-agent"] {
        let spec = &object(&rendered, "DaemonSet", name).unwrap()["spec"];
        assert_eq!(spec["updateStrategy"], json!({ "type": "OnDelete" }));
        assert_eq!(spec["revisionHistoryLimit"], 3);
    }
    let installer = &container(&rendered, "bindguard")["readinessProbe"];
    assert_eq!(installer["periodSeconds"], 7);
    assert_eq!(installer["timeoutSeconds"], 20, "{installer}");
    let agent = container(&rendered, "bindguard-agent");
    assert_eq!(agent["readinessProbe"]["periodSeconds"], 8);
    assert_eq!(agent["livenessProbe"]["failureThreshold"], 9);
    let words = agent["command"].to_string();
    assert!(
        words.contains(r#""--log-level","debug","--log-format","json""#),
        "{words}"
    );
    let accounts = rendered.iter().filter(|it| it["kind"] == "ServiceAccount");
    for account in accounts {
        assert_eq!(
            account["metadata"]["annotations"]["owner"], "a",
            "{account}"
        );
    }
}

/// Prometheus reaches the agents; nothing else connects to a pod.
#[test]
fn network_policies() {
    let from = "networkPolicy.from[0].namespaceSelector.matchLabels.name=monitoring";
    let Some(rendered) = rendered(&["networkPolicy.enabled=true", from]) else {
        return;
    };
    let agent = &object(&rendered, "NetworkPolicy", "bindguard-agent").unwrap()["spec"];
    let source = json!([{ "namespaceSelector": { "matchLabels": { "name": "monitoring" } } }]);
    assert_eq!(agent["ingress"][0]["from"], source);
    assert_eq!(agent["ingress"][0]["ports"][0]["port"], "metrics");
    let installer = &object(&rendered, "NetworkPolicy", "bindguard").unwrap()["spec"];
    assert_eq!(installer["policyTypes"], json!(["Ingress"]));
    assert!(installer["ingress"].is_null(), "{installer}");
}
