//! A container is written down by criu and goes on from there, on the same node.
//!
//! The criu is the newest generation's, also under the older ones: Debian 12's does not know the vdso of Linux 6.18. Where
//! the kernel does not let it work, the story is skipped aloud.

use std::os::unix::fs::symlink;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use bindguard_integration::privilege::skipped;
use bindguard_integration::process::run;
use bindguard_integration::programs::Matrix;
use bindguard_integration::waiting::until;
use bindguard_integration::{Generation, Node, Runtime, Setup, on_every_generation};

const COUNTER: [&str; 3] = ["sh", "-c", "n=0; while :; do n=$((n + 1)); echo $n > /count; sleep 0.01; done"];

fn works(generation: Generation) {
    Setup::on(generation).story(|node| {
        let Some(criu) = criu(node)? else {
            skipped("no criu that works with this kernel");
            return Ok(());
        };
        symlink(&criu, node.programs().join("criu")).context("put criu on containerd's PATH")?;
        [Runtime::Stock, Runtime::Bindguard].into_iter().try_for_each(|runtime| story(node, runtime))
    });
}

on_every_generation!(works);

fn story(node: &Node, runtime: Runtime) -> Result<()> {
    let ctr = node.ctr();
    let words = |words: &[&str]| run(ctr.command(words))?.success();
    ctr.container("first").runtime(runtime).argument("--net-host").runs(&COUNTER).start()?.success()?;
    let before = wait_for_count(node, "first", 30)?;
    words(&["containers", "checkpoint", "--task", "--rw", "--image", "first", "saved"])
        .with_context(|| criu_log(node))?;
    wait_for_count(node, "first", before + 1)?;
    ctr.remove("first")?;
    words(&["containers", "restore", "--live", "--rw", "second", "saved"])?;
    // one that was started anew would begin at 1
    let after = wait_for_count(node, "second", 1)?;
    ensure!(after >= before, "{runtime:?}: {before} before, {after} after");
    wait_for_count(node, "second", after + 1)?;
    ctr.remove("second")?;
    words(&["image", "rm", "saved"]).map(drop)
}

fn wait_for_count(node: &Node, id: &str, least: u64) -> Result<u64> {
    let mut count = 0;
    until(&format!("{id} counts up to {least}"), || {
        // empty in the moment between its truncation and the next line
        count = node.ctr().read(id, "/count")?.trim().parse().unwrap_or(0);
        Ok(count >= least)
    })?;
    Ok(count)
}

/// The last lines of criu's log, which lies in the bundle.
fn criu_log(node: &Node) -> String {
    let log = format!("/run/containerd/io.containerd.runtime.v2.task/{}/first/criu-dump.log", node.name());
    let text = std::fs::read_to_string(log).unwrap_or_else(|error| format!("no log of criu: {error}"));
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(12)..].join("\n")
}

/// Runs on the node: it writes what it learns of the kernel to `/run`.
fn criu(node: &Node) -> Result<Option<PathBuf>> {
    let program = Matrix::locate()?.program(Generation::V2_1, "criu");
    let mut check = node.command(&program)?;
    check.arg("check");
    Ok(run(check)?.status.success().then_some(program))
}
