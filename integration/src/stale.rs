//! A bundle whose subpath goes stale again and again, for stories in which the guard meets
//! something bad each time: what it had done by then, and whether the next create puts everything
//! right.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::bundle::Bundle;
use crate::journal::{JOURNAL, ROTATED, lines};
use crate::kubelet::{Pod, Subpath, Volume, VolumeKind};
use crate::mounts;
use crate::node::Node;
use crate::process::run;
use crate::scenes::only_a_current_mount;
use crate::waiting::until;

/// All that may lie in the bundle after a create: the spec, and what the recording runtime writes.
const IN_THE_BUNDLE: [&str; 7] = [
    "bindguard-binds.json",
    "config.json",
    "log.json",
    "recorder",
    "rootfs",
    "seen.args",
    "seen.json",
];

/// A pod whose configMap is bound by a bundle, next to the host's `/` (which needs an edit of the
/// spec) and a folder of the host (which must be probed first).
#[derive(Debug)]
pub struct StaleBundle<'n> {
    node: &'n Node,
    pod: Pod,
    volume: Volume,
    subpath: Subpath,
    bundle: Bundle,
    spec: Vec<u8>,
    updates: u32,
}

impl<'n> StaleBundle<'n> {
    /// Lays it out.
    pub fn lay_out(node: &'n Node, name: &str) -> Result<Self> {
        let pod = node.kubelet().pod(name)?;
        let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("count", "0")])?;
        let subpath = volume.subpath("app", 0, "count");
        let binds = [
            (subpath.bind()?, "/etc/count"),
            (Path::new("/"), "/host"),
            (Path::new("/usr"), "/mnt"),
        ];
        let spec = Bundle::spec(&binds.map(|(source, at)| Bundle::bind(source, at)))
            .to_string()
            .into_bytes();
        let bundle = Bundle::create(node, name, &spec)?;
        Ok(Self {
            node,
            pod,
            volume,
            subpath,
            bundle,
            spec,
            updates: 0,
        })
    }

    pub fn bundle(&self) -> &Bundle {
        &self.bundle
    }

    /// The subpath that goes stale.
    pub fn subpath(&self) -> &Subpath {
        &self.subpath
    }

    /// The guard of this bundle, with what is to be put before its command line.
    pub fn guard(&self, before: &[&str]) -> Result<Command> {
        self.bundle.admit_under(self.node, before)
    }

    /// The fault points that a guard reaches.
    pub fn fault_points(&self) -> Result<Vec<String>> {
        let mut guard = self.guard(&[])?;
        guard.env("BINDGUARD_FAULT", "list");
        Ok(run(guard)?.success()?.lines().map(str::to_owned).collect())
    }

    /// The spec as it was, and a mount that is stale.
    pub fn begin_anew(&mut self) -> Result<()> {
        self.write_spec()?;
        self.bundle.clear_log()?;
        self.update()
    }

    fn write_spec(&self) -> Result<()> {
        fs::write(self.bundle.path().join("config.json"), &self.spec).context("write the spec anew")
    }

    pub fn update(&mut self) -> Result<()> {
        self.updates += 1;
        self.volume
            .update_during_a_repair(&[("count", &self.updates.to_string())])
    }

    /// The path shows what it showed, or what is current, whatever a guard met; at most a swap is
    /// half done.
    pub fn shows_no_file_underneath(&self) -> Result<()> {
        let mounts = self.subpath.mounts()?;
        let deleted = mounts.iter().filter(|mount| mount.is_deleted()).count();
        ensure!(
            (1..=2).contains(&mounts.len()) && mounts.len() - deleted <= 1,
            "mounts at the path: {mounts:?}"
        );
        let content = fs::read_to_string(self.subpath.target()).context("read the subpath")?;
        ensure!(
            !content.is_empty(),
            "the path shows the empty file underneath: {mounts:?}"
        );
        Ok(())
    }

    /// An undisturbed create: the result is a single current mount, an edited spec, and no
    /// leftovers.
    pub fn next_create(&self) -> Result<()> {
        let before = self.mounts_elsewhere()?;
        self.write_spec()?;
        run(self.guard(&[])?)?.success()?;
        self.is_repaired()?;
        ensure!(
            self.volume.timestamp_directories()? == 1,
            "a timestamp directory was stranded"
        );
        ensure!(
            self.mounts_elsewhere()? == before,
            "mounts elsewhere have changed"
        );
        let names = names_in(self.bundle.path())?;
        ensure!(
            names
                .iter()
                .all(|name| IN_THE_BUNDLE.contains(&name.as_str())),
            "left in the bundle: {names:?}"
        );
        journal_is_whole()
    }

    /// Checks that the path has a single current mount, and that the runtime read an edited spec.
    pub fn is_repaired(&self) -> Result<()> {
        only_a_current_mount(&self.subpath)?;
        let content = fs::read_to_string(self.subpath.target()).context("read the subpath")?;
        ensure!(
            content == self.updates.to_string(),
            "it shows {content:?} after update {}",
            self.updates
        );
        let seen = String::from_utf8(self.bundle.seen()?)?;
        ensure!(
            seen.contains("rslave"),
            "the runtime saw a spec without the edit: {seen}"
        );
        Ok(())
    }

    /// Deletes the pod like the kubelet, which needs exactly one mount on each subpath.
    ///
    /// A killed guard may leave a process that has the subpath open for a moment. So `delete`
    /// retries the clean-up, like the kubelet.
    pub fn delete(self) -> Result<()> {
        let mut last = Ok(());
        let clean = until("the pod's subpaths are removed", || {
            last = self.pod.clean_subpaths();
            Ok(last.is_ok())
        });
        last.and(clean)?;
        self.pod.delete()
    }

    fn mounts_elsewhere(&self) -> Result<usize> {
        Ok(mounts::table()?
            .iter()
            .filter(|mount| mount.target != self.subpath.target())
            .count())
    }
}

fn names_in(folder: &Path) -> Result<Vec<String>> {
    let entries = fs::read_dir(folder).with_context(|| format!("list {}", folder.display()))?;
    entries
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect()
}

/// Whatever happened to a guard, no line of the journal is cut off.
fn journal_is_whole() -> Result<()> {
    // the last line may have made it full
    ensure!(
        lines(JOURNAL)?.len() + lines(ROTATED)?.len() > 0,
        "nothing is in the journal"
    );
    Ok(())
}
