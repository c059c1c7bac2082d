//! The kubelet queries a container's figures all the time, and resizes it in place: both go through
//! the shim.

use bindguard_integration::on_every_generation_with_systemd;
use bindguard_integration::prelude::*;

const BUSY: [&str; 3] = ["sh", "-c", "while :; do :; done"];

on_newest_and_older!(|generation| Setup::on(generation).cri().story(story));

on_every_generation_with_systemd!(|setup: Setup| setup.cri().story(story));

fn story(node: &Node) -> Result<()> {
    let cri = node.cri()?;
    for handler in ["runc", "bindguard"] {
        let pod = cri.run_pod(handler, "busy", &format!("uid-{handler}"))?;
        let app = cri.start_container(&pod, "app", &BUSY, &[])?;
        let (cpu, _) = cri.usage(&app)?;
        // a processor has to get to it, and the kernel to counting it
        until(&format!("{handler}: memory is in use"), || {
            Ok(cri.usage(&app)?.1 > 0)
        })?;
        until(&format!("{handler}: CPU time passes"), || {
            Ok(cri.usage(&app)?.0 > cpu)
        })?;

        cri.limit_memory(&app, 64 << 20)?;
        let limit = cri.exec(
            &app,
            &[
                "sh",
                "-c",
                "cat /sys/fs/cgroup/memory/memory.limit_in_bytes || cat /sys/fs/cgroup/memory.max",
            ],
        )?;
        ensure!(
            limit.stdout.trim() == (64 << 20).to_string(),
            "{handler}: the limit is {limit:?}"
        );
        cri.remove_pod(&pod)?;
    }
    Ok(())
}
