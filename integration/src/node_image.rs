//! The root file system of a node image: the machine's own files below another folder, without
//! those that an installation reads or writes, without `/proc`, and without `/dev/null`.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::mount_calls::{bind, own_copy_at};
use crate::node::Node;
use crate::process::{Finished, run};
use crate::programs::{Generation, Matrix};

/// Paths that a new image lacks.
const REMOVED: [&str; 7] = [
    "etc/containerd",
    "etc/bindguard",
    "var/lib/bindguard",
    "var/lib/rancher",
    "etc/k0s",
    "etc/docker",
    "dev/null",
];

/// An image, in the mount namespace of a node.
#[derive(Debug)]
pub struct NodeImage<'n> {
    node: &'n Node,
    folder: PathBuf,
    changes: PathBuf,
    containerd: PathBuf,
}

impl<'n> NodeImage<'n> {
    /// Lays out an image below this folder of `/run`, which a containerd of this generation reads.
    pub fn lay_out(node: &'n Node, folder: &Path, generation: Generation) -> Result<Self> {
        let upper = folder.with_extension("upper");
        own_copy_at(Path::new("/"), folder, &upper)?;
        let matrix = Matrix::locate()?;
        // the matrix may be on a file system of its own, and a link would lead out of the image
        let programs = fs::canonicalize(matrix.folder()).context("find the containerds")?;
        let there = folder.join(programs.strip_prefix("/")?);
        fs::create_dir_all(&there).context("make the folder of the containerds")?;
        bind(&programs, &there)?;
        let image = Self {
            node,
            folder: folder.to_owned(),
            changes: upper.join("changes"),
            containerd: matrix.program(generation, "containerd"),
        };
        for removed in REMOVED {
            let path = image.folder.join(removed);
            if path.is_dir() {
                fs::remove_dir_all(&path)?;
            } else {
                drop(fs::remove_file(&path));
            }
        }
        Ok(image)
    }

    /// The folder of all files that were written to the image.
    pub fn changes(&self) -> &Path {
        &self.changes
    }

    /// The place of a path of the image.
    pub fn path(&self, path: &str) -> PathBuf {
        self.folder.join(path.trim_start_matches('/'))
    }

    /// True if the image has such a file.
    pub fn exists(&self, path: &str) -> bool {
        // a link of the image does not lead into the image from here
        self.path(path).symlink_metadata().is_ok()
    }

    /// The text of a file.
    pub fn read(&self, path: &str) -> Result<String> {
        fs::read_to_string(self.path(path)).with_context(|| format!("read {path}"))
    }

    /// Writes a file, and the folders above.
    pub fn write(&self, path: &str, text: &str) -> Result<()> {
        let file = self.path(path);
        fs::create_dir_all(file.parent().context("a folder")?)?;
        // a link, as os-release is, would lead out of the image
        let _ = fs::remove_file(&file);
        fs::write(&file, text).with_context(|| format!("write {path}"))
    }

    /// `bindguard install` with these words.
    pub fn install(&self, words: &[&str]) -> Result<Finished> {
        let containerd = format!("--containerd={}", self.containerd.display());
        self.bindguard(&[&["install", &containerd], words].concat())
    }

    /// The command line on the image.
    pub fn bindguard(&self, words: &[&str]) -> Result<Finished> {
        let root = self.folder.display().to_string();
        self.node.bindguard([words, &["--root", &root]].concat())
    }

    /// containerd's own reading of a file of the image.
    pub fn dump(&self, config: &str) -> Result<String> {
        let mut command = std::process::Command::new("chroot");
        command
            .arg(&self.folder)
            .arg(&self.containerd)
            .args(["--config", config, "config", "dump"]);
        Ok(run(command)?.success()?.replace('\'', "\""))
    }
}
