//! The guard is stopped for ever at each of its steps. The shim goes on without a guard at the
//! deadline. That create may fail or get a stale file, and the next create repairs the source. No
//! guard stays behind.

use bindguard_integration::prelude::*;
use std::os::unix::fs::symlink;

use bindguard_integration::bundle::Bundle;
use bindguard_integration::mounts;
use bindguard_integration::scenes::says_no_such_file;
use bindguard_integration::waiting::LIMIT;

/// A stopped guard has a short deadline. A running guard has a long deadline, for a busy machine.
const OF_A_STOPPED_ONE: &str = "[guard]\ndeadline-ms = 400\n";
const OF_ANOTHER: &str = "[guard]\ndeadline-ms = 60000\n";

#[test]
fn creates_are_answered_and_the_next_one_starts() {
    Setup::on(Generation::NEWEST).fault_points().story(story);
}

fn story(node: &Node) -> Result<()> {
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
        policy(node, OF_A_STOPPED_ONE)?;
        let begin = Instant::now();
        let met = ctr
            .container("met")
            .mount(bind.clone())
            .mount(host.clone())
            .runs(&["true"])
            .run()?;
        ensure!(
            begin.elapsed() < LIMIT,
            "stopped at {place}: the create took {:?}: {met:?}",
            begin.elapsed()
        );
        if !met.status.success() {
            ensure!(
                says_no_such_file(&met.stderr),
                "stopped at {place}: not the runtime's own words: {met:?}"
            );
            // whether `--rm` removed it depends on where it failed
            let _ = ctr.forget("met");
        }
        guard.is_itself()?;
        policy(node, OF_ANOTHER)?;
        let next = ctr
            .container("next")
            .mount(bind.clone())
            .runs(&["cat", "/etc/count"])
            .run_to_end()?;
        let read = next.success().with_context(|| format!("after {place}"))?;
        ensure!(
            read == content,
            "after {place} the container reads {read:?} and not {content:?}"
        );
        only_a_current_mount(&subpath).with_context(|| format!("after {place}"))?;
        no_guard_stays(node).with_context(|| format!("after {place}"))?;
    }
    ensure!(
        volume.timestamp_directories()? == 1,
        "a timestamp directory was stranded"
    );
    ensure!(
        mounts::table()?.len() == before,
        "{before} mounts before, {} after",
        mounts::table()?.len()
    );
    pod.delete()
}

/// Writes the config, which a shim reads for each create.
fn policy(node: &Node, lines: &str) -> Result<()> {
    let text = format!("[kubelet]\nroots = [{:?}]\n{lines}", node.kubelet().root());
    fs::write(node.disk().join("bindguard.toml"), text).context("write the policy")
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
        let real =
            fs::canonicalize(&program).with_context(|| format!("resolve {}", program.display()))?;
        Ok(Self { program, real })
    }

    fn meets(&self, fault: &str) -> Result<()> {
        let script = format!(
            "#!/bin/sh\nBINDGUARD_FAULT={fault} exec {} \"$@\"\n",
            self.real.display()
        );
        self.put(|beside| write_program(beside, &script))
    }

    fn is_itself(&self) -> Result<()> {
        self.put(|beside| symlink(&self.real, beside).context("link the guard"))
    }

    /// By a rename: a script that still runs keeps its own file.
    fn put(&self, make: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
        let beside = self.program.with_extension("new");
        make(&beside)?;
        fs::rename(&beside, &self.program).context("exchange the guard")
    }
}

fn no_guard_stays(node: &Node) -> Result<()> {
    // the kernel cuts names after 15 bytes
    let is_one = |name: &String| GUARD.starts_with(name.trim());
    until("no guard is left", || {
        Ok(!node.processes()?.iter().any(is_one))
    })
}
