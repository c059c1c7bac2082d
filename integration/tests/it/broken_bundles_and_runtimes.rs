//! A spec is no JSON, a runtime is missing, or a runtime leaves half a line in its log. The error
//! is clear, nothing is left, and the name can be used again.

use bindguard_integration::prelude::*;
use bindguard_integration::runtime::{Fault, ObedientRuntime};
use bindguard_integration::shim::{Bundle, Shim, code, options_any};
use containerd_shim_protos::shim::oci::Options;
use ttrpc::Code;

fn story(generation: Generation) {
    Setup::on(generation).obedient_runtime().story(|node| {
        let before = Leftovers::of(node)?;
        spec_is_cut(node)?;
        no_runtime(node)?;
        garbled_log(node)?;
        name_is_taken(node)?;
        before.are_all(node)?;
        ensure!(
            node.ctr()
                .container("web")
                .runs(&["sh", "-c", "exit 3"])
                .run()?
                .code()
                == 3
        );
        before.are_all(node)
    });
}

on_newest_and_older!(story);

/// The runtime has a container of that name, which another program made: it stays.
fn name_is_taken(node: &Node) -> Result<()> {
    let bundle = Bundle::create(node, "taken", &["sleep", "1000000"])?;
    let client = Shim::start(node, &bundle, &Options::default())?.connect()?;
    let state = Path::new("/run/containerd/runc")
        .join(node.name())
        .join("taken");
    fs::create_dir_all(&state).context("make the other's state")?;
    ensure!(code(client.create(&bundle.request()))? == Code::ALREADY_EXISTS);
    client.shut_down("taken")?;
    Shim::delete(node, &bundle)?;
    ensure!(state.try_exists()?, "the other's container is removed");
    fs::remove_dir(&state).context("remove the other's state")
}

/// The spec breaks between `start` and `create`, and before a `delete` of a container that runs.
fn spec_is_cut(node: &Node) -> Result<()> {
    let bundle = Bundle::create(node, "cut", &["sleep", "1000000"])?;
    let client = Shim::start(node, &bundle, &Options::default())?.connect()?;
    let spec = fs::read(bundle.path().join("config.json"))?;
    let broken = |bytes: &[u8]| {
        fs::write(bundle.path().join("config.json"), bytes).context("write the spec")
    };
    for bytes in [&spec[..spec.len() / 2], b"", b"[]"] {
        broken(bytes)?;
        let error = client
            .create(&bundle.request())
            .err()
            .context("it was created")?
            .to_string();
        ensure!(
            error.contains("parse /run/bundles/cut/config.json"),
            "{error}"
        );
    }
    broken(&spec)?;
    client.create(&bundle.request())?;
    client.start("cut", "")?;
    broken(b"{")?;
    ensure!(client.end("cut")?.exit_status == 137);
    Ok(client.shut_down("cut")?)
}

fn no_runtime(node: &Node) -> Result<()> {
    let bundle = Bundle::create(node, "none", &["true"])?;
    let client = Shim::start(node, &bundle, &Options::default())?.connect()?;
    for name in ["no-such-runtime", "/no/such/runtime"] {
        let mut request = bundle.request();
        request.options = Some(options_any(&Options {
            binary_name: name.to_owned(),
            ..Default::default()
        })?)
        .into();
        let error = client
            .create(&request)
            .err()
            .context("it was created")?
            .to_string();
        ensure!(
            error.contains("executable file not found") && error.contains(name),
            "{error}"
        );
    }
    // a file that cannot be executed
    let file = node.disk().join("no-program");
    fs::write(&file, "")?;
    let mut request = bundle.request();
    let binary_name = file.display().to_string();
    request.options = Some(options_any(&Options {
        binary_name,
        ..Default::default()
    })?)
    .into();
    ensure!(client.create(&request).is_err());
    Ok(client.shut_down("none")?)
}

fn garbled_log(node: &Node) -> Result<()> {
    let runtime = ObedientRuntime::of(&node.programs());
    let bundle = Bundle::create(node, "garbled", &["true"])?;
    let client = Shim::start(node, &bundle, &Options::default())?.connect()?;
    runtime.next("create", Fault::GarbledLog)?;
    let refused = client.create(&bundle.request());
    ensure!(code(refused)? == Code::UNKNOWN);
    client.create(&bundle.request())?;
    runtime.next("start", Fault::GarbledLog)?;
    let error = client
        .start("garbled", "")
        .err()
        .context("it was started")?
        .to_string();
    // no line of the log is whole, so the error has the runtime's stderr
    ensure!(
        error.contains("OCI runtime start failed: what it says itself"),
        "{error}"
    );
    client.start("garbled", "")?;
    ensure!(client.wait("garbled", "")? == 0);
    client.delete("garbled", "")?;
    Ok(client.shut_down("garbled")?)
}
