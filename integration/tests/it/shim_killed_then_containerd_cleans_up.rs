//! The shim is SIGKILLed, as by the kernel's out-of-memory killer: the container ends, containerd
//! reports its exit, and nothing is left: no process, no mount, no socket, no state of runc, and
//! the name can be used again.

use bindguard_integration::prelude::*;
use bindguard_integration::{mounts, on_every_generation_with_systemd};

on_newest_and_older!(|generation| Setup::on(generation).story(story));

on_every_generation_with_systemd!(|setup: Setup| setup.story(story));

fn story(node: &Node) -> Result<()> {
    let before = Leftovers::of(node)?;
    for _ in 0..2 {
        shim_dies(node)?;
    }
    before.are_all(node)
}

fn shim_dies(node: &Node) -> Result<()> {
    let ctr = node.ctr();
    ctr.container("orphan").start()?.success()?;
    let init = ctr.pid("orphan")?;
    for shim in node.shims()? {
        kill(Pid::from_raw(shim.try_into()?), Signal::SIGKILL)?;
    }
    until("the container's init has ended", || {
        Ok(!fs::exists(format!("/proc/{init}"))?)
    })?;
    until("containerd has forgotten the task", || {
        Ok(!ctr.tasks()?.contains("orphan"))
    })?;
    until("the root filesystem is unmounted", || {
        Ok(!mounts::table()?
            .iter()
            .any(|mount| mount.target.ends_with("orphan/rootfs")))
    })?;
    ctr.forget("orphan")
}
