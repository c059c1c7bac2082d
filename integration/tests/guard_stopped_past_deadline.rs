//! A guard that does not come to an end, as with a source on a dead server: the shim goes on without it.
//!
//! A guard that breaks creates is worse than the fault it guards against.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use bindguard_integration::{Generation, Node, Setup, on_every_generation};

fn story(generation: Generation) {
    Setup::on(generation).fault("stop:start").story(tell);
}

on_every_generation!(story);

fn tell(node: &Node) -> Result<()> {
    let begin = Instant::now();
    node.ctr().container("patient").start()?.success()?;
    let taken = begin.elapsed();
    ensure!(taken > Duration::from_millis(1500), "the guard was not stopped: the create took {taken:?}");
    ensure!(taken < Duration::from_secs(8), "the create took {taken:?}");
    ensure!(node.ctr().exec("patient", &["true"])?.code() == 0);
    node.ctr().remove("patient")?;
    ensure!(node.log()?.contains("the guard did not hand over"), "the log does not say that the guard was late");
    Ok(())
}
