//! A pod whose containers share a pid namespace: when a container's init ends, the shim ends the
//! container's leftover processes, and the other container goes on. The kernel would not end
//! processes in a shared pid namespace.

use bindguard_integration::prelude::*;

fn works(generation: Generation) {
    Setup::on(generation).story(|node| {
        [Runtime::Stock, Runtime::Bindguard]
            .into_iter()
            .try_for_each(|runtime| story(node, runtime))
    });
}

on_newest_and_older!(works);

fn story(node: &Node, runtime: Runtime) -> Result<()> {
    let ctr = node.ctr();
    ctr.container("owner").runtime(runtime).start()?.success()?;
    let namespace = format!("pid:/proc/{}/ns/pid", ctr.pid("owner")?);
    let guest = ctr
        .container("guest")
        .runtime(runtime)
        .argument("--with-ns")
        .argument(&namespace);
    guest
        .runs(&["sh", "-c", "sleep 4321 & exec sleep 4322"])
        .start()?
        .success()?;
    let processes = || {
        ctr.exec_to_end("owner", &["ps"])
            .and_then(|ps| ps.success())
    };
    until(
        &format!("{runtime:?}: the guest has a second process"),
        || Ok(processes()?.contains("sleep 4321")),
    )?;

    ctr.kill("guest", "KILL")?;
    ctr.wait_for_status("guest", "STOPPED")?;
    until(
        &format!("{runtime:?}: nothing is left of the guest"),
        || Ok(!processes()?.contains("sleep 432")),
    )?;
    ctr.remove("guest")?;
    ctr.wait_for_status("owner", "RUNNING")?;
    ctr.remove("owner")
}
