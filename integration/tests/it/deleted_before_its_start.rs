//! A container is created and deleted, and never started. No program has run, so there is no exit
//! to report: the answer has status 0, as with the stock shim, and no TaskExit arrives. The stock
//! shim's events are not compared: at a shutdown the stock shim drops unsent events.

use anyhow::{Context, Result, ensure};
use bindguard_integration::leftovers::Leftovers;
use bindguard_integration::shim::{Bundle, Shim};
use bindguard_integration::{Generation, Node, Runtime, Setup, events};
use containerd_shim_protos::shim::oci::Options;

#[test]
fn containerd_2_1() {
    Setup::on(Generation::V2_1)
        .not_with_youki("youki does not wait for the killed init, whose cgroup is then in use")
        .story(|node| {
            let before = Leftovers::of(node)?;
            // bindguard's shim first: a late event of the stock shim would look like an event of
            // bindguard's shim.
            let seen = events::during(node, || create_and_delete(node, Runtime::Bindguard))?;
            ensure!(seen == ["create web", "delete web"], "{seen:?}");
            create_and_delete(node, Runtime::Stock).context("stock")?;
            before.are_all(node)
        });
}

fn create_and_delete(node: &Node, runtime: Runtime) -> Result<()> {
    let bundle = Bundle::create(node, "web", &["sleep", "1000000"])?;
    let shim = match runtime {
        Runtime::Stock => Shim::start_stock(node, &bundle)?,
        _ => Shim::start(node, &bundle, &Options::default())?,
    };
    let client = shim.connect()?;
    let pid = client.create(&bundle.request())?;
    let deleted = client.delete("web", "")?;
    ensure!(
        (deleted.pid, deleted.exit_status) == (pid, 0),
        "{deleted:?}"
    );
    match client.shut_down("web") {
        // The stock shim may end before it has answered.
        Err(_) if runtime == Runtime::Stock => Ok(()),
        answer => Ok(answer?),
    }
}
