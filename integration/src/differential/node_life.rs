//! The verbs and the agent on a node with pods, while their volumes change.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use k8s_cri::v1::MountPropagation::PropagationPrivate;
use serde_json::{Map, Value};

use super::{Cases, Recorder};
use crate::agent::Agent;
use crate::cri::mount;
use crate::journal::JOURNAL;
use crate::kubelet::VolumeKind;
use crate::mount_calls::{tmpfs, unmount};
use crate::node::Setup;
use crate::process::host;
use crate::programs::Generation;
use crate::waiting::until;

pub(super) const PARTS: [&str; 1] = ["a node"];

const SLEEP: [&str; 2] = ["sleep", "1000000"];

/// No probe runs out of time on a busy machine.
const POLICY: &str = "[guard]\ndeadline-ms = 60000\n";

pub(super) fn play(_part: &str) -> Result<Cases> {
    let node = Setup::on(Generation::NEWEST).cri().policy(POLICY).start()?;
    let mut recorder = Recorder::on(&node)?;
    recorder.pods()?;
    // The CRI gives random ids, by which the verbs and the agent sort.
    for text in recorder.cases.values_mut() {
        let mut lines: Vec<&str> = text.lines().collect();
        lines.sort_unstable();
        *text = lines.join("\n");
    }
    Ok(recorder.cases)
}

