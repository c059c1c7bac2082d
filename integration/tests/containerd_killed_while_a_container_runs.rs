//! containerd is SIGKILLed, and meanwhile a container ends: its exit is told when containerd is back, with its status.
//!
//! A lost exit would leave a dead container "running" for ever.

use std::thread;
use std::time::Duration;

use anyhow::{Result, ensure};
use bindguard_integration::leftovers::Leftovers;
use bindguard_integration::process::run;
use bindguard_integration::{Generation, Node, Setup, on_every_generation};
use nix::sys::signal::Signal;

fn story(generation: Generation) {
    Setup::on(generation).story(tell);
}

on_every_generation!(story);

fn tell(node: &Node) -> Result<()> {
    let (ctr, before) = (node.ctr(), Leftovers::of(node)?);
    ctr.container("lasting").start()?.success()?;
    // it ends while there is no containerd: a start takes longer than that
    ctr.container("ending").runs(&["sh", "-c", "sleep 0.4; exit 5"]).start()?.success()?;
    let lasting = ctr.pid("lasting")?;
    node.restart_containerd(Signal::SIGKILL)?;
    ctr.wait_for_status("ending", "STOPPED")?;
    ctr.wait_for_status("lasting", "RUNNING")?;
    // 1.6 and 1.7 learn of their shims anew a moment after they answer
    thread::sleep(Duration::from_millis(200));
    ensure!(ctr.pid("lasting")? == lasting);
    ensure!(ctr.exec("lasting", &["sh", "-c", "exit 6"])?.code() == 6);
    let deleted = run(ctr.command(&["task", "delete", "ending"]))?;
    ensure!(deleted.stderr.contains("exit code 5") || deleted.code() == 5, "{deleted:?}");
    ctr.forget("ending")?;
    ctr.remove("lasting")?;
    before.are_all(node)
}
