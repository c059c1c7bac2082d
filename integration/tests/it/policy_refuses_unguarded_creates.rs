//! Policy refuses: a guard that dies, hangs, panics or is missing lets no container through
//! unchecked: what it refuses may be there.
//!
//! A pod that may choose for itself, and wants nothing refused, starts anyway; so does every pod
//! where policy refuses nothing (guard_dies_or_is_missing, guard_stopped_past_deadline).

use std::fs;

use anyhow::{Context, Result, ensure};
use bindguard_integration::programs::GUARD;
use bindguard_integration::{Generation, Node, Runtime, Setup};

/// The deadline is never reached on a busy machine, except by a guard that hangs.
const POLICY: &str = "[guard]\ndeadline-ms = 20000\n[checks]\ndead-sources = \"refuse\"\n[annotations]\nmode = true\n";

#[test]
fn killed() {
    refused_after(
        "start",
        &[Runtime::Bindguard],
        "the guard did not hand over",
    );
}

#[test]
fn hung() {
    let short = POLICY.replace("20000", "400");
    Setup::on(Generation::V2_1)
        .fault("stop:start")
        .policy(&short)
        .story(|node| {
            refused(node, Runtime::Bindguard, "no answer within 400ms")?;
            starts_unguarded_by_its_own_choice(node)
        });
}

/// Also where no shim of ours starts the guard.
#[test]
fn panicked() {
    refused_after(
        "panic:start",
        &[Runtime::Bindguard, Runtime::Wrapper],
        "the guard panicked",
    );
}

#[test]
fn not_installed() {
    Setup::on(Generation::V2_1).policy(POLICY).story(|node| {
        let guard = node.programs().join(GUARD);
        fs::remove_file(&guard).with_context(|| format!("remove {}", guard.display()))?;
        refused(node, Runtime::Bindguard, "is not installed")?;
        starts_unguarded_by_its_own_choice(node)
    });
}

fn refused_after(fault: &str, runtimes: &[Runtime], why: &str) {
    Setup::on(Generation::V2_1)
        .fault(fault)
        .policy(POLICY)
        .story(|node| {
            runtimes
                .iter()
                .try_for_each(|runtime| refused(node, *runtime, why))?;
            if fault.starts_with("panic") {
                Ok(())
            } else {
                starts_unguarded_by_its_own_choice(node)
            }
        });
}

fn refused(node: &Node, runtime: Runtime, why: &str) -> Result<()> {
    let words = node
        .ctr()
        .container("unseen")
        .runtime(runtime)
        .start()?
        .failure()?;
    for said in [why, "policy refuses what may be there"] {
        ensure!(
            words.contains(said),
            "the error does not say {said:?}: {words}"
        );
    }
    node.ctr().forget("unseen")?;
    let tasks = node.ctr().tasks()?;
    ensure!(
        !tasks.contains("unseen"),
        "a refused container is still there: {tasks}"
    );
    Ok(())
}

fn starts_unguarded_by_its_own_choice(node: &Node) -> Result<()> {
    node.ctr()
        .container("willing")
        .annotation("bindguard.io/mode", "off")
        .start()?
        .success()?;
    node.ctr().remove("willing")
}
