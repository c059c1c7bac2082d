//! With systemd as cgroup manager, the shim is SIGKILLed at many moments of a create: no scope
//! stays, and the name can be used again. systemd starts a scope asynchronously, so the runtime may
//! die before the scope has a process.

use bindguard_integration::on_every_generation_with_systemd;
use bindguard_integration::prelude::*;
use bindguard_integration::systemd::{slice_members, units};

/// From before the runtime starts until after it has ended.
const DELAYS_MS: [u64; 12] = [0, 25, 50, 75, 100, 150, 200, 250, 300, 400, 500, 700];

on_every_generation_with_systemd!(|setup: Setup| setup.story(story));

fn story(node: &Node) -> Result<()> {
    let before = Leftovers::of(node)?;
    for delay in DELAYS_MS {
        killed_after(node, Duration::from_millis(delay))
            .with_context(|| format!("after {delay} ms"))?;
    }
    before.are_all(node)
}

fn killed_after(node: &Node, delay: Duration) -> Result<()> {
    let ctr = node.ctr();
    let client = node.ctr();
    let create = thread::spawn(move || client.container("web").start());
    until("the shim runs", || {
        Ok(create.is_finished() || !node.shims()?.is_empty())
    })?;
    thread::sleep(delay);
    for shim in node.shims()? {
        // It may have ended meanwhile.
        let _ = kill(Pid::from_raw(shim.try_into()?), Signal::SIGKILL);
    }
    let _ = create
        .join()
        .map_err(|_| anyhow::anyhow!("the create panicked"))??;
    ctr.end_task("web")?;
    let scope = format!("{}-web.scope", node.name());
    let is_gone = until("the scope is gone", || Ok(units(&scope)?.is_empty()));
    is_gone.with_context(|| {
        format!(
            "the processes of {}: {:?}",
            node.name(),
            node.all_processes()
        )
    })?;
    ensure!(
        slice_members(node.name())?.is_empty(),
        "cgroups are left: {:?}",
        slice_members(node.name())?
    );
    ctr.forget("web")
}
