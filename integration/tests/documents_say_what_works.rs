//! Every command that a document shows is run by a story: somebody will copy it at night.

use std::fs;

use anyhow::{Context, Result, ensure};
use bindguard_integration::bundle::Bundle;
use bindguard_integration::cri::mount;
use bindguard_integration::doc_commands::{Rehearsal, documents_with_commands, repository};
use bindguard_integration::process::Finished;
use bindguard_integration::{Generation, Node, Setup, VolumeKind};
use k8s_cri::v1::MountPropagation::PropagationPrivate;

/// A document is named, in quotes, by the story that runs it.
#[test]
fn every_document_with_commands_is_run() -> Result<()> {
    let folder = repository().join("integration/tests");
    let mut stories = String::new();
    for entry in fs::read_dir(&folder).with_context(|| format!("list {}", folder.display()))? {
        let path = entry?.path();
        stories.push_str(&fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?);
    }
    let missing: Vec<String> =
        documents_with_commands()?.into_iter().filter(|name| !stories.contains(&format!("{name:?}"))).collect();
    ensure!(missing.is_empty(), "no story runs the commands of {missing:?}");
    Ok(())
}

#[test]
fn readme() {
    Setup::on(Generation::V1_7).cri().story(|node| rehearse(node, "README.md").map(drop));
}

#[test]
fn integration_readme() {
    Setup::on(Generation::V1_7).cri().story(|node| rehearse(node, "integration/README.md").map(drop));
}

#[test]
fn runbook() {
    Setup::on(Generation::V2_1).cri().story(|node| {
        let said = rehearse(node, "docs/runbook.md")?;
        let says = |words: &str| said.iter().any(|one| one.stdout.contains(words));
        ensure!(says("would be re-bound") && says("re-bound to the current target"), "nothing was mended: {said:?}");
        ensure!(said.last().is_some_and(|bundle| bundle.stdout.starts_with("2 looked at")), "no bundle: {said:?}");
        Ok(())
    });
}

/// What is shown there of mounts needs no containers, only a kernel.
#[test]
fn mounts() {
    Setup::on(Generation::V1_7).story(|node| {
        let said = Rehearsal::on(node).play("docs/mounts.md")?;
        ensure!(said.iter().any(|one| one.stdout == "one\ntwo\n"), "the bind has not the old file: {said:?}");
        ensure!(said.iter().any(|one| one.stdout.contains("does not start")), "nothing fails there: {said:?}");
        Ok(())
    });
}

/// A pod default/web whose configMap changed. Building, and what builds again when it is run, is rehearsed without being done.
fn rehearse(node: &Node, document: &str) -> Result<Vec<Finished>> {
    let pod = node.kubelet().pod("0c1d")?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
    let source = volume.subpath("app", 0, "app.conf");
    let mounts = [mount(source.bind()?, "/etc/app.conf", PropagationPrivate)];
    let spec = Bundle::spec(&[Bundle::bind(source.target(), "/etc/app.conf")]);
    let bundle = Bundle::create(node, "shown", spec.to_string().as_bytes())?;
    let cri = node.cri()?;
    let sandbox = cri.run_pod("bindguard", "web", pod.uid())?;
    cri.start_container(&sandbox, "app", &["sleep", "1000000"], &mounts)?;
    volume.update(&[("app.conf", "two")])?;
    let here = if document.starts_with("docs/") { node.disk().to_path_buf() } else { repository() };
    let played = Rehearsal::on(node)
        .folder(&here)
        .instead_of("make ", "make --dry-run ")
        .instead_of("cargo ", ": cargo ")
        .instead_of("sh integration/", "sh -n integration/")
        .instead_of("target/*/release/bindguard ", ": bindguard ")
        .instead_of("bindguard uninstall", ": bindguard uninstall")
        .instead_of("systemctl ", ": systemctl ")
        .looks_at_all_processes("bindguard doctor")
        .looks_at_all_processes("bindguard holders")
        .with("/var/lib/kubelet", &node.kubelet().root().display().to_string())
        .with("BUNDLE", &bundle.path().display().to_string())
        .with("MOUNT_POINT", &source.target().display().to_string())
        .play(document);
    let said = played.with_context(|| format!("play {document}"))?;
    cri.remove_pod(&sandbox)?;
    pod.delete()?;
    Ok(said)
}
