//! A container is written down by criu and goes on from there, on the same node.

use bindguard_integration::criu::{COUNTER, wait_for_count};
use bindguard_integration::prelude::*;

fn works(generation: Generation) {
    Setup::on(generation).story_with_criu(|node| {
        [Runtime::Stock, Runtime::Bindguard]
            .into_iter()
            .try_for_each(|runtime| story(node, runtime))
    });
}

on_newest_and_older!(works);

fn story(node: &Node, runtime: Runtime) -> Result<()> {
    let ctr = node.ctr();
    let words = |words: &[&str]| run(ctr.command(words))?.success();
    ctr.container("first")
        .runtime(runtime)
        .argument("--net-host")
        .runs(&COUNTER)
        .start()?
        .success()?;
    let before = wait_for_count(node, "first", 30)?;
    words(&[
        "containers",
        "checkpoint",
        "--task",
        "--rw",
        "--image",
        "first",
        "saved",
    ])
    .with_context(|| criu_log(node))?;
    wait_for_count(node, "first", before + 1)?;
    ctr.remove("first")?;
    words(&["containers", "restore", "--live", "--rw", "second", "saved"])?;
    // A container without its checkpoint would count from 1.
    let after = wait_for_count(node, "second", 1)?;
    ensure!(
        after >= before,
        "{runtime:?}: {before} before, {after} after"
    );
    wait_for_count(node, "second", after + 1)?;
    let figures = words(&["task", "metrics", "second"]);
    // On cgroup v1 Go's shim of 2.3 and 2.4 has no figures of a restored container.
    if runtime == Runtime::Bindguard || node.generation() < Generation::V2_3 {
        figures.context("the figures of its cgroup")?;
    }
    ctr.remove("second")?;
    words(&["image", "rm", "saved"]).map(drop)
}

/// The last lines of criu's log, which lies in the bundle.
fn criu_log(node: &Node) -> String {
    let log = format!(
        "/run/containerd/io.containerd.runtime.v2.task/{}/first/criu-dump.log",
        node.name()
    );
    let text = fs::read_to_string(log).unwrap_or_else(|error| format!("no log of criu: {error}"));
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(12)..].join("\n")
}
