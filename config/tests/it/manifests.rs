//! The manifests match the Kubernetes API's own schema: the API has every field, and with the same
//! type.

use serde_json::{Value, json};

use crate::kube::{documents, taken_by_kind};

const RUNTIME_CLASS: &str = include_str!("../../runtimeclass.yaml");
const POD: &str = include_str!("../../pod.yaml");
const DAEMON_SET: &str = include_str!("../../daemonset.yaml");
const AGENT: &str = include_str!("../../agent.yaml");

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
        (
            DAEMON_SET,
            "terminationGracePeriodSeconds: 60",
            "terminationGracePeriodSeconds: soon",
        ),
        (POD, "runtimeClassName", "runtimeclassName"),
        (RUNTIME_CLASS, "handler: bindguard", "handler: [bindguard]"),
    ] {
        let changed = text.replace(right, wrong);
        assert_ne!(changed, text);
        let noticed =
            |document: &Value| taken_by_kind(document).map_or(true, |taken| taken != *document);
        assert!(
            documents(&changed).iter().any(noticed),
            "{wrong} is not noticed"
        );
    }
}

/// Without a label nothing of bindguard comes to a node, and no runtime is restarted.
#[test]
fn the_manifests_begin_with_the_nodes_that_have_a_label() {
    for text in [DAEMON_SET, AGENT] {
        let documents = documents(text);
        let set = documents.iter().find(|it| it["kind"] == "DaemonSet");
        let pod = &set.unwrap()["spec"]["template"]["spec"];
        assert_eq!(
            pod["nodeSelector"],
            json!({ "kubernetes.io/os": "linux", "bindguard": "canary" })
        );
        let command = pod["containers"][0]["command"].to_string();
        assert!(!command.contains("--restart"), "{command}");
    }
}

#[test]
fn pod_class_and_handler_have_one_name() {
    let (class, pods) = (&documents(RUNTIME_CLASS)[0], documents(POD));
    assert_eq!(class["handler"], "bindguard");
    // a pod of the class lands on no node without the handler
    assert_eq!(
        class["scheduling"]["nodeSelector"],
        json!({ "bindguard": "canary" })
    );
    let pod = pods
        .iter()
        .find(|document| document["kind"] == "Pod")
        .unwrap();
    assert_eq!(pod["spec"]["runtimeClassName"], class["metadata"]["name"]);
}

/// Without a registry, a runtime pulls an image from a public registry.
#[test]
fn every_image_names_its_registry() {
    let pods = [POD, DAEMON_SET, AGENT].map(documents).concat();
    let mut images = Vec::new();
    for document in &pods {
        let template = &document["spec"]["template"]["spec"];
        let spec = if template.is_null() {
            &document["spec"]
        } else {
            template
        };
        let containers = spec["containers"].as_array().into_iter().flatten();
        images.extend(containers.filter_map(|container| container["image"].as_str()));
    }
    assert_eq!(images.len(), 3, "{images:?}");
    for image in images {
        let (registry, _) = image.split_once('/').unwrap_or_default();
        assert!(registry.contains('.'), "{image}");
    }
}
