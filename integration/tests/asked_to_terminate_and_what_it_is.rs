//! The shim's answers about itself, and its reaction to SIGTERM and `Shutdown`: nothing as
//! long as a container is there.

use std::fs;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::process::Stdio;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bindguard_integration::leftovers::Leftovers;
use bindguard_integration::process::run;
use bindguard_integration::programs::SHIM;
use bindguard_integration::shim::{Bundle, Shim, options_any};
use bindguard_integration::waiting::until;
use bindguard_integration::{Generation, Node, Setup};
use containerd_shim_protos::shim::oci::Options;
use containerd_shim_protos::types::introspection::RuntimeInfo;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use protobuf::Message;

#[test]
fn containerd_2_1() {
    Setup::on(Generation::V2_1).story(|node| {
        let before = Leftovers::of(node)?;
        what_it_is(node)?;
        sigterm(node)?;
        shutdown_now(node)?;
        before.are_all(node)
    });
}

fn what_it_is(node: &Node) -> Result<()> {
    let options = options_any(&Options { binary_name: "runc".to_owned(), ..Default::default() })?;
    let mut info = node.command(node.programs().join(SHIM))?;
    info.arg("-info").stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut asked = info.spawn().context("ask it")?;
    asked.stdin.take().context("its stdin")?.write_all(&options.write_to_bytes()?)?;
    let answer = asked.wait_with_output()?;
    let info = RuntimeInfo::parse_from_bytes(&answer.stdout).context("understand the answer")?;
    ensure!(info.name == "io.containerd.bindguard.v2", "{info:?}");
    ensure!(!info.version.version.is_empty() && info.options.value == options.value, "{info:?}");
    let features: serde_json::Value = serde_json::from_slice(&info.features.value).context("read the features")?;
    // what containerd looks for: can the runtime map the ids of mounts?
    ensure!(features["linux"]["mountExtensions"]["idmap"]["enabled"].is_boolean(), "{features}");
    ensure!(info.features.type_url.ends_with("runtime-spec/1/features/Features"), "{}", info.features.type_url);
    let mut version = node.command(node.programs().join(SHIM))?;
    version.arg("-v");
    ensure!(run(version)?.success()?.contains("Version:"));
    Ok(())
}

fn sigterm(node: &Node) -> Result<()> {
    let bundle = Bundle::create(node, "web", &["sleep", "1000000"])?;
    let shim = Shim::start(node, &bundle, &Options::default())?;
    let client = shim.connect()?;
    client.create(&bundle.request())?;
    client.start("web", "")?;
    let pid: i32 = fs::read_to_string(bundle.path().join("shim.pid"))?.trim().parse()?;
    kill(Pid::from_raw(pid), Signal::SIGTERM).context("ask the shim to terminate")?;
    thread::sleep(Duration::from_millis(700));
    ensure!(client.state("web", "")?.pid > 0, "it ended, and its container with it");
    ensure!(client.end("web")?.exit_status == 137);
    // without a `Shutdown`
    until("the shim has terminated", || Ok(UnixStream::connect(shim.socket()).is_err()))
}

/// `Now` is in the API, and containerd never sets it; for containerd-shim-runc-v2 and the Rust runc-shim it changes nothing.
fn shutdown_now(node: &Node) -> Result<()> {
    let bundle = Bundle::create(node, "web", &["sleep", "1000000"])?;
    let shim = Shim::start(node, &bundle, &Options::default())?;
    let client = shim.connect()?;
    client.create(&bundle.request())?;
    client.start("web", "")?;
    client.shut_down_now("web")?;
    thread::sleep(Duration::from_millis(700));
    ensure!(client.state("web", "")?.pid > 0, "it ended, and its container with it");
    ensure!(client.end("web")?.exit_status == 137);
    client.shut_down_now("web")?;
    until("the shim has ended", || Ok(UnixStream::connect(shim.socket()).is_err()))
}
