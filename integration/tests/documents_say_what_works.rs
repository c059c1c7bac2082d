//! Every command that a document shows is run by a story: somebody will copy it at night.

use std::fs;

use anyhow::{Context, Result, ensure};
use bindguard_integration::bundle::Bundle;
use bindguard_integration::doc_commands::{Rehearsal, documents_with_commands, repository};
use bindguard_integration::{Bind, Generation, Node, Setup, VolumeKind};

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
    Setup::on(Generation::V1_7).story(|node| rehearse(node, "README.md"));
}

#[test]
fn integration_readme() {
    Setup::on(Generation::V1_7).story(|node| rehearse(node, "integration/README.md"));
}

/// Building, and what builds again when it is run, is rehearsed without being done.
fn rehearse(node: &Node, document: &str) -> Result<()> {
    let pod = node.kubelet().pod("0c1d")?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
    let source = volume.subpath("app", 0, "app.conf");
    let spec = Bundle::spec(&[Bundle::bind(source.bind()?, "/etc/app.conf")]);
    let bundle = Bundle::create(node, "shown", spec.to_string().as_bytes())?;
    node.ctr().container("app").mount(Bind::new(source.target(), "/etc/app.conf")).start()?.success()?;
    volume.update(&[("app.conf", "two")])?;
    Rehearsal::on(node)
        .folder(&repository())
        .instead_of("make ", "make --dry-run ")
        .instead_of("cargo ", ": cargo ")
        .instead_of("sh integration/", "sh -n integration/")
        .instead_of("install ", ": install ")
        .with("UID", pod.uid())
        .with("BUNDLE", &bundle.path().display().to_string())
        .play(document)?;
    node.ctr().remove("app")?;
    pod.delete()
}
