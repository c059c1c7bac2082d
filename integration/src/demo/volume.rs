//! Part four: the FUSE daemon of a volume dies while containers use the volume (kubernetes#70013).
//!
//! The FUSE daemon is real. The driver unmounts the dead mount and mounts the volume anew, like a
//! restarted CSI driver.

use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use k8s_cri::v1::MountPropagation::PropagationPrivate;

use super::table::{Observation, Table};
use super::{name, quote};
use crate::agent::Agent;
use crate::cri::{Cri, Sandbox, mount};
use crate::ctr::Runtime;
use crate::fuse_daemon::FuseDaemon;
use crate::node::Node;
use crate::process::host;

const STEP: &str = "a running container, its FUSE volume died";
const SLEEP: [&str; 2] = ["sleep", "1000000"];
const BEFORE: &str = "colour = blue";
const AFTER: &str = "colour = green";

/// The agent lists new containers a second after their start. The demo shows a driver that dies
/// later.
const LISTED_AFTER: Duration = Duration::from_millis(1500);

/// Time limit for a change that is expected.
const REFRESH_TIMEOUT: Duration = Duration::from_secs(60);

pub(super) fn show(node: &Node, table: &mut Table) -> Result<()> {
    println!(
        "\n5. Two containers run, each with a volume of a CSI driver (FUSE). The driver's daemons die, and are started again."
    );
    if let Some(why) = FuseDaemon::missing() {
        println!("   SKIPPED: {why}");
        return Ok(());
    }
    let cri = node.cri()?;
    let agent = Agent::start(node, "").context("start the node agent")?;
    let annotations = [("bindguard.io/refresh-binds", "volumes")];
    let mut plain = Scene::start(node, &cri, "stock", Runtime::Stock, &[])?;
    let mut opted_in = Scene::start(node, &cri, "volumes", Runtime::Bindguard, &annotations)?;
    println!(
        "   both read `{BEFORE}`; the second pod has the annotation bindguard.io/refresh-binds: \"volumes\""
    );
    thread::sleep(LISTED_AFTER);
    for scene in [&mut plain, &mut opted_in] {
        scene.kill_daemon();
        let words = scene.read()?;
        println!("   {} is killed; its container reads", scene.daemon_name());
        quote(&words);
    }
    println!("   the driver mounts both volumes anew, with `{AFTER}`");
    [&mut plain, &mut opted_in]
        .into_iter()
        .try_for_each(Scene::mount_anew)?;
    let began = Instant::now();
    let new = opted_in.wait_for(AFTER)?;
    println!(
        "   the second container reads `{new}` after {} ms, without a restart",
        began.elapsed().as_millis()
    );
    // The agent sees both volumes at once. Anything that the agent does to the first pod is done
    // now.
    let old = plain.read()?;
    println!("   the first one still reads");
    quote(&old);
    let restarted = plain.restart()?;
    println!("   after a restart, the first one reads `{restarted}`");
    table.add(Observation {
        step: STEP,
        runtime: name(Runtime::Stock),
        seen: "stays dead until the container restarts".to_owned(),
        is_as_said: old.contains("not connected") && restarted == AFTER,
    });
    table.add(Observation {
        step: STEP,
        runtime: "with the annotation, and the agent",
        seen: format!("reads `{new}`"),
        is_as_said: new == AFTER,
    });
    drop(agent);
    plain.end()?;
    opted_in.end()
}

/// A pod with a container, and the daemon of its volume.
struct Scene<'a> {
    node: &'a Node,
    cri: &'a Cri,
    uid: String,
    bucket: PathBuf,
    volume: PathBuf,
    daemon: Option<FuseDaemon>,
    sandbox: Sandbox,
    container: String,
}

impl<'a> Scene<'a> {
    fn start(
        node: &'a Node,
        cri: &'a Cri,
        name: &str,
        runtime: Runtime,
        annotations: &[(&str, &str)],
    ) -> Result<Self> {
        let uid = format!("uid-{name}");
        let volume = node.kubelet().pod(&uid)?.path().to_owned();
        let volume = volume.join("volumes/kubernetes.io~csi/pv/mount");
        let bucket = node.disk().join(name);
        for folder in [&bucket, &volume] {
            fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
        }
        fs::write(bucket.join("file"), BEFORE)?;
        let daemon = FuseDaemon::mounted(node, &bucket, &volume)?;
        let handler = match runtime {
            Runtime::Bindguard => "bindguard",
            _ => "runc",
        };
        let sandbox = cri.run_annotated_pod(handler, name, &uid, annotations)?;
        let mounts = [mount(&volume, "/data", PropagationPrivate)];
        let container = cri.start_container(&sandbox, "app", &SLEEP, &mounts)?;
        Ok(Self {
            node,
            cri,
            uid,
            bucket,
            volume,
            daemon: Some(daemon),
            sandbox,
            container,
        })
    }

    fn daemon_name(&self) -> String {
        format!("the daemon of pod {}", self.uid.trim_start_matches("uid-"))
    }

    fn kill_daemon(&mut self) {
        self.daemon = None;
    }

    fn mount_anew(&mut self) -> Result<()> {
        host([
            "umount".as_ref(),
            "--lazy".as_ref(),
            self.volume.as_os_str(),
        ])?;
        fs::write(self.bucket.join("file"), AFTER)?;
        self.daemon = Some(FuseDaemon::mounted(self.node, &self.bucket, &self.volume)?);
        Ok(())
    }

    /// The content of the file, or the words of cat(1) about it.
    fn read(&self) -> Result<String> {
        let words = ["sh", "-c", "cat /data/file 2>&1"];
        let answer = self.cri.exec(&self.container, &words)?;
        Ok(answer.stdout.trim().to_owned())
    }

    /// The content, as soon as the content is as expected, or after the time limit.
    fn wait_for(&self, expected: &str) -> Result<String> {
        let began = Instant::now();
        loop {
            let content = self.read()?;
            if content == expected || began.elapsed() > REFRESH_TIMEOUT {
                return Ok(content);
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// The content that a new container of the pod reads.
    fn restart(&mut self) -> Result<String> {
        let mounts = [mount(&self.volume, "/data", PropagationPrivate)];
        self.cri.stop(&self.container, 0)?;
        self.cri.remove(&self.container)?;
        self.container = self
            .cri
            .start_container(&self.sandbox, "app", &SLEEP, &mounts)?;
        self.read()
    }

    fn end(self) -> Result<()> {
        self.cri.remove_pod(&self.sandbox)?;
        self.node.kubelet().pod(&self.uid)?.delete()
    }
}
