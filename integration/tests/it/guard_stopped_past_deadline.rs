//! A guard that does not come to an end, as with a source on a dead server: the shim goes on
//! without it.
//!
//! A guard that breaks creates is worse than the fault it guards against.

use bindguard_integration::prelude::*;
use bindguard_integration::waiting::LIMIT;

on_newest_and_older!(|generation| Setup::on(generation).fault("stop:start").story(story));

/// A shim reads the config for each create: a pod that runs for months sees a change.
#[test]
fn deadline_changes_under_a_running_pod() {
    Setup::on(Generation::NEWEST)
        .fault("stop:start")
        .story(|node| {
            let ctr = node.ctr();
            for (id, deadline) in [("first", "150"), ("second", "75")] {
                let config = node.disk().join("bindguard.toml");
                fs::write(config, format!("[guard]\ndeadline-ms = {deadline}\n"))?;
                ctr.container(id)
                    .annotation("io.containerd.runc.v2.group", "pod")
                    .start()?
                    .success()?;
                let words = format!("no answer within {deadline}ms");
                node.wait_for_log(&words, |line| line.contains(&words))?;
            }
            ensure!(node.shims()?.len() == 1, "not one shim for the pod");
            ["second", "first"]
                .into_iter()
                .try_for_each(|id| ctr.remove(id))
        });
}

fn story(node: &Node) -> Result<()> {
    let agent = Agent::start(node, "")?;
    let begin = Instant::now();
    node.ctr().container("patient").start()?.success()?;
    let taken = begin.elapsed();
    ensure!(
        taken > Duration::from_millis(1500),
        "the guard was not stopped: the create took {taken:?}"
    );
    ensure!(taken < LIMIT, "the create took {taken:?}");
    ensure!(node.ctr().exec("patient", &["true"])?.code() == 0);
    node.ctr().remove("patient")?;
    node.wait_for_log("that the guard was late", |line| {
        line.contains("the guard did not hand over")
    })?;
    until("the agent counts the create", || {
        Ok(agent.figure("bindguard_unchecked_creates_total{reason=\"late\"}") == 1.0)
    })?;
    ensure!(agent.figure("bindguard_unchecked_creates_total{reason=\"died\"}") == 0.0);
    ensure!(agent.figure("bindguard_admission_seconds_count") == 0.0);
    let journal = node.bindguard(["journal"])?.stdout;
    ensure!(
        journal.contains("no guard checked this create: no answer within"),
        "{journal}"
    );
    Ok(())
}
