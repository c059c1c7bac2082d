//! The node agent in the chart: the same pods as `config/agent.yaml`, words of the command line for
//! the values, and what Prometheus and Grafana get.

use serde_json::{Value, json};

use crate::helm::{container, folder, helm, object, render, render_for, run};
use crate::kube::documents;

const AGENT: &str = "bindguard-agent";
const MONITORING: [&str; 3] = [
    "agent.podMonitor.enabled=true",
    "agent.prometheusRule.enabled=true",
    "agent.dashboard.enabled=true",
];

#[test]
fn its_pods_are_those_of_the_manifest() {
    let Some(helm) = helm() else { return };
    let pod = |documents: &[Value]| {
        let mut spec =
            object(documents, "DaemonSet", AGENT).unwrap()["spec"]["template"]["spec"].clone();
        let container = spec["containers"][0].as_object_mut().unwrap();
        for key in ["image", "imagePullPolicy"] {
            container.remove(key);
        }
        spec
    };
    assert_eq!(
        pod(&render(&helm, &["nodeSelector.bindguard=canary"])),
        pod(&documents(include_str!("../../agent.yaml")))
    );
}

#[test]
fn values_become_words_of_the_command() {
    let Some(helm) = helm() else { return };
    let words = |values: &[&str]| container(&render(&helm, values), AGENT)["command"].clone();
    let all = [
        "agent.refresh=all",
        "agent.nri.enabled=true",
        "agent.metrics.port=1",
        "agent.extraArgs={--cri,/a}",
    ];
    let wanted = "bindguard-agent --host /host --metrics [::]:1 --refresh all --nri /var/run/nri/nri.sock --events all --cri /a";
    assert_eq!(words(&all), json!(wanted.split(' ').collect::<Vec<_>>()));
    let chart = folder("chart");
    for wrong in [
        "agent.refresh=on",
        "agent.metrics.port=0",
        "agent.nri.socket=nri.sock",
    ] {
        let rendered = run(
            &helm,
            &[
                "template",
                "b",
                &chart,
                "--set",
                crate::helm::REGISTRY,
                "--set",
                wrong,
            ],
        );
        assert!(!rendered.status.success(), "{wrong} is rendered");
    }
}

#[test]
fn a_release_is_the_programs_or_the_agent_or_both() {
    let Some(helm) = helm() else { return };
    let daemon_sets = |values: &[&str]| {
        let rendered = render(&helm, values);
        ["bindguard", AGENT].map(|name| object(&rendered, "DaemonSet", name).is_some())
    };
    assert_eq!(daemon_sets(&[]), [true, true]);
    assert_eq!(daemon_sets(&["agent.enabled=false"]), [true, false]);
    assert_eq!(daemon_sets(&["mode=none"]), [false, true]);
    assert_eq!(daemon_sets(&["mode=remove"]), [true, false]);
}

/// The annotation was replaced by the field in Kubernetes 1.30.
#[test]
fn an_older_kubernetes_gets_an_annotation_for_apparmor() {
    let Some(helm) = helm() else { return };
    let rendered = render_for(&helm, "1.29.0", &[]);
    assert!(container(&rendered, AGENT)["securityContext"]["appArmorProfile"].is_null());
    let metadata = &object(&rendered, "DaemonSet", AGENT).unwrap()["spec"]["template"]["metadata"];
    assert_eq!(
        metadata["annotations"]["container.apparmor.security.beta.kubernetes.io/agent"],
        "unconfined"
    );
}

#[test]
fn prometheus_and_grafana_get_the_files_of_the_repository() {
    let Some(helm) = helm() else { return };
    let kinds = ["PodMonitor", "PrometheusRule"];
    let none = render(&helm, &[]);
    assert!(
        none.iter()
            .all(|document| kinds.iter().all(|kind| document["kind"] != *kind)),
        "kinds that need a CRD"
    );
    let rendered = render(&helm, &MONITORING);
    let [monitor, rule] = kinds.map(|kind| object(&rendered, kind, AGENT).unwrap());
    assert_eq!(
        rule["spec"],
        documents(include_str!("../../prometheus/rules.yaml"))[0]
    );
    let pod = &object(&rendered, "DaemonSet", AGENT).unwrap()["spec"]["template"];
    let selected = monitor["spec"]["selector"]["matchLabels"]
        .as_object()
        .unwrap();
    assert!(
        selected
            .iter()
            .all(|(key, value)| pod["metadata"]["labels"][key] == *value),
        "{selected:?}"
    );
    let port = &monitor["spec"]["podMetricsEndpoints"][0]["port"];
    assert_eq!(*port, container(&rendered, AGENT)["ports"][0]["name"]);
    let dashboard = &object(&rendered, "ConfigMap", "bindguard-agent-dashboard").unwrap()["data"]["bindguard.json"];
    let dashboard: Value = serde_json::from_str(dashboard.as_str().unwrap()).unwrap();
    assert_eq!(
        dashboard,
        serde_json::from_str::<Value>(include_str!("../../prometheus/dashboard.json")).unwrap()
    );
}

/// A pipeline copies `config/chart` alone, without the files beside it.
#[test]
fn a_copy_of_the_charts_folder_has_all_its_files() {
    let Some(helm) = helm() else { return };
    let copy = tempfile::tempdir_in(folder("../target")).unwrap();
    let target = copy.path().join("chart").display().to_string();
    let copied = run("/bin/cp".as_ref(), &["-a", &folder("chart"), &target]);
    assert!(copied.status.success(), "{copied:?}");
    let rendered = |chart: &str| {
        let mut words = vec!["template", "bindguard", chart];
        for value in [crate::helm::REGISTRY].iter().chain(&MONITORING) {
            words.extend(["--set", value]);
        }
        run(&helm, &words)
    };
    let (copy, own) = (rendered(&target), rendered(&folder("chart")));
    assert!(copy.status.success(), "{copy:?}");
    assert_eq!(copy.stdout, own.stdout);
    let rendered = String::from_utf8_lossy(&copy.stdout);
    assert!(rendered.contains("BindguardStaleSubpaths"));
}
