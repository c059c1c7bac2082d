//! A bundle as containerd lays it out, made by the story: a spec, a root filesystem to mount, the
//! fifo for the shim's log.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use containerd_shim_protos::api::{CreateTaskRequest, Mount};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use serde_json::{Value, json};

use crate::image;
use crate::node::Node;

/// A bundle of the story's own. It is removed when dropped, as containerd would.
#[derive(Debug)]
pub struct Bundle {
    path: PathBuf,
    id: String,
    rootfs: Mount,
}

impl Bundle {
    /// A bundle whose container runs `words`.
    pub fn create(node: &Node, id: &str, words: &[&str]) -> Result<Self> {
        Self::create_with(node, id, &spec(node, id, words))
    }

    /// A bundle with this spec.
    pub fn create_with(node: &Node, id: &str, spec: &Value) -> Result<Self> {
        Self::create_at(node, &Path::new("/run/bundles").join(id), id, spec)
    }

    /// The same in a folder that the story names, and may have made.
    pub fn create_at(node: &Node, path: &Path, id: &str, spec: &Value) -> Result<Self> {
        fs::create_dir_all(path)
            .with_context(|| format!("create the bundle {}", path.display()))?;
        let bundle = Self {
            path: path.to_owned(),
            id: id.to_owned(),
            rootfs: busybox(node)?,
        };
        fs::create_dir(path.join("rootfs"))
            .context("create the mount point of the root filesystem")?;
        mkfifo(&path.join("log"), Mode::from_bits_truncate(0o600))
            .context("make the fifo for the shim's log")?;
        fs::write(path.join("config.json"), spec.to_string()).context("write the spec")?;
        Ok(bundle)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn id(&self) -> &str {
        &self.id
    }

    /// containerd's create request, without streams and options.
    pub fn request(&self) -> CreateTaskRequest {
        CreateTaskRequest {
            id: self.id.clone(),
            bundle: self.path.display().to_string(),
            rootfs: vec![self.rootfs.clone()],
            ..Default::default()
        }
    }

    /// A fifo in the bundle.
    pub fn fifo(&self, name: &str) -> Result<PathBuf> {
        let path = self.path.join(name);
        mkfifo(&path, Mode::from_bits_truncate(0o600))
            .with_context(|| format!("make the fifo {}", path.display()))?;
        Ok(path)
    }
}

impl Drop for Bundle {
    fn drop(&mut self) {
        // something mounted below it is for the story to find
        if let Err(error) = fs::remove_dir_all(&self.path) {
            eprintln!("the bundle {} stays: {error}", self.path.display());
        }
    }
}

/// The spec that `ctr` would write, in short.
pub fn spec(node: &Node, id: &str, words: &[&str]) -> Value {
    let mount = |kind: &str, destination: &str, options: &[&str]| json!({"type": kind, "source": kind, "destination": destination, "options": options});
    let namespaces: Vec<Value> = ["pid", "ipc", "uts", "mount"]
        .iter()
        .map(|kind| json!({"type": kind}))
        .collect();
    json!({
        "ociVersion": "1.0.2",
        "process": {"args": words, "cwd": "/", "env": ["PATH=/bin"], "user": {"uid": 0, "gid": 0}},
        "root": {"path": "rootfs"},
        "mounts": [
            mount("proc", "/proc", &[]),
            mount("tmpfs", "/dev", &["nosuid", "mode=755"]),
            mount("devpts", "/dev/pts", &["nosuid", "newinstance", "ptmxmode=0666", "mode=0620"]),
            mount("tmpfs", "/tmp", &["nosuid"]),
        ],
        "linux": {"cgroupsPath": node.cgroups_path(id), "namespaces": namespaces},
    })
}

/// A folder with busybox, to be bound.
fn busybox(node: &Node) -> Result<Mount> {
    let folder = node.disk().join("busybox");
    if !folder.is_dir() {
        image::lay_out(&folder)?;
    }
    let options = ["rbind", "rw"].map(str::to_owned).to_vec();
    Ok(Mount {
        type_: "bind".to_owned(),
        source: folder.display().to_string(),
        options,
        ..Default::default()
    })
}
