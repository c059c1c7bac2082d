//! A create that fails, for the program, the runtime or the spec: the words are those of the stock
//! shim, and no process, mount, socket or state is left, so that the name can be used again.

use bindguard_integration::footprint::{parent_of, pipes_of};
use bindguard_integration::prelude::*;

fn story(generation: Generation) {
    Setup::on(generation).story(|node| {
        let before = Leftovers::of(node)?;
        for runtime in [Runtime::Stock, Runtime::Bindguard] {
            fails(
                node,
                runtime,
                "OCI runtime create failed: ",
                &["/no/such/program"],
                &[],
            )?;
            fails(
                node,
                runtime,
                "OCI runtime create failed: ",
                &["true"],
                &["--cwd", "relative"],
            )?;
            let mount = Bind::new("/no/such/source", "/mnt");
            let failed = node
                .ctr()
                .container("fails")
                .runtime(runtime)
                .mount(mount)
                .start()?;
            ensure!(failed.failure()?.contains("OCI runtime create failed: "));
            node.ctr().forget("fails")?;
        }
        let runc = node.programs().join("runc");
        fs::rename(&runc, node.programs().join("runc-away")).context("take the runtime away")?;
        fs::write(&runc, "#!/bin/sh\necho broken >&2; exit 3\n")
            .context("put a broken runtime in its place")?;
        Command::new("chmod").arg("755").arg(&runc).status()?;
        fails(
            node,
            Runtime::Bindguard,
            "OCI runtime create failed: ",
            &["true"],
            &[],
        )?;
        fs::remove_file(&runc)?;
        fs::rename(node.programs().join("runc-away"), &runc)?;
        leaves_the_pods_shim_no_pipe(node)?;
        before.are_all(node)?;
        ensure!(node.ctr().container("fails").runs(&["true"]).run()?.code() == 0);
        Ok(())
    });
}

on_newest_and_older!(story);

fn fails(
    node: &Node,
    runtime: Runtime,
    words: &str,
    program: &[&str],
    flags: &[&str],
) -> Result<()> {
    let container = node.ctr();
    let container = flags
        .iter()
        .fold(container.container("fails"), |container, flag| {
            container.argument(flag)
        });
    let error = container
        .runtime(runtime)
        .runs(program)
        .start()?
        .failure()?;
    ensure!(
        error.contains(words),
        "{runtime:?}: {error:?} and not {words:?}"
    );
    node.ctr().forget("fails")
}

/// The property that containerd's TestContainerIOLeakAfterStartFailed checks of a shim, by lsof(8):
/// no pipe at all.
fn leaves_the_pods_shim_no_pipe(node: &Node) -> Result<()> {
    let ctr = node.ctr();
    let in_pod = |id: &'static str| {
        ctr.container(id)
            .annotation("io.containerd.runc.v2.group", "pod")
    };
    in_pod("pause").start()?.success()?;
    let shim = parent_of(ctr.pid("pause")?)?;
    in_pod("fails")
        .runs(&["/no/such/program"])
        .run()?
        .failure()?;
    let pipes = pipes_of(shim)?;
    ensure!(pipes.is_empty(), "the shim keeps {pipes:?}");
    ctr.remove("pause")
}
