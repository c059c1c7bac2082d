//! The chart as helm renders it, and the programs that `make test` fetches.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

use crate::kube::documents;

pub const REGISTRY: &str = "image.registry=registry.example.com/ops";

/// helm, or `None` where the machine has none.
pub fn helm() -> Option<PathBuf> {
    program("BINDGUARD_HELM", "helm", "helm")
}

/// The documents of the chart with these values.
pub fn render(helm: &Path, values: &[&str]) -> Vec<Value> {
    render_for(helm, "1.32.0", values)
}

/// As `render`, for another version of Kubernetes.
pub fn render_for(helm: &Path, version: &str, values: &[&str]) -> Vec<Value> {
    let chart = folder("chart");
    let mut words = vec![
        "template",
        "bindguard",
        &chart,
        "--namespace",
        "kube-system",
        "--kube-version",
        version,
    ];
    [REGISTRY]
        .iter()
        .chain(values)
        .for_each(|value| words.extend(["--set", value]));
    let rendered = run(helm, &words);
    assert!(rendered.status.success(), "{values:?}: {rendered:?}");
    documents(&text(&rendered.stdout))
}

/// The object of this kind and name.
pub fn object<'d>(documents: &'d [Value], kind: &str, name: &str) -> Option<&'d Value> {
    documents
        .iter()
        .find(|document| document["kind"] == kind && document["metadata"]["name"] == name)
}

/// The only container of a DaemonSet's pods.
pub fn container<'d>(documents: &'d [Value], daemon_set: &str) -> &'d Value {
    &object(documents, "DaemonSet", daemon_set).unwrap()["spec"]["template"]["spec"]["containers"]
        [0]
}

/// A program that `make test` fetches. Without it the test is skipped, aloud.
pub fn program(variable: &str, folder: &str, name: &str) -> Option<PathBuf> {
    let fetched = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../target")
        .join(folder);
    let program = env::var_os(variable)
        .map_or(fetched, PathBuf::from)
        .join("bin")
        .join(name);
    let is_there = program.symlink_metadata().is_ok();
    if !is_there {
        eprintln!("SKIPPED: no {}: run make test", program.display());
    }
    is_there.then_some(program)
}

pub fn folder(name: &str) -> String {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join(name)
        .display()
        .to_string()
}

pub fn run(program: &Path, words: &[&str]) -> Output {
    Command::new(program).args(words).output().unwrap()
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
