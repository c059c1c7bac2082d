//! The kubelet asks for a container's figures all the time, and resizes it in place: both go through the shim.

use anyhow::{Result, ensure};
use bindguard_integration::{Generation, Node, Setup, on_every_generation};

const BUSY: [&str; 3] = ["sh", "-c", "while :; do :; done"];

fn story(generation: Generation) {
    Setup::on(generation).cri().story(tell);
}

on_every_generation!(story);

fn tell(node: &Node) -> Result<()> {
    let cri = node.cri()?;
    for handler in ["runc", "bindguard"] {
        let pod = cri.run_pod(handler, "busy", &format!("uid-{handler}"))?;
        let app = cri.start_container(&pod, "app", &BUSY, &[])?;
        let (cpu, memory) = cri.usage(&app)?;
        ensure!(memory > 0, "{handler}: no memory in use");
        cri.exec(&app, &["sleep", "0.2"])?;
        ensure!(cri.usage(&app)?.0 > cpu, "{handler}: no CPU time passes");

        cri.limit_memory(&app, 64 << 20)?;
        let limit = cri.exec(
            &app,
            &["sh", "-c", "cat /sys/fs/cgroup/memory/memory.limit_in_bytes || cat /sys/fs/cgroup/memory.max"],
        )?;
        ensure!(limit.stdout.trim() == (64 << 20).to_string(), "{handler}: the limit is {limit:?}");
        cri.remove_pod(&pod)?;
    }
    Ok(())
}
