//! Every command that a document shows is run by a story: an operator will copy it at night.

use std::fs;
use std::fs::Permissions;
use std::os::unix::fs::{PermissionsExt, symlink};

use anyhow::{Context, Result, ensure};
use bindguard_integration::bundle::Bundle;
use bindguard_integration::cri::mount;
use bindguard_integration::doc_commands::{
    NOT_RUN, NotRun, Rehearsal, all_documents, commands_of, commands_outside_of_sh,
    documents_with_commands, repository,
};
use bindguard_integration::engines;
use bindguard_integration::kube_api::KubeApi;
use bindguard_integration::process::Finished;
use bindguard_integration::programs::CLI;
use bindguard_integration::{Generation, Node, Setup, VolumeKind, privilege};
use k8s_cri::v1::MountPropagation::PropagationPrivate;
use nix::sys::signal::Signal;
use serde_json::json;

const KUBECONFIG: &str = "/run/kubeconfig";

/// A document is named, in quotes, by the story that runs it.
#[test]
fn every_document_with_commands_is_run() -> Result<()> {
    let folder = repository().join("integration/tests/it");
    let mut stories = String::new();
    for entry in fs::read_dir(&folder).with_context(|| format!("list {}", folder.display()))? {
        let path = entry?.path();
        stories.push_str(
            &fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?,
        );
    }
    let missing: Vec<String> = documents_with_commands()?
        .into_iter()
        .filter(|name| !stories.contains(&format!("{name:?}")))
        .collect();
    ensure!(
        missing.is_empty(),
        "no story runs the commands of {missing:?}"
    );
    Ok(())
}

/// A command that is not in an `sh` block would escape the stories.
#[test]
fn commands_are_in_blocks_that_are_run() -> Result<()> {
    for document in all_documents()? {
        let hidden = commands_outside_of_sh(&document, &PROGRAMS)?;
        ensure!(hidden.is_empty(), "{document} shows {hidden:?} as text");
    }
    Ok(())
}

const PROGRAMS: [&str; 12] = [
    "bindguard",
    "cargo",
    "crictl",
    "ctr",
    "docker",
    "helm",
    "kubectl",
    "make",
    "nsenter",
    "podman",
    "skopeo",
    "systemctl",
];

/// Each command on the list of skipped commands is in a document.
#[test]
fn commands_that_are_not_run_are_in_the_documents() -> Result<()> {
    for NotRun {
        document, command, ..
    } in NOT_RUN
    {
        let is_shown = commands_of(document)?
            .iter()
            .any(|shown| shown.text.starts_with(command));
        ensure!(is_shown, "{document} does not show {command} any more");
    }
    Ok(())
}

/// Commands of bindguard's in the running text: the command line knows their verbs and flags.
#[test]
fn commands_in_the_text_exist() {
    Setup::on(Generation::V1_7).story(|node| {
        let documents = documents_with_commands()?
            .into_iter()
            .chain(UNSHOWN.map(str::to_owned));
        let mut named = 0;
        for document in documents {
            for words in named_in(&document)? {
                let mut words: Vec<&str> = words.split_whitespace().skip(1).collect();
                words.push("--help");
                let ended = node.bindguard(&words)?;
                ensure!(
                    ended.code() == 0,
                    "{document} names `bindguard {}`: {}",
                    words.join(" "),
                    ended.stderr
                );
                named += 1;
            }
        }
        ensure!(named > 10, "only {named} commands were found in the text");
        Ok(())
    });
}

/// Documents without shown commands.
const UNSHOWN: [&str; 8] = [
    "docs/README.md",
    "docs/compare.md",
    "docs/distributions.md",
    "docs/failure-modes.md",
    "docs/journal.md",
    "docs/json.md",
    "docs/parity.md",
    "docs/security.md",
];

/// Text between backquotes that begins with bindguard's name, with placeholders as words.
fn named_in(document: &str) -> Result<Vec<String>> {
    let path = repository().join(document);
    let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    let prose: String = text.split("```").step_by(2).collect();
    let spans = prose
        .split('`')
        .skip(1)
        .step_by(2)
        .filter(|span| span.starts_with("bindguard "));
    Ok(spans
        .map(|span| span.replace(['[', ']'], "").replace('\n', " "))
        .collect())
}

#[test]
fn readme() {
    Setup::on(Generation::V1_7).bare().cri().story(|node| {
        symlink(
            node.disk().join("dist").join(CLI),
            node.programs().join(CLI),
        )
        .context("put bindguard on PATH")?;
        let said = rehearse(node, "README.md", "")?;
        let says = |words: &str| said.iter().any(|one| one.stdout.contains(words));
        ensure!(
            says("+++ /etc/containerd/config.toml") && says("re-bound to the current target"),
            "{said:?}"
        );
        Ok(())
    });
}

#[test]
fn integration_readme() {
    Setup::on(Generation::V1_7)
        .cri()
        .story(|node| rehearse(node, "integration/README.md", "bindguard").map(drop));
}

#[test]
fn runbook() {
    Setup::on(Generation::V2_1).cri().story(|node| {
        let said = rehearse(node, "docs/runbook.md", "bindguard")?;
        let says = |words: &str| said.iter().any(|one| one.stdout.contains(words));
        ensure!(
            says("would be re-bound") && says("re-bound to the current target"),
            "nothing was repaired: {said:?}"
        );
        ensure!(
            said.last()
                .is_some_and(|bundle| bundle.stdout.starts_with("2 checked")),
            "no bundle: {said:?}"
        );
        Ok(())
    });
}

