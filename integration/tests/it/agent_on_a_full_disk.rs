//! The disk of everything that the agent writes is full: its socket's folder, its position in the
//! journal, and the journal. Re-binds, refreshes and figures go on, and the log names what could
//! not be written. With room again nothing is counted twice.

use bindguard_integration::prelude::*;
use std::fs::File;
use std::io::Write;

use bindguard_integration::journal::lines;
use bindguard_integration::kubelet::Subpath;
use bindguard_integration::scenes::delete_pod;
use bindguard_integration::stale::StaleBundle;
use k8s_cri::v1::MountPropagation::PropagationPrivate;

const DISK: &str = "/run/bindguard";
const SOCKET: &str = "/run/bindguard/agent.sock";
const FILLER: &str = "/run/bindguard/filler";
const POSITION: &str = "/run/bindguard/agent.position";

#[test]
fn newest_containerd() {
    Setup::on(Generation::NEWEST).cri().story(story);
}

fn story(node: &Node) -> Result<()> {
    fs::create_dir_all(DISK).context("make the folder of the small disk")?;
    tmpfs(DISK, "mode=755,size=256k")?;
    let agent = Agent::start_at(node, "", SOCKET)?;
    let (mut live, mut stale) = (Live::start(node)?, StaleBundle::lay_out(node, "create")?);
    a_create(&agent, &mut stale)?;
    until("the first create is counted", || Ok(creates(&agent) == 1.0))?;
    fill()?;
    // The guard leaves the last room to the runtime: the create completes without a line.
    let before = lines(JOURNAL)?.len();
    a_create(&agent, &mut stale)?;
    ensure!(lines(JOURNAL)?.len() == before, "a line on a full disk");
    until("the journal takes no more lines", || {
        live.update()?;
        Ok(log(node)?.contains(
            "journal a repair of the agent: append to /run/bindguard/journal.jsonl: No space",
        ))
    })?;
    live.update()?;
    ensure!(
        agent.get("/metrics").starts_with("HTTP/1.1 200"),
        "no figures are served"
    );
    an_agent_starts_without_room(node, agent, &mut live)?;
    with_room_again(node, &mut live, &mut stale)?;
    live.end(node)?;
    stale.delete()?;
    unmount(DISK)
}

fn fill() -> Result<()> {
    let mut filler = File::create(FILLER).context("make a file that fills the disk")?;
    while filler.write_all(&[0; 4096]).is_ok() {}
    Ok(())
}

/// A create that the guard repairs. The agent is stopped: it would repair the subpath first.
fn a_create(agent: &Agent, stale: &mut StaleBundle<'_>) -> Result<()> {
    agent.stop()?;
    stale.begin_anew()?;
    run(stale.guard(&[])?)?.success()?;
    stale.is_repaired()?;
    agent.go_on()
}

fn creates(agent: &Agent) -> f64 {
    agent.figure("bindguard_admission_seconds_count")
}

fn an_agent_starts_without_room(node: &Node, first: Agent, live: &mut Live) -> Result<()> {
    drop(first);
    let agent = Agent::start_at(node, "", SOCKET)?;
    live.update()?;
    ensure!(creates(&agent) == 0.0, "a create is counted again");
    fs::remove_file(FILLER).context("make room")?;
    live.update()?;
    let before = fs::read_to_string(POSITION).context("read the position")?;
    until("the position is written", || {
        agent.get("/metrics");
        Ok(fs::read_to_string(POSITION)? != before)
    })
}

fn with_room_again(node: &Node, live: &mut Live, stale: &mut StaleBundle<'_>) -> Result<()> {
    let agent = Agent::start_at(node, "", SOCKET)?;
    let before = lines(JOURNAL)?.len();
    live.update()?;
    until("repairs are journaled again", || {
        Ok(lines(JOURNAL)?.len() > before)
    })?;
    ensure!(
        creates(&agent) == 0.0,
        "a create is counted again: {}",
        agent.get("/metrics")
    );
    a_create(&agent, stale)?;
    until("a new create is counted", || Ok(creates(&agent) == 1.0))
}

fn log(node: &Node) -> Result<String> {
    fs::read_to_string(node.disk().join("agent.log")).context("read the agent's log")
}

/// A running container that opted in.
struct Live {
    volume: Volume,
    sandbox: Sandbox,
    host: Subpath,
    file: String,
    updates: u32,
}

impl Live {
    fn start(node: &Node) -> Result<Self> {
        let cri = node.cri()?;
        let pod = node.kubelet().pod("uid-live")?;
        let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("key", "0")])?;
        let host = volume.subpath("app", 0, "key");
        let mounts = [mount(host.bind()?, "/etc/key", PropagationPrivate)];
        let sandbox = cri.run_annotated_pod(
            "runc",
            "live",
            pod.uid(),
            &[("bindguard.io/refresh", "true")],
        )?;
        let app = cri.start_container(&sandbox, "app", &["sleep", "1000000"], &mounts)?;
        let file = format!("/proc/{}/root/etc/key", cri.pid(&app)?);
        Ok(Self {
            volume,
            sandbox,
            host,
            file,
            updates: 0,
        })
    }

    /// An update reaches the host's subpath and the running container.
    fn update(&mut self) -> Result<()> {
        self.updates += 1;
        let content = self.updates.to_string();
        self.volume.update(&[("key", &content)])?;
        let is_current =
            |file: &Path| Ok(fs::read_to_string(file).is_ok_and(|text| text == content));
        until("the host's subpath is current", || {
            is_current(self.host.target())
        })?;
        until("the container reads the current file", || {
            is_current(self.file.as_ref())
        })?;
        until("one mount is left", || {
            Ok(only_a_current_mount(&self.host).is_ok())
        })
    }

    fn end(self, node: &Node) -> Result<()> {
        node.cri()?.remove_pod(&self.sandbox)?;
        delete_pod(node, "uid-live")
    }
}
