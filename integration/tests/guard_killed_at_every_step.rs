//! The guard is killed at each of its steps. Whatever it had done by then, the next create ends with one mount at the
//! path, current content, an edited spec, and nothing left over; and nobody ever saw the file underneath.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use bindguard_integration::bundle::Bundle;
use bindguard_integration::kubelet::Subpath;
use bindguard_integration::process::run;
use bindguard_integration::scenes::only_a_current_mount;
use bindguard_integration::{Generation, Node, PollingReader, Setup, Volume, VolumeKind, mounts};

/// Steps of the way for kernels before 6.5, which no other way takes.
const TUCK: [&str; 3] = ["namespace-unshared", "copy-attached", "tucked"];

#[test]
fn mounting_beneath() {
    Setup::on(Generation::V1_7).fault_points().story(|node| tell(node, ""));
}

#[test]
fn tucked_by_propagation() {
    Setup::on(Generation::V1_7).fault_points().story(|node| tell(node, "no-beneath"));
}

/// A pod whose configMap is stale, and a bundle that binds it and the host's `/`.
struct Stage<'n> {
    node: &'n Node,
    volume: Volume,
    subpath: Subpath,
    bundle: Bundle,
    spec: Vec<u8>,
    updates: u32,
}

fn tell(node: &Node, way: &str) -> Result<()> {
    let pod = node.kubelet().pod("killed")?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("count", "0")])?;
    let subpath = volume.subpath("app", 0, "count");
    let binds = [Bundle::bind(subpath.bind()?, "/etc/count"), Bundle::bind(Path::new("/"), "/host")];
    let spec = Bundle::spec(&binds).to_string().into_bytes();
    let bundle = Bundle::create(node, "killed", &spec)?;
    let mut stage = Stage { node, volume, subpath, bundle, spec, updates: 0 };
    let reader = PollingReader::start(stage.subpath.target());
    let places = stage.places()?;
    ensure!(places.iter().any(|place| place == "after-attach"), "the guard knows these places only: {places:?}");
    for place in &places {
        for updated_again in [false, true] {
            let what = format!("killed at {place}, {updated_again:?} updated again");
            stage.kill(way, place).context(what.clone())?;
            if updated_again {
                stage.update()?;
            }
            stage.next_create().context(what)?;
        }
    }
    let seen = reader.stop();
    ensure!(seen.empty == 0 && seen.failed == 0 && seen.reads > 1000, "a reader saw the file underneath: {seen:?}");
    pod.delete()
}

impl Stage<'_> {
    fn places(&self) -> Result<Vec<String>> {
        let mut guard = self.bundle.admit(self.node)?;
        guard.env("BINDGUARD_FAULT", "list");
        Ok(run(guard)?.success()?.lines().map(str::to_owned).collect())
    }

    /// What is stale again gets a guard that dies at this place, if its way leads there.
    fn kill(&mut self, way: &str, place: &str) -> Result<()> {
        fs::write(self.bundle.path().join("config.json"), &self.spec).context("write the spec anew")?;
        self.update()?;
        let mut guard = self.bundle.admit(self.node)?;
        guard.env("BINDGUARD_FAULT", format!("{way},{place}"));
        let ended = run(guard)?;
        let is_on_its_way = way == "no-beneath" || !TUCK.contains(&place);
        let expected = if is_on_its_way { Some(9) } else { None };
        ensure!(ended.status.signal() == expected, "it ended otherwise: {ended:?}");
        Ok(())
    }

    fn update(&mut self) -> Result<()> {
        self.updates += 1;
        match self.volume.update(&[("count", &self.updates.to_string())]) {
            // the new payload is in place; the old one's file is a mount point as long as a swap is half done
            Err(error) if is_busy(&error) => Ok(()),
            done => done,
        }
    }

    fn next_create(&self) -> Result<()> {
        let before = mounts_of_others(&self.subpath)?;
        run(self.bundle.admit(self.node)?)?.success()?;
        only_a_current_mount(&self.subpath)?;
        let content = fs::read_to_string(self.subpath.target()).context("read the subpath")?;
        ensure!(content == self.updates.to_string(), "it shows {content:?} after update {}", self.updates);
        let seen = String::from_utf8(self.bundle.seen()?)?;
        ensure!(seen.contains("rslave"), "the runtime saw a spec without the edit: {seen}");
        ensure!(self.volume.timestamp_directories()? == 1, "a timestamp directory was stranded");
        ensure!(mounts_of_others(&self.subpath)? == before, "mounts elsewhere have changed");
        let expected = BTreeSet::from(["config.json", "log.json", "recorder", "rootfs", "seen.args", "seen.json"]);
        let names = names_in(self.bundle.path())?;
        ensure!(names.iter().all(|name| expected.contains(name.as_str())), "left in the bundle: {names:?}");
        journal_is_whole()
    }
}

fn mounts_of_others(subpath: &Subpath) -> Result<usize> {
    Ok(mounts::table()?.iter().filter(|mount| mount.target != subpath.target()).count())
}

fn names_in(folder: &Path) -> Result<Vec<String>> {
    let entries = fs::read_dir(folder).with_context(|| format!("list {}", folder.display()))?;
    entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
}

fn journal_is_whole() -> Result<()> {
    let journal = fs::read_to_string("/run/bindguard/journal.jsonl").context("read the journal")?;
    for line in journal.lines() {
        serde_json::from_str::<serde_json::Value>(line).with_context(|| format!("understand the line {line:?}"))?;
    }
    ensure!(journal.ends_with('\n'), "the last line is cut off");
    Ok(())
}

fn is_busy(error: &anyhow::Error) -> bool {
    let cause = error.root_cause().downcast_ref::<std::io::Error>();
    cause.is_some_and(|cause| cause.kind() == ErrorKind::ResourceBusy)
}
