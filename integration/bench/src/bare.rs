//! The floor: what a runtime costs without a shim or a guard. `create`, `start`, `delete`, as a
//! shim calls them, on the spec that containerd wrote for the same container.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use bindguard_integration::image::lay_out;
use serde_json::{Value, json};

use crate::candidate::Candidate;
use crate::ground::Ground;

const STATE: &str = "/run/bare";

/// A bundle that was made by containerd, to be run without it.
#[derive(Debug)]
pub struct Bare(PathBuf);

impl Bare {
    /// Takes the spec of a container of the node.
    pub fn lay_out(ground: &Ground) -> Result<Self> {
        let node = &ground.node;
        ground.start_pod(Candidate::Bindguard, "pattern", 1)?;
        let file = Path::new("/run/containerd/io.containerd.runtime.v2.task")
            .join(node.name())
            .join("pattern/config.json");
        let spec = fs::read(&file).with_context(|| format!("read {}", file.display()))?;
        node.ctr().remove("pattern")?;
        let bundle = node.disk().join("bare");
        lay_out(&bundle.join("rootfs"))?;
        let mut spec: Value = serde_json::from_slice(&spec).context("parse containerd's spec")?;
        spec["process"]["args"] = json!(["true"]);
        spec["root"]["path"] = json!("rootfs");
        spec["linux"]["cgroupsPath"] = json!(format!("/{}/bare", node.name()));
        fs::write(bundle.join("config.json"), spec.to_string()).context("write the spec")?;
        Ok(Self(bundle))
    }

    pub fn life(&self, runtime: &Path) -> Result<()> {
        let pid_file = self.0.join("pid");
        self.call(
            runtime,
            &[
                "create",
                "--bundle",
                &self.0.to_string_lossy(),
                "--pid-file",
                &pid_file.to_string_lossy(),
            ],
        )?;
        let pid = fs::read_to_string(&pid_file).context("read the container's pid")?;
        self.call(runtime, &["start"])?;
        wait_for_end(&pid)?;
        self.call(runtime, &["delete"])
    }

    fn call(&self, runtime: &Path, words: &[&str]) -> Result<()> {
        // no pipes: a container would hold them open
        let status = Command::new(runtime)
            .args(["--root", STATE])
            .args(words)
            .arg("bare")
            .current_dir(&self.0)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::inherit())
            .status();
        let status = status.with_context(|| format!("run {}", runtime.display()))?;
        ensure!(
            status.success(),
            "{} {words:?}: {status}",
            runtime.display()
        );
        Ok(())
    }
}

/// This process is not the container's parent: the container is gone, or a zombie until it is
/// reaped.
fn wait_for_end(pid: &str) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(10);
    while fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z ")) {
        ensure!(Instant::now() < deadline, "the container does not end");
        sleep(Duration::from_millis(1));
    }
    Ok(())
}
