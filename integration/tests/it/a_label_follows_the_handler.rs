//! With `--node-label` a node has its label only while the running containerd has the handler, so
//! that a RuntimeClass selects no node on which its pods fail. The label goes before a removal.

use bindguard_integration::prelude::*;
use std::os::unix::fs::symlink;

use bindguard_integration::kube_api::{Conduct, KubeApi};
use bindguard_integration::programs::AGENT;

const NODE: &str = "/api/v1/nodes/node-1";
const LABEL: &str = "bindguard.io/active";

#[test]
fn by_the_api_server() {
    Setup::on(Generation::NEWEST).cri().bare().story(|node| {
        let api = KubeApi::start_with_tls()?;
        let label = || -> Result<Value> {
            let node = api.object(NODE).context("the node is gone")?;
            ensure!(
                node["metadata"]["labels"]["zone"] == "a",
                "another label: {node}"
            );
            Ok(node["metadata"]["labels"][LABEL].clone())
        };
        // as a node that was installed anew has it
        let labels = json!({ "zone": "a", LABEL: "true" });
        let object = json!({ "kind": "Node", "metadata": { "name": "node-1", "labels": labels } });
        api.insert(NODE, object);
        bindguard(node, &api, "install")?.success()?;
        ensure!(label()?.is_null(), "the running containerd has no handler");
        node.restart_containerd(Signal::SIGTERM)?;
        let runc = node.programs().join("runc");
        let works = fs::canonicalize(&runc)?;
        fs::remove_file(&runc)?;
        let breaks = "#!/bin/sh\ncase \" $* \" in *\" create \"*) exit 1 ;; esac\nexec";
        write_program(&runc, &format!("{breaks} {} \"$@\"\n", works.display()))?;
        let failed = bindguard(node, &api, "install")?;
        ensure!(
            label()?.is_null() && failed.stderr.contains("no pod starts through the handler"),
            "no pod of the handler starts here: {failed:?}"
        );
        fs::remove_file(&runc)?;
        symlink(&works, &runc)?;
        bindguard(node, &api, "install")?.success()?;
        ensure!(label()? == "true", "the handler is active");

        let installed = fs::read(node.containerd_config())?;
        api.behave(Conduct::Answer(503));
        let waits = bindguard(node, &api, "uninstall")?;
        ensure!(
            waits.code() == 1 && waits.stderr.contains("nothing is removed yet"),
            "{waits:?}"
        );
        ensure!(
            fs::read(node.containerd_config())? == installed,
            "the handler goes, and the label stays"
        );
        api.behave(Conduct::Serve);
        bindguard(node, &api, "uninstall")?;
        ensure!(label()?.is_null(), "the label stays after the handler");
        ensure!(fs::read(node.containerd_config())? != installed);
        Ok(())
    });
}

#[test]
fn by_a_file_of_node_feature_discovery() {
    Setup::on(Generation::NEWEST).cri().bare().story(|node| {
        let file = node.disk().join("bindguard");
        let words = ["--node-feature", &file.display().to_string()];
        let bindguard = |verb| node.bindguard([&[verb], &words[..]].concat());
        bindguard("install")?.success()?;
        ensure!(!file.exists(), "the running containerd has no handler");
        node.restart_containerd(Signal::SIGTERM)?;
        bindguard("install")?.success()?;
        ensure!(fs::read_to_string(&file)? == "feature.node.kubernetes.io/bindguard=true\n");
        bindguard("uninstall")?;
        ensure!(!file.exists(), "the label stays after the handler");
        Ok(())
    });
}

fn bindguard(node: &Node, api: &KubeApi, verb: &str) -> Result<Finished> {
    let helper = node.under_test().join(AGENT);
    let mut command = Agent::with_account(node, &[], api)?;
    command
        .arg(node.under_test().join(CLI))
        .args([verb, "--node-label"])
        .arg(format!("{} node-label", helper.display()));
    run(command)
}
