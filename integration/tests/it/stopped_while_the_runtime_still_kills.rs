//! A container is dead before the runtime that killed it has ended. containerd deletes a container
//! after the exit event, and then closes the connection. A kill without an answer by then fails,
//! and the kubelet's stop fails too.

use bindguard_integration::prelude::*;
use bindguard_integration::runtime::Gate;

/// Many times what containerd takes to delete what has exited.
const FOR_A_DELETE: Duration = Duration::from_millis(700);

fn story(generation: Generation) {
    Setup::on(generation)
        .cri()
        .obedient_runtime()
        .story(|node| {
            for handler in ["runc", "bindguard"] {
                stopped(node, handler)?;
            }
            Ok(())
        });
}

on_newest_and_older!(story);

/// For good: then the exit is published anyway, after ten seconds.
#[test]
fn a_runtime_that_hangs() {
    Setup::on(Generation::NEWEST)
        .obedient_runtime()
        .story(|node| {
            let (ctr, gate) = (node.ctr(), Gate::of(&node.programs()));
            ctr.container("web").start()?.success()?;
            gate.close_after("kill")?;
            thread::scope(|scope| {
                let kill = scope.spawn(|| ctr.kill("web", "KILL"));
                gate.wait_for_call()?;
                ctr.wait_for_status("web", "STOPPED")?;
                ensure!(!kill.is_finished(), "the runtime does not hang");
                gate.open()?;
                kill.join().map_err(|_| anyhow!("the client panicked"))?
            })?;
            ctr.remove("web")
        });
}

fn stopped(node: &Node, handler: &str) -> Result<()> {
    let (cri, kubelet, gate) = (node.cri()?, node.cri()?, Gate::of(&node.programs()));
    let pod = cri.run_pod(handler, "web", &format!("uid-{handler}"))?;
    let app = cri.start_container(&pod, "app", &["sleep", "1000000"], &[])?;
    gate.close_after("kill")?;
    thread::scope(|scope| {
        let stop = scope.spawn(move || kubelet.stop(&app, 0));
        gate.wait_for_call()?;
        thread::sleep(FOR_A_DELETE);
        ensure!(
            !stop.is_finished(),
            "{handler}: the stop did not wait for the runtime"
        );
        gate.open()?;
        stop.join().map_err(|_| anyhow!("the kubelet panicked"))?
    })?;
    cri.remove_pod(&pod)
}
