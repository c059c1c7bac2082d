//! `bindguard status` and `doctor` show the node agent: absent, running, ended in order, and
//! killed. And the agent's own report is that of `bindguard diagnose`.

use bindguard_integration::prelude::*;
use std::net::{TcpListener, TcpStream};

use k8s_cri::v1::MountPropagation::PropagationPrivate;

const SOCKET: &str = "/run/bindguard-agent.sock";

#[test]
fn newest_containerd() {
    Setup::on(Generation::NEWEST).cri().story(|node| {
        ensure!(agent_of(node)?["state"] == "absent", "{}", agent_of(node)?);
        ensure!(
            point(node)?
                == (
                    "ok".to_owned(),
                    "no node agent runs; it is optional".to_owned()
                ),
            "{:?}",
            point(node)?
        );

        let agent = Agent::start(node, "refresh.mode = 'off'\nagent.nri.enabled = true\n")?;
        let running = agent_of(node)?;
        ensure!(
            running["state"] == "running"
                && running["pid"] == agent.pid()
                && running["ready"] == true,
            "{running}"
        );
        ensure!(
            running["refresh"] == "off" && running["stale_subpaths"] == "repair",
            "{running}"
        );
        // No runtime listens: the story's containerd has NRI switched off.
        ensure!(
            running["nri"] == "disconnected" && point(node)?.0 == "failed",
            "{running}"
        );
        the_report_names_pods_and_old_files(node, &agent)?;

        kill(Pid::from_raw(agent.pid().try_into()?), Signal::SIGTERM)?;
        until("the agent removes its socket", || {
            Ok(!Path::new(SOCKET).exists())
        })?;
        ensure!(agent_of(node)?["state"] == "absent", "{}", agent_of(node)?);
        drop(agent);

        another_process_has_the_address(node)?;
        drop(Agent::start(node, "")?);
        let killed = agent_of(node)?;
        ensure!(
            killed["state"] == "silent" && killed["problem"].to_string().contains(SOCKET),
            "{killed}"
        );
        ensure!(point(node)?.0 == "failed", "{:?}", point(node)?);
        fs::remove_file(SOCKET).context("remove the socket of the killed agent")
    });
}

/// Any user of the node can bind the address of the figures first.
fn another_process_has_the_address(node: &Node) -> Result<()> {
    let squatter = TcpListener::bind("127.0.0.1:0")?;
    let address = squatter.local_addr()?;
    let metrics = format!("agent.metrics = '{address}'\n");
    let agent = Agent::start(node, &metrics).context("the agent starts without its address")?;
    let (status, message) = point(node)?;
    ensure!(
        status == "failed" && message.contains(&address.to_string()),
        "{message}"
    );
    drop(squatter);
    until("the agent serves its address", || {
        Ok(TcpStream::connect(address).is_ok())
    })?;
    ensure!(point(node)?.0 == "ok", "{:?}", point(node)?);
    drop(agent);
    fs::remove_file(SOCKET).context("remove the socket of the killed agent")
}

/// `/v1/report` has what `bindguard diagnose --json` has: the names come from the CRI.
fn the_report_names_pods_and_old_files(node: &Node, agent: &Agent) -> Result<()> {
    let cri = node.cri()?;
    let pod = node.kubelet().pod("uid-1")?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("app.conf", "one")])?;
    let subpath = volume.subpath("app", 0, "app.conf");
    let mounts = [mount(subpath.bind()?, "/etc/app.conf", PropagationPrivate)];
    let sandbox = cri.run_annotated_pod(
        "runc",
        "web",
        pod.uid(),
        &[("bindguard.io/refresh", "true")],
    )?;
    cri.start_container(&sandbox, "app", &["sleep", "1000000"], &mounts)?;
    volume.update(&[("app.conf", "two")])?;
    until("the host's subpath is current", || {
        Ok(only_a_current_mount(&subpath).is_ok())
    })?;
    // A report is up to ten seconds old.
    until("the report has the old file", || {
        let answer = agent.get("/v1/report");
        let report: Value =
            serde_json::from_str(answer.split("\r\n\r\n").nth(1).unwrap_or_default())?;
        let old = &report["old_files"][0];
        Ok(old["pod"]["name"] == "web"
            && old["opted_in"] == true
            && old["files"][0]["destination"] == "/etc/app.conf")
    })?;
    cri.remove_pod(&sandbox)?;
    until("the kubelet deletes the pod", || {
        Ok(node.kubelet().pod("uid-1")?.delete().is_ok())
    })
}

/// The config that has the agent's socket.
fn config(node: &Node) -> Result<[String; 2]> {
    let file = node.disk().join("operator.toml");
    let root = node.kubelet().root().display();
    fs::write(
        &file,
        format!("kubelet.roots = ['{root}']\nagent.socket = '{SOCKET}'\n"),
    )?;
    Ok(["--config".to_owned(), file.display().to_string()])
}

fn agent_of(node: &Node) -> Result<Value> {
    let words = config(node)?;
    let done = node.bindguard(
        ["status", "--json"]
            .into_iter()
            .chain(words.iter().map(String::as_str)),
    )?;
    let status: Value = serde_json::from_str(&done.stdout).with_context(|| format!("{done:?}"))?;
    Ok(status["agent"].clone())
}

/// The status and the message of the doctor's point.
fn point(node: &Node) -> Result<(String, String)> {
    let words = config(node)?;
    let done = node.bindguard(
        ["doctor", "--json"]
            .into_iter()
            .chain(words.iter().map(String::as_str)),
    )?;
    let report: Value = serde_json::from_str(&done.stdout).with_context(|| format!("{done:?}"))?;
    let points = report["points"].as_array().context("points")?;
    let point = points
        .iter()
        .find(|point| point["name"] == "agent")
        .context("no point of the agent")?;
    Ok((
        point["status"].as_str().unwrap_or_default().to_owned(),
        point["message"].as_str().unwrap_or_default().to_owned(),
    ))
}
