//! The cost of the guard with its exec: `bindguard-runtime create` before a runtime that does
//! nothing, minus the runtime alone.
//!
//! The spec is from `hooks/guard/benches/admit.rs`: five subpaths of configMaps, folders of the
//! pod, folders of the host, and its root. Clean, and after a configMap changed.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use bindguard_integration::bundle::Bundle;
use bindguard_integration::kubelet::{Pod, Subpath, Volume};
use bindguard_integration::programs::GUARD;
use bindguard_integration::scenes::only_a_current_mount;
use bindguard_integration::{Node, VolumeKind};
use serde_json::{Value, json};

use crate::candidate::Candidate;
use crate::clocks;
use crate::crowd::Crowd;
use crate::figure::Figure;
use crate::ground::Ground;
use crate::results::Results;
use crate::turns::in_turns;

const MOUNTS: [u64; 4] = [100, 1_000, 10_000, 30_000];
const ROUNDS: usize = 40;
/// A subpath of the first volume and four subpaths of the second.
const SUBPATHS: u64 = 5;
const POD_FOLDERS: usize = 16;
const HOST_PATHS: [&str; 8] = [
    "/etc",
    "/usr/share",
    "/lib",
    "/opt",
    "/sys",
    "/dev",
    "/proc",
    "/var/log",
];
/// Ends at once, with any arguments.
const IDLE_RUNTIME: &str = "/bin/true";

pub fn measure(ground: &Ground, results: &mut Results) -> Result<()> {
    let mut scene = Scene::lay_out(&ground.node)?;
    repairs(&mut scene, results)?;
    let mut crowd = Crowd::gather(&ground.node)?;
    for mounts in MOUNTS {
        crowd.grow_to(mounts)?;
        in_turns(results, ROUNDS, &[Candidate::Bindguard], mounts, |_| {
            let (bare, clean) = (scene.without_guard()?, scene.create()?);
            Ok(vec![
                (Figure::GuardCpu, clean.cpu - bare.cpu),
                (Figure::GuardWall, clean.wall - bare.wall),
            ])
        })?;
    }
    scene.pod.delete()
}

fn repairs(scene: &mut Scene, results: &mut Results) -> Result<()> {
    for (stale, volumes) in [(1, 1), (SUBPATHS, 2)] {
        in_turns(results, ROUNDS, &[Candidate::Bindguard], stale, |_| {
            let clean = scene.create()?;
            scene.update(volumes)?;
            let repaired = scene.create()?;
            scene.subpaths.iter().try_for_each(only_a_current_mount)?;
            Ok(vec![
                (Figure::RepairCpu, repaired.cpu - clean.cpu),
                (Figure::RepairWall, repaired.wall - clean.wall),
            ])
        })?;
    }
    Ok(())
}

/// A pod with its bundle.
struct Scene<'n> {
    node: &'n Node,
    pod: Pod,
    volumes: [(Volume, &'static [&'static str]); 2],
    subpaths: Vec<Subpath>,
    bundle: Bundle,
    updates: u32,
}

/// Duration of a call, in milliseconds.
struct Took {
    cpu: f64,
    wall: f64,
}

impl<'n> Scene<'n> {
    fn lay_out(node: &'n Node) -> Result<Self> {
        let pod = node.kubelet().pod("guarded")?;
        let volume = |name, keys: &'static [&str]| {
            anyhow::Ok((
                pod.volume(VolumeKind::ConfigMap, name, &payload(keys, "0"))?,
                keys,
            ))
        };
        let volumes = [
            volume("one", &["a"])?,
            volume("four", &["a", "b", "c", "d"])?,
        ];
        let (mut subpaths, mut binds) = (Vec::new(), Vec::new());
        for (volume, keys) in &volumes {
            for (index, key) in (0..).zip(*keys) {
                let subpath = volume.subpath("app", index, key);
                binds.push(Bundle::bind(
                    subpath.bind()?,
                    &format!("/etc/app/{}", binds.len()),
                ));
                subpaths.push(subpath);
            }
        }
        binds.extend((0..POD_FOLDERS).map(|n| Bundle::bind(pod.path(), &format!("/other/{n}"))));
        binds.extend(
            HOST_PATHS.map(|path| Bundle::bind(Path::new(path), &format!("/host-path{path}"))),
        );
        binds.push(root_of_the_host());
        ensure!(binds.len() == 30, "the spec has {} binds", binds.len());
        let mut spec = Bundle::spec(&binds);
        spec["linux"]["rootfsPropagation"] = "rslave".into();
        let bundle = Bundle::create(node, "guarded", spec.to_string().as_bytes())?;
        Ok(Self {
            node,
            pod,
            volumes,
            subpaths,
            bundle,
            updates: 0,
        })
    }

    /// New content in the first volumes: a kubelet does not write what has not changed.
    fn update(&mut self, volumes: usize) -> Result<()> {
        self.updates += 1;
        let content = self.updates.to_string();
        self.volumes[..volumes]
            .iter()
            .try_for_each(|(volume, keys)| volume.update(&payload(keys, &content)))
    }

    fn create(&self) -> Result<Took> {
        let mut guard = Command::new(self.node.programs().join(GUARD));
        guard
            .envs(self.node.environment())
            .env("BINDGUARD_RUNTIME", IDLE_RUNTIME);
        self.took(guard)
    }

    fn without_guard(&self) -> Result<Took> {
        self.took(Command::new(IDLE_RUNTIME))
    }

    fn took(&self, mut command: Command) -> Result<Took> {
        command
            .args(["create", "--bundle"])
            .arg(self.bundle.path())
            .arg("guarded")
            .stdin(Stdio::null());
        let (cpu, begun) = (clocks::of_children()?, Instant::now());
        let status = command
            .status()
            .with_context(|| format!("run {command:?}"))?;
        let wall = begun.elapsed().as_secs_f64() * 1e3;
        ensure!(status.success(), "{command:?}: {status}");
        Ok(Took {
            cpu: clocks::of_children()? - cpu,
            wall,
        })
    }
}

fn payload<'a>(keys: &[&'a str], content: &'a str) -> Vec<(&'a str, &'a str)> {
    keys.iter().map(|key| (*key, content)).collect()
}

fn root_of_the_host() -> Value {
    let mut root = Bundle::bind(Path::new("/"), "/host");
    root["options"] = json!(["rbind", "rslave", "ro"]);
    root
}
