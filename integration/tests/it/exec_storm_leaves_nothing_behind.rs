//! Two hundred execs in a container: the shim has as many descriptors, threads, children and
//! private memory as before.

use bindguard_integration::footprint::Footprint;
use bindguard_integration::prelude::*;

const WARM_UP: usize = 50;
const EXECS: usize = 200;
const AT_ONCE: usize = 8;

#[test]
fn newest_containerd() {
    Setup::on(Generation::NEWEST).story(story);
}

fn story(node: &Node) -> Result<()> {
    node.ctr().container("busy").start()?.success()?;
    let shim = node.shims()?.first().copied().context("find the shim")?;
    execs(node, "warm-up", WARM_UP)?;
    let mut seen = vec![Footprint::at_rest(shim)?];
    // how many of them meet is the scheduler's choice, and so is by how much the heap has to grow;
    // a leak grows each time
    for round in ["first", "second", "third"] {
        execs(node, round, EXECS)?;
        let (after, before) = (Footprint::at_rest(shim)?, seen[seen.len() - 1]);
        after.counts_no_more_than(&seen[0])?;
        seen.push(after);
        if after.has_about_the_memory_of(&before) {
            break;
        }
    }
    eprintln!("{seen:?}");
    let last = &seen[seen.len() - 2..];
    ensure!(
        last[1].has_about_the_memory_of(&last[0]),
        "it grows with every round: {seen:?}"
    );
    let bundle = format!(
        "/run/containerd/io.containerd.runtime.v2.task/{}/busy",
        node.name()
    );
    let files: Vec<_> = fs::read_dir(&bundle)?
        .flatten()
        .map(|entry| entry.file_name())
        .collect();
    ensure!(
        !files
            .iter()
            .any(|name| name.to_string_lossy().contains("exec")),
        "left in the bundle: {files:?}"
    );
    node.ctr().remove("busy")
}

fn execs(node: &Node, round: &str, count: usize) -> Result<()> {
    for batch in 0..count / AT_ONCE {
        let one = |number: usize| -> Result<Child> {
            let (id, code) = (
                format!("e-{round}-{batch}-{number}"),
                format!("exit {number}"),
            );
            let mut exec: Command =
                node.ctr()
                    .command(&["task", "exec", "--exec-id", &id, "busy", "sh", "-c", &code]);
            exec.spawn().with_context(|| format!("start exec {id}"))
        };
        let running: Vec<_> = (0..AT_ONCE).map(one).collect::<Result<_>>()?;
        for (number, mut exec) in running.into_iter().enumerate() {
            let code = exec.wait()?.code();
            ensure!(
                code == i32::try_from(number).ok(),
                "exec {number} ended with {code:?}"
            );
        }
    }
    Ok(())
}
