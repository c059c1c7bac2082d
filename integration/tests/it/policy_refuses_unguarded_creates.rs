//! Under a policy of `refuse`, no container starts unchecked if the guard dies, hangs, panics or is
//! missing: the unchecked spec may have a bind that policy refuses.
//!
//! A pod whose annotation may set the policy, and sets no `refuse`, starts anyway. So does every
//! pod where policy refuses nothing (guard_dies_or_is_missing, guard_stopped_past_deadline).

use std::fs;

use anyhow::{Context, Result, ensure};
use bindguard_integration::programs::GUARD;
use bindguard_integration::waiting::until;
use bindguard_integration::{Generation, Node, Runtime, Setup};
use serde_json::Value;

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
            refusal_is_recorded(node, "late")?;
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
            refusal_is_recorded(node, "died")?;
            if fault.starts_with("panic") {
                Ok(())
            } else {
                starts_unguarded_by_its_own_choice(node)
            }
        });
}

fn refusal_is_recorded(node: &Node, unchecked: &str) -> Result<()> {
    until("the journal has the refusal", || {
        let ended = node.bindguard(["journal", "--json"])?;
        let journal: Value = serde_json::from_str(&ended.stdout)?;
        let lines = journal["admissions"].as_array().into_iter().flatten();
        Ok(lines.into_iter().any(|line| {
            line["id"] == "unseen"
                && line["unchecked"] == unchecked
                && line["refused"]
                    .to_string()
                    .contains("policy refuses what may be there")
        }))
    })
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
