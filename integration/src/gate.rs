//! A slow runc: holds `create` back until the story lets it go on.
//!
//! kubernetes#127602 needs an update to land after everything was checked and before runc mounts. Waiting for luck
//! makes flaky tests, so the runtime on containerd's `PATH` becomes a script that says "I was called", waits for "go",
//! and then becomes the real runc.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// The gate before a node's OCI runtime. Open until it is closed.
#[derive(Clone, Debug)]
pub struct Gate(PathBuf);

impl Gate {
    /// The gate of the node with this folder of programs.
    pub fn of(programs: &Path) -> Self {
        Self(programs.to_path_buf())
    }

    /// Puts the script in the place of `runc`.
    pub(crate) fn install(&self, oci: &Path) -> Result<()> {
        // the state is three files: closed (hold the next create), called (it has arrived), go
        let script = format!(
            "#!/bin/sh\ngate={}\nif [ -e $gate/closed ]; then case \" $* \" in *\" create \"*)\n  rm $gate/closed; : > $gate/called\n  \
             tries=0; while [ ! -e $gate/go ] && [ $tries -lt 1000 ]; do sleep 0.01; tries=$((tries + 1)); done\n;; esac; fi\nexec {} \"$@\"\n",
            self.0.display(),
            oci.display(),
        );
        let program = self.0.join("runc");
        fs::write(&program, script).with_context(|| format!("write {}", program.display()))?;
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).context("make the slow runc executable")
    }

    /// Holds back the next `create`, and only that one.
    pub fn close(&self) -> Result<()> {
        for old in ["called", "go"] {
            let _ = fs::remove_file(self.0.join(old));
        }
        self.leave("closed")
    }

    /// Waits until a `create` stands before the gate.
    pub fn wait_for_create(&self) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(10);
        while !self.0.join("called").exists() {
            if Instant::now() > deadline {
                bail!("no create came to the slow runc");
            }
            thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// Lets it go on.
    pub fn open(&self) -> Result<()> {
        self.leave("go")
    }

    fn leave(&self, name: &str) -> Result<()> {
        fs::write(self.0.join(name), "").with_context(|| format!("write {} of the slow runc", name))
    }
}
