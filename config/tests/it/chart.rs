//! The chart, linted and rendered by helm, and the base for kustomize, built by kubectl: the API
//! has every field, and the pods run the commands that the values select.

use bindguard_config::{Config, RefreshMode};
use serde_json::{Value, json};

use crate::helm::{REGISTRY, container, folder, helm, object, program, render, run, text};
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
    let removal = [&removal[..], &["restart=true"]].concat();
    for values in [
        &[][..],
        &["mode=remove"],
        &["default=true", "wrapper=true", "podLabels.team=a"],
        &["config=journal.enabled = false", "podAnnotations.team=a"],
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
    let words = |values: &[&str]| {
        let values = [&["nodeLabel=off"], values].concat();
        container(&render(&helm, &values), "bindguard")["command"].clone()
    };
    let install = json!([
        "bindguard",
        "install",
        "--root",
        "/host",
        "--restart",
        "--stay"
    ]);
    assert_eq!(words(&["restart=true", "restartSlots=0"]), install);
    let without = json!(["bindguard", "install", "--root", "/host", "--stay"]);
    assert_eq!(words(&[]), without, "a runtime is restarted by default");
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
        words(&["default=true", "wrapper=true", "extraArgs={--prefix,/opt}"]),
        all
    );
    let remove = render(&helm, &["mode=remove"]);
    assert_eq!(container(&remove, "bindguard")["command"][1], "uninstall");
    assert_eq!(
        container(&remove, "bindguard")["readinessProbe"]["exec"]["command"][4],
        "--dry-run"
    );
}

/// The kubelet looks a pod's class up at every sync. Without the class, a running pod of the class
/// never starts a container again.
mod the_class_outlives_the_installation {
    use super::*;

    /// `helm rollback` fails at an object that the cluster has and the present revision has not: "no
    /// RuntimeClass with the name \"bindguard\" found". So each mode has the class, unchanged.
    #[test]
    fn in_every_mode() {
        let Some(helm) = helm() else { return };
        let class = |mode: &str, more: &[&str]| {
            let mode = format!("mode={mode}");
            let rendered = render(&helm, &[&[mode.as_str()][..], more].concat());
            object(&rendered, "RuntimeClass", "bindguard").cloned()
        };
        for more in [
            &[][..],
            &["nodeSelector.bindguard=canary"],
            &[
                "removal.enabled=true",
                "restart=true",
                "removal.kubectlImage=r.example.com/k:1",
            ],
        ] {
            let installed = class("install", more).unwrap();
            for mode in ["remove", "none"] {
                assert_eq!(
                    class(mode, more).as_ref(),
                    Some(&installed),
                    "mode={mode} deletes or changes the class"
                );
            }
        }
        assert_eq!(
            class("remove", &["runtimeClass.create=false"]),
            None,
            "a class that another owner makes"
        );
    }

    /// `helm uninstall` deletes every object that does not say otherwise, before the removal's hook
    /// runs.
    #[test]
    fn after_the_release() {
        let Some(helm) = helm() else { return };
        for mode in ["install", "remove", "none"] {
            let rendered = render(&helm, &[&format!("mode={mode}")]);
            let class = object(&rendered, "RuntimeClass", "bindguard");
            let class = class.unwrap_or_else(|| panic!("mode={mode} has no class"));
            assert_eq!(
                class["metadata"]["annotations"]["helm.sh/resource-policy"], "keep",
                "mode={mode}"
            );
        }
    }

    /// The person who removes bindguard has to delete the class, at last.
    #[test]
    fn the_notes_say_how_the_class_goes() {
        let notes = include_str!("../../chart/templates/NOTES.txt");
        assert!(
            notes.contains("delete runtimeclass"),
            "no command that deletes the class: {notes}"
        );
        assert!(notes.contains("PodSecurity level privileged"), "{notes}");
    }
}

