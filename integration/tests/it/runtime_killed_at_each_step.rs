//! The runtime is SIGKILLed at each step of create, start, exec and delete, also between the end of
//! the work and the answer. The call fails or succeeds, the container can always be removed, and
//! nothing is left.

use bindguard_integration::Ctr;
use bindguard_integration::prelude::*;
use bindguard_integration::runtime::{Fault, ObedientRuntime};

/// The runtime takes some 30 ms for each of these verbs on an idle machine.
const DELAYS_MS: [u64; 6] = [1, 6, 12, 18, 26, 36];
/// For the older generations, each with an older runc. The newest generation has more delays.
const SOME_DELAYS_MS: [u64; 2] = [8, 16];

fn works(generation: Generation) {
    let delays: &[u64] = if generation == Generation::NEWEST {
        &DELAYS_MS
    } else {
        &SOME_DELAYS_MS
    };
    Setup::on(generation)
        .obedient_runtime()
        .story(|node| story(node, &faults(delays)));
}

on_newest_and_older!(works);

fn story(node: &Node, faults: &[Fault]) -> Result<()> {
    let before = Leftovers::of(node)?;
    for fault in faults {
        for verb in ["create", "start", "delete"] {
            a_life(node, verb, *fault).with_context(|| format!("{verb}: {fault:?}"))?;
            before
                .are_all(node)
                .with_context(|| format!("{verb}: {fault:?}"))?;
        }
    }
    execs(node, faults)?;
    before.are_all(node).context("execs")
}

fn faults(delays: &[u64]) -> Vec<Fault> {
    let early_and_late = delays
        .iter()
        .map(|delay| Fault::Killed(Duration::from_millis(*delay)));
    early_and_late.chain([Fault::KilledAfterwards]).collect()
}

fn a_life(node: &Node, verb: &str, fault: Fault) -> Result<()> {
    let (ctr, runtime) = (node.ctr(), ObedientRuntime::of(&node.programs()));
    runtime.next(verb, fault)?;
    let started = ctr.container("web").start()?;
    if verb != "delete" {
        ensure!(!runtime.take_back(verb), "the runtime was not called");
    }
    if started.code() == 0 {
        ensure!(
            ctr.exec("web", &["true"])?.code() == 0,
            "it was started and does not run"
        );
    }
    remove(&ctr, "web")
}

/// A delete may fail for the fault, and then works when it is retried.
fn remove(ctr: &Ctr, id: &str) -> Result<()> {
    // there is no task where the create has failed
    for _ in 0..2 {
        let removed = run(ctr.command(&["task", "rm", "--force", id]))?;
        if removed.code() == 0 || removed.stderr.contains("not found") {
            break;
        }
    }
    let tasks = ctr.tasks()?;
    ensure!(!tasks.contains(id), "it cannot be removed: {tasks}");
    ctr.forget(id)
}

fn execs(node: &Node, faults: &[Fault]) -> Result<()> {
    let (ctr, runtime) = (node.ctr(), ObedientRuntime::of(&node.programs()));
    ctr.container("web").start()?.success()?;
    let before = Leftovers::of(node)?;
    for fault in faults {
        runtime.next("exec", *fault)?;
        // whatever comes of it: a process that was made anyway must not be left
        let _ = ctr.exec("web", &["true"])?;
        ensure!(!runtime.take_back("exec"), "the runtime was not called");
        ensure!(
            ctr.exec("web", &["sh", "-c", "exit 3"])?.code() == 3,
            "{fault:?}: the next exec"
        );
        before
            .are_all(node)
            .with_context(|| format!("exec: {fault:?}"))?;
    }
    remove(&ctr, "web")
}
