//! A method of the shim panics for a container: the call answers INTERNAL, the container can be
//! removed, and the shim still serves its other containers.

use bindguard_integration::prelude::*;
use bindguard_integration::shim::{Bundle, Shim, code};
use containerd_shim_protos::api::ExecProcessRequest;
use containerd_shim_protos::shim::oci::Options;
use ttrpc::Code;

#[test]
fn newest_containerd() {
    Setup::on(Generation::NEWEST).fault_points().story(|node| {
        let before = Leftovers::of(node)?;
        story(node)?;
        before.are_all(node)
    });
}

fn story(node: &Node) -> Result<()> {
    let words = ["sleep", "1000000"];
    let lasting = Bundle::create(node, "lasting", &words)?;
    let client = Shim::start(node, &lasting, &Options::default())?.connect()?;
    client.create(&lasting.request())?;
    client.start("lasting", "")?;

    let broken = Bundle::create(node, "panic-in-create", &words)?;
    ensure!(code(client.create(&broken.request()))? == Code::INTERNAL);
    // the name is free again, and breaks again
    ensure!(code(client.create(&broken.request()))? == Code::INTERNAL);

    let broken = Bundle::create(node, "panic-in-start", &words)?;
    client.create(&broken.request())?;
    ensure!(code(client.start(broken.id(), ""))? == Code::INTERNAL);
    client.delete(broken.id(), "")?;

    let broken = Bundle::create(node, "panic-in-state", &words)?;
    client.create(&broken.request())?;
    ensure!(code(client.state(broken.id(), ""))? == Code::INTERNAL);
    client.start(broken.id(), "")?;
    client.end(broken.id())?;

    let (id, exec_id) = ("lasting".to_owned(), "e".to_owned());
    client.exec(
        ExecProcessRequest {
            id,
            exec_id,
            ..Default::default()
        },
        &["sh", "-c", "exit 4"],
    )?;
    client.start("lasting", "e")?;
    ensure!(
        client.wait("lasting", "e")? == 4,
        "the other container is harmed"
    );
    client.delete("lasting", "e")?;
    ensure!(client.end("lasting")?.exit_status == 137);
    Ok(client.shut_down("lasting")?)
}