/// A misspelt value is refused in each table of the values.
#[test]
fn unknown_values_are_refused() {
    let Some(helm) = helm() else { return };
    let values: Value = serde_norway::from_str(include_str!("../../chart/values.yaml")).unwrap();
    let mut tables = vec![String::new()];
    let mut at = 0;
    // maps whose keys the cluster defines
    let open = [
        "nodeSelector",
        "affinity",
        "requests",
        "limits",
        "securityContext",
        "podAnnotations",
        "podLabels",
        "labels",
        "commonLabels",
        "serviceAccountAnnotations",
    ];
    while at < tables.len() {
        let table = tables[at].clone();
        at += 1;
        let found = values.pointer(&table).unwrap().as_object().unwrap();
        let inner = found
            .iter()
            .filter(|(key, value)| value.is_object() && !open.contains(&key.as_str()));
        tables.extend(inner.map(|(key, _)| format!("{table}/{key}")));
        let key = format!("{table}/deafult").replace('/', ".");
        let refused = refusal(&helm, &format!("{}=true", &key[1..]));
        assert!(refused.contains("deafult"), "{key}: {refused}");
    }
    assert!(tables.len() > 10, "{tables:?}");
    for value in [
        "agent.config=x",
        "image.digest=sha256:1",
        "maxUnavailable=0",
    ] {
        refusal(&helm, value);
    }
    refusal(&helm, "removal.enabled=true");
}

fn refusal(helm: &std::path::Path, value: &str) -> String {
    let chart = folder("chart");
    let words = ["template", "b", &chart, "--set", REGISTRY, "--set", value];
    let rendered = run(helm, &words);
    assert!(!rendered.status.success(), "{value} is rendered");
    text(&rendered.stderr)
}

#[test]
fn a_digest_names_the_image() {
    let Some(helm) = helm() else { return };
    let digest = format!("sha256:{}", "a".repeat(64));
    let rendered = render(&helm, &[&format!("image.digest={digest}")]);
    for name in ["bindguard", "bindguard-agent"] {
        assert_eq!(
            container(&rendered, name)["image"],
            format!("registry.example.com/ops/bindguard-node@{digest}")
        );
    }
}

/// A pod of the class lands on no node without the handler. It does not tolerate every taint, as
/// the installer does.
#[test]
fn the_class_selects_the_nodes_of_the_installer() {
    let Some(helm) = helm() else { return };
    let scheduling = |values: &[&str]| {
        object(&render(&helm, values), "RuntimeClass", "bindguard").unwrap()["scheduling"].clone()
    };
    let linux = json!({ "kubernetes.io/os": "linux" });
    let off = "nodeLabel=off";
    assert_eq!(scheduling(&[off]), json!({ "nodeSelector": linux }));
    let values = [
        off,
        "nodeSelector.bindguard=canary",
        "tolerations[0].operator=Exists",
        "tolerations[1].key=gpu",
        "tolerations[1].operator=Exists",
    ];
    let selected = json!({ "kubernetes.io/os": "linux", "bindguard": "canary" });
    assert_eq!(
        scheduling(&values),
        json!({ "nodeSelector": selected, "tolerations": [{ "key": "gpu", "operator": "Exists" }] })
    );
}

