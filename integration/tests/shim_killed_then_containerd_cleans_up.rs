//! The shim is SIGKILLed, as by the kernel's out-of-memory killer: the container ends, containerd tells of its exit, and
//! nothing is left: no process, no mount, no socket, no state of runc, and the name can be used again.

use std::time::{Duration, Instant};
use std::{fs, thread};

use anyhow::{Result, ensure};
use bindguard_integration::leftovers::Leftovers;
use bindguard_integration::{Generation, Node, Setup, mounts, on_every_generation};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

fn story(generation: Generation) {
    Setup::on(generation).story(|node| {
        let before = Leftovers::of(node)?;
        for _ in 0..2 {
            shim_dies(node)?;
        }
        before.are_all(node)
    });
}

on_every_generation!(story);

fn shim_dies(node: &Node) -> Result<()> {
    let ctr = node.ctr();
    ctr.container("orphan").start()?.success()?;
    let init = ctr.pid("orphan")?;
    for shim in node.shims()? {
        kill(Pid::from_raw(shim.try_into()?), Signal::SIGKILL)?;
    }
    until("the container's init ends", || !fs::exists(format!("/proc/{init}")).unwrap_or(true))?;
    until("containerd forgets the task", || ctr.tasks().is_ok_and(|table| !table.contains("orphan")))?;
    until("the root filesystem is unmounted", || {
        mounts::table().is_ok_and(|table| !table.iter().any(|mount| mount.target.ends_with("orphan/rootfs")))
    })?;
    ctr.forget("orphan")
}

fn until(what: &str, done: impl Fn() -> bool) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !done() {
        ensure!(Instant::now() < deadline, "it does not happen that {what}");
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}
