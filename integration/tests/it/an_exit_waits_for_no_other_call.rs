//! An init's exit arrives while the output of an ended exec is drained, and while the runtime hangs
//! killing the processes that the init left.

use bindguard_integration::prelude::*;
use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;

use bindguard_integration::runtime::Gate;
use bindguard_integration::shim::{Bundle, Shim, spec};
use containerd_shim_protos::api::ExecProcessRequest;
use containerd_shim_protos::shim::oci::Options;
use nix::libc::O_NONBLOCK;

#[test]
fn newest_containerd() {
    Setup::on(Generation::NEWEST)
        .obedient_runtime()
        .story(|node| {
            let before = Leftovers::of(node)?;
            an_exec_is_drained(node)?;
            the_runtime_hangs(node)?;
            before.are_all(node)
        });
}

fn an_exec_is_drained(node: &Node) -> Result<()> {
    let bundle = Bundle::create(node, "web", &["sleep", "1000000"])?;
    let shim = Shim::start(node, &bundle, &Options::default())?;
    let client = shim.connect()?;
    client.create(&bundle.request())?;
    client.start("web", "")?;
    let fifo = bundle.fifo("unread")?;
    // Not read, so that the delete of the exec waits as long as it may: ten seconds.
    let _reader = OpenOptions::new()
        .read(true)
        .custom_flags(O_NONBLOCK)
        .open(&fifo)
        .context("open the fifo")?;
    let exec = ExecProcessRequest {
        id: "web".into(),
        exec_id: "e".into(),
        stdout: fifo.display().to_string(),
        ..Default::default()
    };
    client.exec(exec, &["head", "-c", "100000", "/dev/zero"])?;
    client.start("web", "e")?;
    client.wait("web", "e")?;
    thread::scope(|scope| {
        let deleting = scope.spawn(|| {
            shim.connect()?
                .delete("web", "e")
                .context("delete the exec")
        });
        client.kill("web", "", 9)?;
        ensure!(client.wait("web", "")? == 137);
        ensure!(!deleting.is_finished(), "the exit waited for the delete");
        deleting
            .join()
            .map_err(|_| anyhow!("the client panicked"))?
    })?;
    client.delete("web", "")?;
    Ok(client.shut_down("web")?)
}

/// The others of a container without its own pid namespace are killed through the runtime.
fn the_runtime_hangs(node: &Node) -> Result<()> {
    let mut spec = spec(node, "shared", &["true"]);
    let namespaces = spec["linux"]["namespaces"].as_array_mut();
    namespaces
        .context("find the namespaces")?
        .retain(|namespace| namespace["type"] != "pid");
    let bundle = Bundle::create_with(node, "shared", &spec)?;
    let client = Shim::start(node, &bundle, &Options::default())?.connect()?;
    let gate = Gate::of(&node.programs());
    client.create(&bundle.request())?;
    gate.close_before("kill")?;
    client.start("shared", "")?;
    ensure!(client.wait("shared", "")? == 0);
    ensure!(gate.has_call(), "the runtime does not hang");
    gate.open()?;
    client.delete("shared", "")?;
    Ok(client.shut_down("shared")?)
}
