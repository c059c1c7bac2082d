//! The agent is killed at each of its steps, or at any moment. After a kill at any step, no reader
//! sees the file underneath. The next agent leaves a single mount with the current content, on the
//! host and in the opted-in container.

use bindguard_integration::PollingReader;
use bindguard_integration::journal::{self, ROTATED, lines};
use bindguard_integration::kubelet::Subpath;
use bindguard_integration::prelude::*;
use bindguard_integration::scenes::delete_pod;
use k8s_cri::v1::MountPropagation::PropagationPrivate;

/// The steps of a re-bind, and of the journal's line about it.
const STEPS: [&str; 7] = [
    "held",
    "target-opened",
    "after-attach",
    "detached",
    "verified",
    "cleared",
    "journaled",
];
const MOUNTING_BENEATH: [&str; 1] = ["cloned"];
const TUCKED: [&str; 3] = ["namespace-unshared", "copy-attached", "tucked"];
/// The steps of the line that fills the journal.
const ROTATION: [&str; 2] = ["rotating", "rotated"];
/// The volumes of the pod, which the agent re-binds side by side.
const VOLUMES: usize = 3;

#[test]
fn mounting_beneath() {
    Setup::on(Generation::NEWEST)
        .cri()
        .fault_points()
        .story(|node| at_every_step(node, "", &MOUNTING_BENEATH));
}

#[test]
fn tucked_by_propagation() {
    Setup::on(Generation::NEWEST)
        .cri()
        .fault_points()
        .story(|node| at_every_step(node, "no-beneath,", &TUCKED));
}

#[test]
fn at_any_moment() {
    Setup::on(Generation::NEWEST).cri().story(|node| {
        let mut pod = LivePod::start(node)?;
        for number in 0..30 {
            let agent = Agent::start(node, "")?;
            pod.update()?;
            thread::sleep(Duration::from_micros(number * 500));
            agent.kill()?;
            pod.the_next_agent_finishes(node)
                .with_context(|| format!("killed {number} half milliseconds after"))?;
        }
        pod.end(node)
    });
}

/// The agent starts its children in containers by a helper process. If the agent or the helper
/// ends, both end.
#[test]
fn its_helper_process() {
    Setup::on(Generation::NEWEST).cri().story(|node| {
        let mut pod = LivePod::start(node)?;
        Agent::start(node, "")?.ends_without_its_helper()?;
        pod.update()?;
        let agent = Agent::start(node, "")?;
        let helper = format!("/proc/{}", agent.helper()?);
        agent.kill()?;
        until("the helper process ends", || Ok(!fs::exists(&helper)?))?;
        // The killed agent may have done all work, and lost its lines of the journal.
        pod.update()?;
        pod.the_next_agent_finishes(node)?;
        pod.end(node)
    });
}

fn at_every_step(node: &Node, way: &str, more: &[&str]) -> Result<()> {
    let mut pod = LivePod::start(node)?;
    let reader = PollingReader::start(pod.subpaths[0].target());
    for step in STEPS.iter().chain(more).chain(&ROTATION) {
        for is_updated_again in [false, true] {
            let what = format!("killed at {step}, updated again: {is_updated_again}");
            if ROTATION.contains(step) {
                journal::fill()?;
            }
            let mut agent = Agent::start_with_fault(node, &format!("{way}{step}"))?;
            pod.update()?;
            agent.is_killed().context(what.clone())?;
            pod.shows_no_file_underneath().context(what.clone())?;
            if is_updated_again {
                pod.update()?;
            }
            pod.the_next_agent_finishes(node).context(what)?;
        }
    }
    let seen = reader.stop();
    ensure!(
        seen.empty == 0 && seen.failed == 0 && seen.reads > 1000,
        "a reader saw the file underneath: {seen:?}"
    );
    pod.end(node)
}

/// A pod with a running container that opted in, and with a subpath of each volume.
struct LivePod {
    volumes: Vec<Volume>,
    subpaths: Vec<Subpath>,
    sandbox: Sandbox,
    pid: u32,
    updates: u32,
}

impl LivePod {
    fn start(node: &Node) -> Result<Self> {
        let (cri, pod) = (node.cri()?, node.kubelet().pod("uid-live")?);
        let volume = |number| {
            pod.volume(
                VolumeKind::ConfigMap,
                &format!("conf-{number}"),
                &[("key", "0")],
            )
        };
        let volumes = (0..VOLUMES).map(volume).collect::<Result<Vec<_>>>()?;
        let subpaths: Vec<_> = volumes
            .iter()
            .map(|volume| volume.subpath("app", 0, "key"))
            .collect();
        let mounts = subpaths.iter().enumerate().map(|(number, subpath)| {
            Ok(mount(
                subpath.bind()?,
                &format!("/etc/key-{number}"),
                PropagationPrivate,
            ))
        });
        let mounts = mounts.collect::<Result<Vec<_>>>()?;
        let sandbox = cri.run_annotated_pod(
            "runc",
            "live",
            pod.uid(),
            &[("bindguard.io/refresh", "true")],
        )?;
        let app = cri.start_container(&sandbox, "app", &["sleep", "1000000"], &mounts)?;
        Ok(Self {
            volumes,
            subpaths,
            sandbox,
            pid: cri.pid(&app)?,
            updates: 0,
        })
    }

    fn update(&mut self) -> Result<()> {
        self.updates += 1;
        let content = self.updates.to_string();
        self.volumes
            .iter()
            .try_for_each(|volume| volume.update_during_a_repair(&[("key", &content)]))
    }

    fn shows_no_file_underneath(&self) -> Result<()> {
        for subpath in &self.subpaths {
            let (mounts, content) = (subpath.mounts()?, fs::read_to_string(subpath.target())?);
            ensure!(
                (1..=2).contains(&mounts.len()) && !content.is_empty(),
                "{content:?} is in {mounts:?}"
            );
        }
        Ok(())
    }

    fn the_next_agent_finishes(&self, node: &Node) -> Result<()> {
        let _agent = Agent::start(node, "")?;
        for (number, subpath) in self.subpaths.iter().enumerate() {
            until("the host's subpath is current", || {
                Ok(
                    fs::read_to_string(subpath.target())? == self.updates.to_string()
                        && only_a_current_mount(subpath).is_ok()
                        && self.volumes[number].timestamp_directories()? == 1,
                )
            })?;
            until("the container has one current mount", || {
                self.is_current_in_container(&format!("/etc/key-{number}"))
            })?;
        }
        // No line is cut off. A thread of its own writes them, after the mounts are current.
        until("a line is in the journal", || {
            Ok(lines(JOURNAL)?.len() + lines(ROTATED)?.len() > 0)
        })?;
        Ok(())
    }

    fn is_current_in_container(&self, place: &str) -> Result<bool> {
        let content = fs::read_to_string(format!("/proc/{}/root{place}", self.pid))?;
        let table = fs::read_to_string(format!("/proc/{}/mountinfo", self.pid))?;
        let mounts = table
            .lines()
            .filter(|line| line.split(' ').nth(4) == Some(place))
            .count();
        Ok(content == self.updates.to_string() && mounts == 1)
    }

    fn end(self, node: &Node) -> Result<()> {
        node.cri()?.remove_pod(&self.sandbox)?;
        delete_pod(node, "uid-live")
    }
}