impl Recorder<'_> {
    fn pods(&mut self) -> Result<()> {
        let (node, cri) = (self.node, self.node.cri()?);
        let kubelet = node.kubelet();
        self.verbs("empty", "uid-web")?;

        let pod = kubelet.pod("uid-web")?;
        let files = [
            ("app.conf", "one"),
            ("gone.conf", "one"),
            ("folder/x", "one"),
        ];
        let conf = pod.volume(VolumeKind::ConfigMap, "conf", &files)?;
        let keys = pod.volume(VolumeKind::Secret, "keys", &[("key", "one")])?;
        let all = pod.volume(VolumeKind::Projected, "all", &[("cm/key", "one")])?;
        let names = pod.volume(VolumeKind::DownwardApi, "names", &[("labels", "one")])?;
        let data = pod.volume(VolumeKind::EmptyDirMemory, "data", &[("file", "one")])?;
        let calm = pod.volume(VolumeKind::ConfigMap, "calm", &[("app.conf", "one")])?;
        let host_file = Path::new("/run/host-file");
        fs::write(host_file, "one").context("write a file of the host")?;
        let disk = node.disk().join("disk");
        fs::create_dir(&disk).context("make a folder for a disk")?;
        tmpfs(&disk, "mode=755")?;
        let mut mounts = Vec::new();
        for (volume, path) in [
            (&conf, "app.conf"),
            (&conf, "gone.conf"),
            (&conf, "folder"),
            (&keys, "key"),
            (&all, "cm/key"),
            (&names, "labels"),
            (&calm, "app.conf"),
        ] {
            let index = u32::try_from(mounts.len())?;
            let subpath = volume.subpath("app", index, path);
            let place = format!("/etc/app/{index}");
            mounts.push(mount(subpath.bind()?, &place, PropagationPrivate));
        }
        mounts.push(mount(data.path(), "/data", PropagationPrivate));
        mounts.push(mount(conf.path(), "/conf", PropagationPrivate));
        mounts.push(mount(host_file, "/host-file", PropagationPrivate));
        let sandbox = cri.run_pod("bindguard", "web", pod.uid())?;
        let app = cri.start_container(&sandbox, "app", &SLEEP, &mounts)?;
        let exporter = cri.run_pod("runc", "exporter", "uid-exporter")?;
        let root = [mount(Path::new("/"), "/host", PropagationPrivate)];
        cri.start_container(&exporter, "exporter", &SLEEP, &root)?;
        self.verbs("healthy", "uid-web")?;

        conf.update(&[("app.conf", "two"), ("folder/x", "two")])?;
        keys.update(&[("key", "two")])?;
        all.update(&[("cm/key", "two")])?;
        names.update(&[("labels", "two")])?;
        host([
            "umount".as_ref(),
            "--lazy".as_ref(),
            data.path().as_os_str(),
        ])?;
        tmpfs(data.path(), "")?;
        fs::write(data.path().join("file"), "two").context("write to the volume")?;
        fs::write("/run/host-file.new", "two").context("write a file of the host")?;
        fs::rename("/run/host-file.new", host_file).context("replace a file of the host")?;
        unmount(&disk)?;
        self.verbs("stale", "uid-web")?;
        self.bundle(&app)?;

        let refused = cri.start_container(&sandbox, "second", &SLEEP, &mounts);
        self.add("node: a create without its key", &format!("{refused:#?}"))?;
        mounts.remove(1);
        cri.start_container(&sandbox, "third", &SLEEP, &mounts)?;
        self.verbs("restarted", "uid-web")?;
        conf.update(&[("app.conf", "three"), ("folder/x", "three")])?;
        keys.update(&[("key", "three")])?;
        let path = disk.display().to_string();
        for words in [
            &["repair", "--all"][..],
            &["refresh", "--pod", "default/web"],
            &[
                "refresh",
                "--pod",
                "default/web",
                "--what",
                "volumes",
                "--json",
            ],
            &["refresh", "--pod", "default/web", "--what", "host-files"],
            &["refresh", "--pod", "default/web", "--what", "host-root"],
            &["release", &path],
            &[
                "refresh",
                "--pod",
                "default/exporter",
                "--what",
                "host-root",
            ],
        ] {
            self.cli("node, by hand", words)?;
        }
        self.verbs("repaired", "uid-web")?;
        self.agent(&conf)?;

        cri.remove_pod(&sandbox)?;
        for words in [&["diagnose"][..], &["diagnose", "--json"]] {
            self.cli("node, ended", words)?;
        }
        let journal = fs::read_to_string(JOURNAL).context("read the journal")?;
        self.add("node: the journal", &journal)?;
        cri.remove_pod(&exporter)
    }

    /// Every verb that changes nothing, as text and as JSON.
    fn verbs(&mut self, moment: &str, uid: &str) -> Result<()> {
        let disk = self.node.disk().join("disk").display().to_string();
        for words in [
            &["diagnose"][..],
            &["diagnose", "--all"],
            &["diagnose", "--pod", "default/web"],
            &["diagnose", "--pod", uid],
            &["repair", "--all", "--dry-run"],
            &["repair", "--pod", uid, "--dry-run"],
            &["refresh", "--pod", "default/web", "--dry-run"],
            &[
                "refresh",
                "--pod",
                "default/web",
                "--dry-run",
                "--what",
                "volumes",
            ],
            &[
                "refresh",
                "--pod",
                "default/web",
                "--dry-run",
                "--what",
                "host-root",
            ],
            &[
                "refresh",
                "--pod",
                "default/exporter",
                "--dry-run",
                "--what",
                "host-root",
            ],
            &[
                "refresh",
                "--pod",
                "default/web",
                "--dry-run",
                "--what",
                "host-files",
            ],
            &["release", &disk, "--dry-run"],
            &["holders", &disk],
            &["doctor"],
            &["status"],
            &["journal"],
            &["journal", "--all"],
            &["config", "show"],
        ] {
            self.cli(&format!("node, {moment}"), words)?;
            self.cli(&format!("node, {moment}"), &[words, &["--json"]].concat())?;
        }
        let mut report = self.node.bindguard(["diagnose", "--format", "kubediag"])?;
        let mut keys: Map<String, Value> = serde_json::from_str(&report.stdout)?;
        // The ids of the mounts of this machine.
        keys.remove("collector.system.mountinfo");
        report.stdout = Value::from(keys).to_string();
        self.ended(
            &format!("node, {moment}: bindguard diagnose --format kubediag"),
            &report,
        )
    }

    /// The spec that containerd wrote, and the record of its mounts.
    fn bundle(&mut self, id: &str) -> Result<()> {
        let tasks = Path::new("/run/containerd/io.containerd.runtime.v2.task/k8s.io");
        let bundle = tasks.join(id);
        let path = bundle.display().to_string();
        self.cli("node", &["check", &path])?;
        self.cli("node", &["check", &path, "--json"])?;
        for file in ["config.json", "bindguard-binds.json"] {
            let text =
                fs::read_to_string(bundle.join(file)).unwrap_or_else(|error| error.to_string());
            self.add(&format!("node: {file} of the bundle"), &text)?;
        }
        Ok(())
    }

    /// The agent's answers after an update of a volume.
    fn agent(&mut self, conf: &crate::Volume) -> Result<()> {
        // An agent that runs would see the update half done, or done.
        conf.update(&[("app.conf", "four"), ("folder/x", "four")])?;
        let agent = Agent::start(self.node, POLICY)?;
        until("the agent has bound the new files", || {
            Ok(agent.figure("bindguard_subpath_rebinds_total{outcome=\"rebound\"}") >= 2.0)
        })?;
        for path in ["/metrics", "/healthz", "/readyz", "/status", "/nosuch"] {
            let mut answer = String::new();
            for line in agent.get(path).lines() {
                // The first survey comes before or after the binds of the new files.
                if line.contains("bindguard_sources") {
                    continue;
                }
                let name = line.split(' ').next().unwrap_or_default();
                let is_volatile = name.contains("_seconds") || name.contains("_bytes");
                answer.push_str(if is_volatile { name } else { line });
                answer.push('\n');
            }
            self.add(&format!("agent: {path}"), &answer)?;
        }
        self.cli("agent", &["status"])?;
        self.cli("agent", &["status", "--json"])?;
        self.cli("agent", &["doctor"])?;
        agent.kill()?;
        let log = fs::read_to_string(self.node.disk().join(crate::node::AGENT_LOG));
        self.add("agent: the log", &log.context("read the agent's log")?)
    }
}
