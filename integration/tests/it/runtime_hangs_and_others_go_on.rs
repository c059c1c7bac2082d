//! A runtime hangs in the create of a container: the shim's other containers live on, start, and
//! end.
//!
//! No lock is held across a runtime's call, and the client that gives up is not kept waiting.

use bindguard_integration::prelude::*;
use bindguard_integration::runtime::Gate;

const GROUP: &str = "io.containerd.runc.v2.group";

on_newest_and_older!(|generation| Setup::on(generation).obedient_runtime().story(story));

fn story(node: &Node) -> Result<()> {
    let (ctr, gate) = (node.ctr(), Gate::of(&node.programs()));
    let in_pod = |id: &'static str| ctr.container(id).annotation(GROUP, "pod");
    in_pod("first").start()?.success()?;
    gate.close()?;
    let mut hanging: Command = in_pod("hanging").command(&["--detach", "--null-io"]);
    let mut hanging = hanging
        .stdin(Stdio::null())
        .spawn()
        .context("run the container that hangs")?;
    gate.wait_for_call()?;
    ensure!(node.shims()?.len() == 1, "not one shim for the pod");

    ensure!(ctr.exec("first", &["sh", "-c", "exit 4"])?.code() == 4);
    in_pod("second").start()?.success()?;
    ensure!(ctr.exec("second", &["true"])?.code() == 0);
    ctr.remove("second")?;
    let tasks = run(ctr.command(&["task", "ps", "first"]))?.success()?;
    ensure!(tasks.lines().count() >= 2, "{tasks}");
    ensure!(
        hanging.try_wait().context("look at ctr")?.is_none(),
        "nothing hung while the others went on"
    );

    gate.open()?;
    ensure!(
        hanging.wait().context("wait for ctr")?.success(),
        "the create that hung has failed"
    );
    ensure!(ctr.exec("hanging", &["true"])?.code() == 0);
    ["hanging", "first"]
        .into_iter()
        .try_for_each(|id| ctr.remove(id))
}
