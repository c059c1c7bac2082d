//! Containers of one pod come and go without a sandbox that keeps their shim: each one's `start` finds the shim just when it
//! loses its last container. Every one of them runs, in this shim or in the next.

use std::process::Child;

use anyhow::{Context, Result, ensure};
use bindguard_integration::leftovers::Leftovers;
use bindguard_integration::{Generation, Node, Setup, on_every_generation};

const ROUNDS: usize = 10;
const AT_ONCE: usize = 3;

fn story(generation: Generation) {
    Setup::on(generation).story(tell);
}

on_every_generation!(story);

fn tell(node: &Node) -> Result<()> {
    let before = Leftovers::of(node)?;
    let mut running: Vec<(usize, Child)> = Vec::new();
    for number in 0..ROUNDS * AT_ONCE {
        if running.len() == AT_ONCE {
            ends_well(running.remove(0))?;
        }
        let (id, script) = (format!("c{number}"), format!("exit {}", number + 1));
        let ctr = node.ctr();
        let container = ctr.container(&id).annotation("io.containerd.runc.v2.group", "pod");
        let mut container = container.runs(&["sh", "-c", &script]).command(&["--rm"]);
        running.push((number, container.spawn().with_context(|| format!("start {id}"))?));
    }
    running.into_iter().try_for_each(ends_well)?;
    before.are_all(node)
}

fn ends_well((number, mut container): (usize, Child)) -> Result<()> {
    let code = container.wait()?.code();
    ensure!(code == i32::try_from(number + 1).ok(), "container {number} ended with {code:?}");
    Ok(())
}
