//! The shim is SIGKILLed while the runtime works for it, early, late, and when the runtime has done
//! its work: containerd sees the end of its connection, and nothing is left, so that the name can
//! be used again.

use bindguard_integration::prelude::*;
use bindguard_integration::runtime::{Fault, ObedientRuntime};

const DELAYS_MS: [u64; 4] = [0, 8, 16, 28];
const SOME_DELAYS_MS: [u64; 1] = [14];

fn works(generation: Generation) {
    let delays: &[u64] = if generation == Generation::NEWEST {
        &DELAYS_MS
    } else {
        &SOME_DELAYS_MS
    };
    Setup::on(generation)
        .obedient_runtime()
        .story(|node| story(node, delays));
}

on_newest_and_older!(works);

fn story(node: &Node, delays: &[u64]) -> Result<()> {
    let before = Leftovers::of(node)?;
    let early_and_late = delays
        .iter()
        .map(|delay| Fault::ShimKilled(Duration::from_millis(*delay)));
    for fault in early_and_late.chain([Fault::ShimKilledAfterwards]) {
        for verb in ["create", "start", "exec", "delete"] {
            a_life(node, verb, fault).with_context(|| format!("{verb}: {fault:?}"))?;
            before
                .are_all(node)
                .with_context(|| format!("{verb}: {fault:?}"))?;
        }
    }
    Ok(())
}

fn a_life(node: &Node, verb: &str, fault: Fault) -> Result<()> {
    let (ctr, runtime) = (node.ctr(), ObedientRuntime::of(&node.programs()));
    runtime.next(verb, fault)?;
    let started = ctr.container("web").start()?;
    if started.code() == 0 {
        let _ = ctr.exec("web", &["true"])?;
        let _ = run(ctr.command(&["task", "rm", "--force", "web"]))?;
    }
    ensure!(!runtime.take_back(verb), "the runtime was not called");
    // containerd learns of the shim's end by itself, and cleans up
    ctr.end_task("web")?;
    ctr.forget("web")
}
