//! The output of a failing story: the mount table, the logs and the specs, before the node
//! vanishes.

use std::fs;
use std::path::{Path, PathBuf};

/// The last `lines` of a text.
pub(super) fn tail(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

/// Prints everything about a node that a reader of a failure needs first.
pub(super) fn print(name: &str, log: &Path, agent: &Path) {
    eprintln!("======== post mortem of {name} ========");
    section(
        "mountinfo",
        &read(Path::new("/proc/thread-self/mountinfo")),
        200,
    );
    section(
        "containerd's log (shims write to it too)",
        &without_plugins(&read(log)),
        80,
    );
    section("the agent's log", &read(agent), 80);
    section(
        "bindguard's journal",
        &read(Path::new("/run/bindguard/journal.jsonl")),
        20,
    );
    for file in bundle_files() {
        section(&file.display().to_string(), &read(&file), 40);
    }
    eprintln!("======== end of the post mortem of {name} ========");
}

/// A file's text, or why there is none.
fn read(file: &Path) -> String {
    fs::read_to_string(file).unwrap_or_else(|error| error.to_string())
}

/// containerd's start fills a hundred lines with its plugins.
fn without_plugins(log: &str) -> String {
    log.lines()
        .filter(|line| !line.contains("loading plugin"))
        .collect::<Vec<_>>()
        .join("\n")
}

fn section(title: &str, text: &str, lines: usize) {
    eprintln!("-------- {title}\n{}", tail(text, lines));
}

/// `config.json` and the runtime's logs of every bundle that still exists, at most eight bundles'
/// worth.
fn bundle_files() -> Vec<PathBuf> {
    let tasks = Path::new("/run/containerd/io.containerd.runtime.v2.task");
    let namespaces = tasks.read_dir().into_iter().flatten().flatten();
    let bundles = namespaces
        .flat_map(|namespace| namespace.path().read_dir().into_iter().flatten().flatten());
    let names = ["config.json", "log.json", "init.log"];
    bundles
        .take(8)
        .flat_map(|bundle| names.map(|name| bundle.path().join(name)))
        .filter(|file| file.is_file())
        .collect()
}
