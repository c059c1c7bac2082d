//! The start of a container from a checkpoint fails after criu's work: nothing of the container
//! runs, and the start can be tried again. A kill that arrives during criu's work reaches the
//! container.

use bindguard_integration::prelude::*;
use bindguard_integration::runtime::Gate;
use bindguard_integration::shim::{Bundle, Shim};
use containerd_shim_protos::api::CheckpointTaskRequest;
use containerd_shim_protos::shim::oci::Options;
use protobuf::well_known_types::any::Any;

/// Many times what a refusal takes.
const FOR_AN_ANSWER: Duration = Duration::from_millis(700);

#[test]
fn newest_containerd() {
    Setup::on(Generation::NEWEST)
        .obedient_runtime()
        .story_with_criu(|node| {
            let before = Leftovers::of(node)?;
            let images = node.disk().join("images").display().to_string();
            write_images(node, &images)?;
            restore(node, images)?;
            before.are_all(node)
        });
}

fn write_images(node: &Node, path: &str) -> Result<()> {
    let bundle = Bundle::create(node, "first", &["sleep", "1000000"])?;
    fs::create_dir(bundle.path().join("work")).context("make criu's folder")?;
    let client = Shim::start(node, &bundle, &Options::default())?.connect()?;
    client.create(&bundle.request())?;
    client.start("first", "")?;
    // exit
    let options = Any {
        type_url: "containerd.runc.v1.CheckpointOptions".to_owned(),
        value: b"\x08\x01".to_vec(),
        ..Default::default()
    };
    let request = CheckpointTaskRequest {
        id: "first".to_owned(),
        path: path.to_owned(),
        options: Some(options).into(),
        ..Default::default()
    };
    client.call(async |task, context| task.checkpoint(context, &request).await)?;
    client.wait("first", "")?;
    client.delete("first", "")?;
    Ok(client.shut_down("first")?)
}

fn restore(node: &Node, images: String) -> Result<()> {
    let bundle = Bundle::create(node, "second", &["sleep", "1000000"])?;
    fs::create_dir(bundle.path().join("work")).context("make criu's folder")?;
    let shim = Shim::start(node, &bundle, &Options::default())?;
    let (client, gate) = (shim.connect()?, Gate::of(&node.programs()));
    let mut request = bundle.request();
    request.checkpoint = images;
    client.create(&request)?;

    gate.close_after("restore")?;
    thread::scope(|scope| {
        let start = scope.spawn(|| shim.connect()?.start("second", "").context("start"));
        gate.wait_for_call()?;
        fs::remove_file(bundle.path().join("init.pid")).context("remove the pid file")?;
        gate.open()?;
        let started = start.join().map_err(|_| anyhow!("the client panicked"))?;
        ensure!(started.is_err(), "it has no pid, and was started");
        anyhow::Ok(())
    })?;
    let state = Path::new("/run/containerd/runc")
        .join(node.name())
        .join("second");
    ensure!(!state.try_exists()?, "a container whose start failed runs");

    gate.close_before("restore")?;
    thread::scope(|scope| {
        let start = scope.spawn(|| shim.connect()?.start("second", "").context("start"));
        gate.wait_for_call()?;
        let kill = scope.spawn(|| shim.connect()?.kill("second", "", 9).context("kill"));
        thread::sleep(FOR_AN_ANSWER);
        gate.open()?;
        let join = |_| anyhow!("the client panicked");
        start.join().map_err(join)??;
        kill.join().map_err(join)?
    })?;
    ensure!(client.wait("second", "")? == 137);
    client.delete("second", "")?;
    Ok(client.shut_down("second")?)
}
