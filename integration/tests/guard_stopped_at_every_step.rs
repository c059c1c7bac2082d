//! The guard is stopped for ever at each of its steps. The shim goes on without it at the deadline; what a stale source
//! makes of that create, the next one mends. No guard stays behind.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use bindguard_integration::bundle::Bundle;
use bindguard_integration::process::run;
use bindguard_integration::programs::GUARD;
use bindguard_integration::scenes::only_a_current_mount;
use bindguard_integration::{Bind, Generation, Node, Setup, VolumeKind, mounts};

/// Far from what a create takes, and from what a client of containerd waits.
const LIMIT: Duration = Duration::from_secs(20);

#[test]
fn creates_are_answered_and_the_next_one_starts() {
    Setup::on(Generation::V2_1).fault_points().policy("[guard]\ndeadline-ms = 400\n").story(tell);
}

fn tell(node: &Node) -> Result<()> {
    let pod = node.kubelet().pod("stopped")?;
    let volume = pod.volume(VolumeKind::ConfigMap, "conf", &[("count", "0")])?;
    let subpath = volume.subpath("app", 0, "count");
    let bind = Bind::new(subpath.bind()?, "/etc/count");
    let host = Bind::new("/usr", "/host");
    let (ctr, guard) = (node.ctr(), Guard::of(node)?);
    let before = mounts::table()?.len();
    for (number, place) in places(node)?.iter().enumerate() {
        let content = (number + 1).to_string();
        volume.update(&[("count", &content)])?;
        guard.meets(&format!("stop:{place}"))?;
        let begin = Instant::now();
        let met = ctr.container("met").mount(bind.clone()).mount(host.clone()).runs(&["true"]).run()?;
        ensure!(begin.elapsed() < LIMIT, "stopped at {place}: the create took {:?}: {met:?}", begin.elapsed());
        if !met.status.success() {
            ensure!(met.stderr.contains("no such file"), "stopped at {place}: not the runtime's own words: {met:?}");
            // whether `--rm` removed it depends on where it failed
            let _ = ctr.forget("met");
        }
        guard.is_itself()?;
        let next = ctr.container("next").mount(bind.clone()).runs(&["cat", "/etc/count"]).run()?;
        let read = next.success().with_context(|| format!("after {place}"))?;
        ensure!(read == content, "after {place} the container reads {read:?} and not {content:?}");
        only_a_current_mount(&subpath).with_context(|| format!("after {place}"))?;
        no_guard_stays(node).with_context(|| format!("after {place}"))?;
    }
    ensure!(volume.timestamp_directories()? == 1, "a timestamp directory was stranded");
    ensure!(mounts::table()?.len() == before, "{before} mounts before, {} after", mounts::table()?.len());
    pod.delete()
}

fn places(node: &Node) -> Result<Vec<String>> {
    let bundle = Bundle::create(node, "list", b"{}")?;
    let mut guard = bundle.admit(node)?;
    guard.env("BINDGUARD_FAULT", "list");
    Ok(run(guard)?.success()?.lines().map(str::to_owned).collect())
}

/// The guard beside the shim, which a script can stand in for that gives it its fault.
struct Guard {
    program: PathBuf,
    real: PathBuf,
}

impl Guard {
    fn of(node: &Node) -> Result<Self> {
        let program = node.programs().join(GUARD);
        let real = fs::canonicalize(&program).with_context(|| format!("resolve {}", program.display()))?;
        Ok(Self { program, real })
    }

    fn meets(&self, fault: &str) -> Result<()> {
        let script = format!("#!/bin/sh\nBINDGUARD_FAULT={fault} exec {} \"$@\"\n", self.real.display());
        self.put(|beside| {
            fs::write(beside, script)?;
            fs::set_permissions(beside, fs::Permissions::from_mode(0o755))
        })
    }

    fn is_itself(&self) -> Result<()> {
        self.put(|beside| std::os::unix::fs::symlink(&self.real, beside))
    }

    /// By a rename: a script that still runs keeps its own file.
    fn put(&self, make: impl FnOnce(&Path) -> std::io::Result<()>) -> Result<()> {
        let beside = self.program.with_extension("new");
        make(&beside).and_then(|()| fs::rename(&beside, &self.program)).context("exchange the guard")
    }
}

fn no_guard_stays(node: &Node) -> Result<()> {
    let deadline = Instant::now() + LIMIT;
    // the kernel cuts names after 15 bytes
    while node.processes()?.iter().any(|name| GUARD.starts_with(name.trim())) {
        ensure!(Instant::now() < deadline, "a guard is left: {:?}", node.processes()?);
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}
