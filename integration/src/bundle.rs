//! A bundle and a runtime for stories about bindguard-runtime alone: what does the runtime behind
//! it get to see?

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::node::Node;
use crate::process::write_program;
use crate::programs::GUARD;

/// A folder with a `config.json`, and a runtime that only records.
#[derive(Clone, Debug)]
pub struct Bundle {
    path: PathBuf,
    recorder: PathBuf,
}

impl Bundle {
    /// A bundle with exactly these bytes as its `config.json`.
    pub fn create(node: &Node, name: &str, config: &[u8]) -> Result<Self> {
        let path = node.disk().join("bundles").join(name);
        fs::create_dir_all(path.join("rootfs"))
            .with_context(|| format!("create the bundle {}", path.display()))?;
        fs::write(path.join("config.json"), config)
            .with_context(|| format!("write the spec of {}", path.display()))?;
        let recorder = path.join("recorder");
        // the copy is what the runtime saw, whatever happens to the bundle later
        let script = format!(
            "#!/bin/sh\ncp {0}/config.json {0}/seen.json\necho \"$*\" > {0}/seen.args\n",
            path.display()
        );
        write_program(&recorder, &script)?;
        Ok(Self { path, recorder })
    }

    /// A small spec with these mounts.
    pub fn spec(mounts: &[Value]) -> Value {
        json!({
            "ociVersion": "1.0.2",
            "process": {"args": ["true"], "cwd": "/", "user": {"uid": 0, "gid": 0}},
            "root": {"path": "rootfs"},
            "mounts": mounts,
            "linux": {"namespaces": [{"type": "mount"}]},
        })
    }

    /// A bind of `source`, with the options the kubelet's CRI gives.
    pub fn bind(source: &Path, destination: &str) -> Value {
        json!({"destination": destination, "type": "bind", "source": source, "options": ["rbind", "rprivate", "ro"]})
    }

    /// `bindguard-runtime create` of this bundle, with the recorder behind it.
    pub fn admit(&self, node: &Node) -> Result<Command> {
        self.admit_under(node, &[])
    }

    /// As `admit`, with the command line of a wrapper before the guard's.
    pub fn admit_under(&self, node: &Node, before: &[&str]) -> Result<Command> {
        let guard = node.programs().join(GUARD);
        let words: Vec<&OsStr> = before
            .iter()
            .map(OsStr::new)
            .chain([guard.as_os_str()])
            .collect();
        let mut command = node.command(words[0])?;
        command
            .args(&words[1..])
            .arg("--log")
            .arg(self.log_file())
            .args(["--log-format", "json", "create", "--bundle"])
            .arg(&self.path)
            .arg("c1");
        command.env("BINDGUARD_RUNTIME", &self.recorder);
        Ok(command)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The `config.json` that the runtime saw.
    pub fn seen(&self) -> Result<Vec<u8>> {
        fs::read(self.path.join("seen.json")).context("read what the runtime saw: was it reached?")
    }

    /// The arguments that the runtime got.
    pub fn arguments(&self) -> Result<String> {
        fs::read_to_string(self.path.join("seen.args"))
            .context("read the runtime's arguments: was it reached?")
    }

    /// The guard's lines in the runtime's `--log`.
    pub fn log(&self) -> Result<String> {
        fs::read_to_string(self.log_file()).context("read the runtime's log")
    }

    /// Forgets what was written to the log.
    pub fn clear_log(&self) -> Result<()> {
        fs::write(self.log_file(), "").context("empty the runtime's log")
    }

    fn log_file(&self) -> PathBuf {
        self.path.join("log.json")
    }
}
