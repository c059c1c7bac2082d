//! containerd 2.3 and later, played by the story: `start` gets `BootstrapParams` with a folder for sockets and answers with a
//! `BootstrapResult`. With its version 3 the pod's second container has no `start` and no `delete` of its own, so that
//! `delete` of the sandbox has to remove it when their shim is killed (issue 14).

use std::fs;

use anyhow::{Result, ensure};
use bindguard_integration::leftovers::Leftovers;
use bindguard_integration::shim::{Bundle, Shim};
use bindguard_integration::waiting::until;
use bindguard_integration::{Generation, Node, Setup};
use containerd_shim_protos::bootstrap_api::BootstrapParams;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// As long as containerd takes it.
const SOCKETS: &str = "/run/sockets-in-a-folder-of-42-characters-";

#[test]
fn containerd_2_1() {
    Setup::on(Generation::V2_1).story(|node| {
        fs::create_dir_all("/run/bundles")?;
        let before = Leftovers::of(node)?;
        one_start_serves_the_pod(node)?;
        before.are_all(node)?;
        the_pods_shim_is_killed(node)?;
        before.are_all(node)
    });
}

/// A sandbox, and a container that joins it as containerd writes that down.
fn pod(node: &Node) -> Result<[Bundle; 2]> {
    let pod = Bundle::create(node, "pod", &["sleep", "1000"])?;
    let web = Bundle::create(node, "web", &["sleep", "1000"])?;
    fs::write(web.path().join("sandbox"), pod.id())?;
    Ok([pod, web])
}

fn start(node: &Node, pod: &Bundle) -> Result<Shim> {
    let params = BootstrapParams { socket_dir: Some(SOCKETS.to_owned()), ..Default::default() };
    let (shim, result) = Shim::start_with(node, pod, params.clone())?;
    ensure!((result.version, result.protocol.as_str()) == (3, "ttrpc"), "{result}");
    ensure!(shim.socket().starts_with(SOCKETS), "the socket is {}", shim.socket().display());
    // and every later one for the same group finds the same server
    ensure!(Shim::start_with(node, pod, params)?.0.socket() == shim.socket());
    Ok(shim)
}

fn one_start_serves_the_pod(node: &Node) -> Result<()> {
    let [pod, web] = pod(node)?;
    let client = start(node, &pod)?.connect()?;
    for bundle in [&pod, &web] {
        client.create(&bundle.request())?;
        client.start(bundle.id(), "")?;
    }
    for bundle in [&web, &pod] {
        client.kill(bundle.id(), "", 9)?;
        ensure!(client.wait(bundle.id(), "")? == 137);
        client.delete(bundle.id(), "")?;
        client.shut_down(bundle.id())?;
    }
    until("the sockets are gone", || Ok(fs::read_dir(SOCKETS)?.next().is_none()))
}

fn the_pods_shim_is_killed(node: &Node) -> Result<()> {
    let [pod, web] = pod(node)?;
    let client = start(node, &pod)?.connect()?;
    let mut inits = Vec::new();
    for bundle in [&pod, &web] {
        inits.push(client.create(&bundle.request())?);
        client.start(bundle.id(), "")?;
    }
    // containerd also runs `delete` when it has closed its connection to a server that lives and serves others
    Shim::delete(node, &pod)?;
    ensure!(fs::exists(format!("/proc/{}", inits[1]))?, "the other container was removed beside a living shim");
    let server: i32 = fs::read_to_string(pod.path().join("shim.pid"))?.trim().parse()?;
    kill(Pid::from_raw(server), Signal::SIGKILL)?;
    Shim::delete(node, &pod)?;
    until("no process of the pod is left", || {
        Ok(inits.iter().all(|init| !fs::exists(format!("/proc/{init}")).unwrap_or(true)))
    })?;
    ensure!(fs::read_dir(SOCKETS)?.next().is_none(), "a socket or a link is left");
    Ok(())
}
