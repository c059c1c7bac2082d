//! containerd 2.3 and later, played by the story: `start` gets `BootstrapParams` with a folder for
//! sockets and answers with a `BootstrapResult`. With version 3 the pod's second container has no
//! `start` and no `delete`. So `delete` of the sandbox has to remove the second container when the
//! shim is killed (issue 14). Parameters that contradict the command line, and unknown input, are
//! refused: containerd could not parse the plain address.

use bindguard_integration::prelude::*;
use bindguard_integration::shim::{Bundle, Shim};
use containerd_shim_protos::bootstrap_api::{BootstrapParams, Extension};
use protobuf::well_known_types::any::Any;
use protobuf::{Message as _, MessageField};

/// As long as containerd takes it.
const SOCKETS: &str = "/run/sockets-in-a-folder-of-42-characters-";

#[test]
fn newest_containerd() {
    Setup::on(Generation::NEWEST).story(|node| {
        fs::create_dir_all("/run/bundles")?;
        let before = Leftovers::of(node)?;
        one_start_serves_the_pod(node)?;
        before.are_all(node)?;
        the_pods_shim_is_killed(node)?;
        before.are_all(node)?;
        wrong_input_is_refused(node)?;
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
    let params = BootstrapParams {
        socket_dir: Some(SOCKETS.to_owned()),
        ..Default::default()
    };
    let (shim, result) = Shim::start_with(node, pod, params.clone())?;
    ensure!(
        (result.version, result.protocol.as_str()) == (3, "ttrpc"),
        "{result}"
    );
    ensure!(
        shim.socket().starts_with(SOCKETS),
        "the socket is {}",
        shim.socket().display()
    );
    // each later start for the group finds the same server
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
    until("the sockets are gone", || {
        Ok(fs::read_dir(SOCKETS)?.next().is_none())
    })
}

fn the_pods_shim_is_killed(node: &Node) -> Result<()> {
    let [pod, web] = pod(node)?;
    let client = start(node, &pod)?.connect()?;
    let mut inits = Vec::new();
    for bundle in [&pod, &web] {
        inits.push(client.create(&bundle.request())?);
        client.start(bundle.id(), "")?;
    }
    // containerd also runs `delete` after closing its connection to a living server, which may
    // serve other containers
    Shim::delete(node, &pod)?;
    ensure!(
        fs::exists(format!("/proc/{}", inits[1]))?,
        "the other container was removed beside a living shim"
    );
    let server: i32 = fs::read_to_string(pod.path().join("shim.pid"))?
        .trim()
        .parse()?;
    kill(Pid::from_raw(server), Signal::SIGKILL)?;
    Shim::delete(node, &pod)?;
    until("no process of the pod is left", || {
        Ok(inits
            .iter()
            .all(|init| !fs::exists(format!("/proc/{init}")).unwrap_or(true)))
    })?;
    ensure!(
        fs::read_dir(SOCKETS)?.next().is_none(),
        "a socket or a link is left"
    );
    Ok(())
}

/// Go's shim of containerd 2.4 refuses the same. An older containerd sends options, or nothing.
fn wrong_input_is_refused(node: &Node) -> Result<()> {
    let bundle = Bundle::create(node, "web", &["sleep", "1000"])?;
    let own = || BootstrapParams {
        instance_id: bundle.id().to_owned(),
        namespace: node.name().to_owned(),
        containerd_version: "v2.4.0".to_owned(),
        ..Default::default()
    };
    let garbage = Any {
        type_url: "containerd.runc.v1.Options".to_owned(),
        value: vec![0xff],
        ..Default::default()
    };
    let extensions = vec![Extension {
        value: MessageField::some(garbage),
        ..Default::default()
    }];
    let long = format!("/run/{}", "s".repeat(60));
    let refused: [(&str, Vec<u8>); 8] = [
        (
            "another id",
            BootstrapParams {
                instance_id: "other".to_owned(),
                ..own()
            }
            .write_to_bytes()?,
        ),
        (
            "another namespace",
            BootstrapParams {
                namespace: "other".to_owned(),
                ..own()
            }
            .write_to_bytes()?,
        ),
        ("garbage", b"\xff\xff\xff".to_vec()),
        ("JSON", b"{\"version\":3}".to_vec()),
        (
            "11 MiB",
            BootstrapParams {
                containerd_binary: "x".repeat(11 << 20),
                ..own()
            }
            .write_to_bytes()?,
        ),
        (
            "options that are none",
            BootstrapParams {
                extensions,
                ..own()
            }
            .write_to_bytes()?,
        ),
        (
            "a long socket_dir",
            BootstrapParams {
                socket_dir: Some(long),
                ..own()
            }
            .write_to_bytes()?,
        ),
        (
            "a relative socket_dir",
            BootstrapParams {
                socket_dir: Some("s".to_owned()),
                ..own()
            }
            .write_to_bytes()?,
        ),
    ];
    for (what, input) in &refused {
        let answer = Shim::start_with_bytes(node, &bundle, input)?;
        ensure!(
            answer.code() == 1 && answer.stdout.is_empty() && !answer.stderr.is_empty(),
            "{what}: {answer:?}"
        );
        ensure!(
            !bundle.path().join("shim.pid").exists(),
            "{what}: a server was started"
        );
    }
    let answer = Shim::start_with_bytes(node, &bundle, b"")?.success()?;
    ensure!(
        answer.starts_with("unix://"),
        "nothing on stdin: {answer:?}"
    );
    let client = Shim::of(bundle.path())?.connect()?;
    client.create(&bundle.request())?;
    client.end(bundle.id())?;
    Ok(client.shut_down(bundle.id())?)
}