/// The state of all nodes, from the installer's pods. kubectl lists the pods; a container of the
/// node's mount namespace with the root at /host runs what `kubectl exec` is to run.
#[test]
fn agent() {
    if let Some(why) = engines::missing() {
        return privilege::skipped(&why);
    }
    Setup::on(Generation::V2_1).cri().story(|node| {
        let api = KubeApi::start()?;
        let path = "/api/v1/namespaces/kube-system/pods";
        let pod = json!({"metadata": {"name": "bindguard-x7k2p"}, "spec": {"nodeName": "node-1"}});
        api.insert(
            path,
            json!({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": [pod]}),
        );
        api.write_config(KUBECONFIG.as_ref())?;
        let kubectl = node.programs().join("kubectl");
        fs::write(
            &kubectl,
            format!(
                "#!/bin/sh\n\
                 case \"$*\" in\n\
                 '--namespace kube-system exec bindguard-x7k2p -- '*) shift 5\n\
                   exec unshare --mount sh -ec 'mkdir -p /host; mount --rbind / /host; exec \"$@\"' sh \"$@\";;\n\
                 *) exec {} \"$@\";;\n\
                 esac\n",
                engines::program("kubectl").display()
            ),
        )?;
        fs::set_permissions(&kubectl, Permissions::from_mode(0o755))?;
        let said = Rehearsal::on(node)
            .env("KUBECONFIG", KUBECONFIG)
            .play("docs/agent.md")?;
        let table = &said.first().context("a command")?.stdout;
        ensure!(
            table.starts_with("node-1\t") && table.contains("\tcontainerd=bindguard"),
            "{said:?}"
        );
        Ok(())
    });
}

#[test]
fn contributing_and_support() {
    Setup::on(Generation::V1_7).story(|node| {
        for document in ["CONTRIBUTING.md", "docs/support.md"] {
            Rehearsal::on(node).folder(&repository()).play(document)?;
        }
        Ok(())
    });
}

/// kubectl applies the operations and the rights.
#[test]
fn kubediag() {
    if let Some(why) = engines::missing() {
        return privilege::skipped(&why);
    }
    Setup::on(Generation::V1_7).story(|node| {
        let api = KubeApi::start()?;
        api.write_config(KUBECONFIG.as_ref())?;
        symlink(engines::program("kubectl"), node.programs().join("kubectl"))
            .context("put kubectl on PATH")?;
        Rehearsal::on(node)
            .folder(&repository())
            .env("KUBECONFIG", KUBECONFIG)
            .play("docs/kubediag.md")?;
        let applied = api.taken();
        ensure!(
            applied.iter().any(|kind| kind.starts_with("OperationSet "))
                && applied.iter().any(|kind| kind.starts_with("ClusterRole ")),
            "{applied:?}"
        );
        Ok(())
    });
}

/// Its commands on mounts need no containers, only a kernel.
#[test]
fn mounts() {
    Setup::on(Generation::V1_7).story(|node| {
        let said = Rehearsal::on(node).play("docs/mounts.md")?;
        ensure!(
            said.iter().any(|one| one.stdout == "one\ntwo\n"),
            "the bind has not the old file: {said:?}"
        );
        ensure!(
            said.iter().any(|one| one.stdout.contains("does not start")),
            "nothing fails there: {said:?}"
        );
        Ok(())
    });
}

/// A pod default/web, of this runtime handler, whose configMap changed.
fn rehearse(node: &Node, document: &str, handler: &str) -> Result<Vec<Finished>> {
    let pod = node.kubelet().pod("0c1d")?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
    let source = volume.subpath("app", 0, "app.conf");
    let mounts = [mount(source.bind()?, "/etc/app.conf", PropagationPrivate)];
    let spec = Bundle::spec(&[Bundle::bind(source.target(), "/etc/app.conf")]);
    let bundle = Bundle::create(node, "shown", spec.to_string().as_bytes())?;
    let cri = node.cri()?;
    let sandbox = cri.run_pod(handler, "web", pod.uid())?;
    cri.start_container(&sandbox, "app", &["sleep", "1000000"], &mounts)?;
    volume.update(&[("app.conf", "two")])?;
    let here = if document.starts_with("docs/") {
        node.disk().to_path_buf()
    } else {
        repository()
    };
    let played = Rehearsal::on(node)
        .folder(&here)
        .instead_of("target/*/release/bindguard ", "bindguard ")
        .systemd("restart containerd", || {
            node.restart_containerd(Signal::SIGTERM)
        })
        .reads_all_processes("bindguard doctor")
        .reads_all_processes("bindguard holders")
        .with(
            "/var/lib/kubelet",
            &node.kubelet().root().display().to_string(),
        )
        .with("BUNDLE", &bundle.path().display().to_string())
        .with("MOUNT_POINT", &source.target().display().to_string())
        .play(document);
    let said = played.with_context(|| format!("play {document}"))?;
    // containerd may have been restarted since
    node.cri()?.remove_pod(&sandbox)?;
    pod.delete()?;
    Ok(said)
}