/// A node gets pods of the class only while its handler is active: the installer labels the node, by
/// one right or by a file of node-feature-discovery, and the class selects the label.
#[test]
fn the_class_selects_the_label_of_the_handler() {
    let Some(helm) = helm() else { return };
    let selects = |values: &[&str]| {
        let rendered = render(&helm, values);
        let class = object(&rendered, "RuntimeClass", "bindguard").unwrap();
        (
            rendered.clone(),
            class["scheduling"]["nodeSelector"].clone(),
        )
    };
    let removal = [
        "restart=true",
        "removal.enabled=true",
        "removal.kubectlImage=registry.example.com/kubectl:1",
    ];
    let helper = r#""--node-label","bindguard-agent node-label""#;
    for (values, set, account) in [
        (&[][..], "bindguard", "bindguard-installer"),
        (&["mode=remove"], "bindguard", "bindguard-installer"),
        (&removal, "bindguard-removal", "bindguard-removal"),
    ] {
        let (rendered, selector) = selects(values);
        assert_eq!(selector["bindguard.io/active"], "true", "{selector}");
        let words = container(&rendered, set)["command"].to_string();
        assert!(words.contains(helper), "{words}");
        let pod = &object(&rendered, "DaemonSet", set).unwrap()["spec"]["template"]["spec"];
        assert_eq!(pod["serviceAccountName"], account);
        assert_eq!(pod["automountServiceAccountToken"], true);
        let role = account.replace("-installer", "-node-label");
        let rules = &object(&rendered, "ClusterRole", &role).unwrap()["rules"];
        let patch = json!({ "apiGroups": [""], "resources": ["nodes"], "verbs": ["patch"] });
        assert_eq!(*rules, json!([patch]));
        let binding = object(&rendered, "ClusterRoleBinding", &role).unwrap();
        assert_eq!(binding["subjects"][0]["name"], account);
    }
    let (rendered, selector) = selects(&["nodeLabel=nfd"]);
    assert_eq!(selector["feature.node.kubernetes.io/bindguard"], "true");
    let words = container(&rendered, "bindguard")["command"].to_string();
    let file = "/etc/kubernetes/node-feature-discovery/features.d/bindguard";
    assert!(
        words.contains(&format!(r#""--node-feature","{file}""#)),
        "{words}"
    );
    let pod = &object(&rendered, "DaemonSet", "bindguard").unwrap()["spec"]["template"]["spec"];
    assert_eq!(pod["automountServiceAccountToken"], false);
    for mode in ["nfd", "off"] {
        let (rendered, selector) = selects(&[&format!("nodeLabel={mode}")]);
        assert!(selector["bindguard.io/active"].is_null(), "{selector}");
        let text = serde_json::to_string(&rendered).unwrap();
        assert!(!text.contains(r#""nodes""#), "a right on nodes: {text}");
    }
}

/// The pods of the installer may read and patch their leases, and nothing else. The hook of `helm
/// uninstall` runs after the objects of the release are gone.
#[test]
fn restarts_have_slots() {
    let Some(helm) = helm() else { return };
    let values = ["restart=true", "restartSlots=2", "restartFailures=3"];
    let rendered = render(&helm, &values);
    let slots = ["bindguard-restart-0", "bindguard-restart-1"];
    for slot in slots {
        assert!(object(&rendered, "Lease", slot).is_some(), "{slot}");
    }
    let role = object(&rendered, "Role", "bindguard-restart").unwrap();
    let rule = json!({
        "apiGroups": ["coordination.k8s.io"], "resources": ["leases"],
        "resourceNames": slots, "verbs": ["get", "patch"],
    });
    assert_eq!(role["rules"], json!([rule]));
    let installer = container(&rendered, "bindguard");
    // the pod is not ready while its node owes a restart
    let probe = installer["readinessProbe"]["exec"]["command"].to_string();
    assert!(
        probe.contains(r#""--restart","--dry-run""#) && !probe.contains("restart-slot"),
        "{probe}"
    );
    let words = installer["command"].clone();
    let command = "bindguard-agent restart-slot --namespace kube-system --max-failures 3 \
                   --lease bindguard-restart-0 --lease bindguard-restart-1";
    assert!(
        words.as_array().unwrap().contains(&json!(command)),
        "{words}"
    );
    let pod = &object(&rendered, "DaemonSet", "bindguard").unwrap()["spec"]["template"]["spec"];
    assert_eq!(pod["serviceAccountName"], "bindguard-installer");
    assert_eq!(pod["automountServiceAccountToken"], true);
    assert_eq!(pod["containers"][0]["env"][0]["name"], "NODE_NAME");
    rendered
        .iter()
        .for_each(|document| assert_eq!(taken_by_kind(document).unwrap(), *document));

    let paced = render(&helm, &["restart=true", "mode=remove"]);
    let words = container(&paced, "bindguard")["command"].to_string();
    assert!(words.contains("restart-slot"), "{words}");
    let hook = [
        "restart=true",
        "removal.enabled=true",
        "removal.kubectlImage=registry.example.com/kubectl:1",
    ];
    let hook = render(&helm, &hook);
    let words = container(&hook, "bindguard-removal")["command"].to_string();
    assert!(!words.contains("restart-slot"), "{words}");
    for values in [&[][..], &["restart=true", "restartSlots=0"]] {
        let values = &[&["nodeLabel=off"], values].concat();
        let rendered = render(&helm, values);
        assert!(rendered.iter().all(|document| document["kind"] != "Lease"));
        let pod = &object(&rendered, "DaemonSet", "bindguard").unwrap()["spec"]["template"]["spec"];
        assert_eq!(pod["automountServiceAccountToken"], false);
    }
}

/// A node whose pods outlive the hook keeps its pod of the removal: the Job waits until nothing is
/// left, and ends before helm's own limit of five minutes.
#[test]
fn the_removal_is_over_when_no_node_has_a_part() {
    let Some(helm) = helm() else { return };
    let values = [
        "restart=true",
        "removal.enabled=true",
        "removal.kubectlImage=registry.example.com/kubectl:1",
    ];
    let hook = render(&helm, &values);
    let probe = container(&hook, "bindguard-removal")["readinessProbe"]["exec"]["command"].clone();
    let words = [
        "bindguard",
        "uninstall",
        "--root",
        "/host",
        "--restart",
        "--complete",
        "--dry-run",
    ];
    assert_eq!(probe, json!(words));
    // helm 4 deletes each earlier hook with the policy hook-succeeded when the Job fails
    for kind in [
        "DaemonSet",
        "ServiceAccount",
        "Role",
        "RoleBinding",
        "ClusterRole",
        "ClusterRoleBinding",
    ] {
        let annotations = |document: &Value| document["metadata"]["annotations"].clone();
        let mut all = hook.iter().filter(|document| {
            document["kind"] == kind && document["metadata"]["name"] == "bindguard-removal"
        });
        let (working, last) = (
            annotations(all.next().unwrap()),
            annotations(all.next().unwrap()),
        );
        assert_eq!(
            working["helm.sh/hook-delete-policy"],
            "before-hook-creation"
        );
        assert_eq!(last["helm.sh/hook-weight"], "2", "after the Job");
        let policy = "before-hook-creation,hook-succeeded";
        assert_eq!(last["helm.sh/hook-delete-policy"], policy);
        assert!(all.next().is_none());
    }
    let deadline = |more: &[&str]| {
        let rendered = render(&helm, &[&values[..], more].concat());
        let job = object(&rendered, "Job", "bindguard-removal").unwrap();
        let wait = job["spec"]["template"]["spec"]["containers"][0]["command"].to_string();
        (job["spec"]["activeDeadlineSeconds"].clone(), wait)
    };
    let (seconds, wait) = deadline(&[]);
    assert!(
        seconds.as_u64().unwrap() < 300 && wait.contains("--timeout=4m"),
        "{seconds} {wait}"
    );
    assert_eq!(deadline(&["removal.timeout=90s"]).0, 90);

    // the pods of `mode=remove` stay anyway, and are ready when the default has gone back
    let remove = render(&helm, &["mode=remove"]);
    let probe = container(&remove, "bindguard")["readinessProbe"].to_string();
    assert!(!probe.contains("--complete"), "{probe}");
}

/// A config reaches each node and the agent, and another config starts other pods.
#[test]
fn a_config_is_for_the_node_and_the_agent() {
    let Some(helm) = helm() else { return };
    let rendered = |config: &str| render(&helm, &[&format!("config={config}")]);
    let one = rendered("refresh.mode = 'off'");
    let map = object(&one, "ConfigMap", "bindguard-config").unwrap();
    let parsed = Config::from_toml(map["data"]["config.toml"].as_str().unwrap());
    assert_eq!(parsed.unwrap().agent().refresh, RefreshMode::Off);
    let installer = container(&one, "bindguard");
    let probe = &installer["readinessProbe"]["exec"]["command"];
    for words in [&installer["command"], probe] {
        let words = words.to_string();
        assert!(
            words.contains(r#""--node-config","/config/config.toml""#),
            "{words}"
        );
        assert!(!words.contains("--force-node-config"), "{words}");
    }
    let agent = container(&one, "bindguard-agent")["command"].to_string();
    assert!(agent.contains("/config/config.toml"), "{agent}");
    let other = rendered("refresh.mode = 'all'");
    for name in ["bindguard", "bindguard-agent"] {
        let template = |documents: &[Value]| {
            object(documents, "DaemonSet", name).unwrap()["spec"]["template"].clone()
        };
        let mount = &template(&one)["spec"]["volumes"][1]["configMap"]["name"];
        assert_eq!(mount, "bindguard-config");
        assert_ne!(template(&one)["metadata"], template(&other)["metadata"]);
    }
    let forced = render(&helm, &["config=a = 1", "configForce=true"]);
    let words = container(&forced, "bindguard")["command"].to_string();
    assert!(words.contains("--force-node-config"), "{words}");
    let removal = render(&helm, &["config=a = 1", "mode=remove"]);
    let words = container(&removal, "bindguard")["command"].to_string();
    assert!(!words.contains("config"), "{words}");
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

/// The end of a pod changes nothing, so nothing may run then. No image comes from a registry by
/// default.
#[test]
fn no_pod_acts_at_its_end() {
    let Some(helm) = helm() else { return };
    let rendered = render(&helm, &[]);
    assert!(container(&rendered, "bindguard")["lifecycle"].is_null());
    assert_eq!(
        container(&rendered, "bindguard")["image"],
        concat!(
            "registry.example.com/ops/bindguard-node:",
            env!("CARGO_PKG_VERSION")
        )
    );
}

/// Without it, helm upgrades or installs a release of the namespace of the day.
#[test]
fn every_documented_command_of_helm_names_a_namespace() {
    let mut found = 0;
    let pages = std::fs::read_dir(folder("../docs")).unwrap();
    let pages = pages.map(|page| page.unwrap().path());
    for page in pages.chain([folder("../README.md").into()]) {
        if page.extension().is_none_or(|kind| kind != "md") {
            continue;
        }
        let text = std::fs::read_to_string(&page).unwrap();
        for command in text.split("helm ").skip(1) {
            let line = command.split(['`', '\n']).next().unwrap();
            let is_command = ["install ", "upgrade ", "uninstall ", "rollback "];
            if is_command.iter().any(|verb| line.starts_with(verb)) {
                found += 1;
                assert!(line.contains("--namespace "), "{page:?}: helm {line}");
            }
        }
    }
    assert!(found > 3, "{found}");
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
    for document in &documents {
        assert_eq!(taken_by_kind(document).unwrap(), *document);
        // a pod of the class lands on no node without the handler
        let selector = match document["kind"].as_str() {
            Some("DaemonSet") => &document["spec"]["template"]["spec"]["nodeSelector"],
            Some("RuntimeClass") => &document["scheduling"]["nodeSelector"],
            _ => continue,
        };
        assert_eq!(selector["bindguard"], "canary", "{document}");
    }
}

/// The file lists every value: `sh config/chart/readme.sh > config/chart/README.md`.
#[test]
fn the_readme_has_the_values_of_today() {
    let script = folder("chart/readme.sh");
    let printed = run("sh".as_ref(), &[&script]);
    let readme = std::fs::read_to_string(folder("chart/README.md")).unwrap();
    assert_eq!(text(&printed.stdout), readme, "{printed:?}");
    for name in ["restartSlots", "agent.events", "removal.timeout"] {
        assert!(readme.contains(&format!("| `{name}` |")), "{name}");
    }
}

/// The address of the sources is in Cargo.toml; the chart and the alert rules have the same.
#[test]
fn every_file_names_the_same_sources() {
    let cargo = std::fs::read_to_string(folder("../Cargo.toml")).unwrap();
    let line = cargo
        .lines()
        .find_map(|line| line.strip_prefix("repository = "));
    let url = line.unwrap().trim_matches('"');
    for file in ["chart/Chart.yaml", "chart/files/rules.yaml"] {
        let text = std::fs::read_to_string(folder(file)).unwrap();
        let mut named = 0;
        for (at, _) in text.match_indices("https://github.com/") {
            assert!(
                text[at..].starts_with(url),
                "{file}: {}",
                &text[at..at + 60]
            );
            named += 1;
        }
        assert!(named > 2, "{file} names the sources {named} times");
    }
}
