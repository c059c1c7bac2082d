//! A pod's folder on the node, from its first volume to the removal of the last trace.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::subpath;
use super::volume::{Volume, VolumeKind};
use crate::mount_calls::unmount;
use crate::mounts;

/// A pod, as far as the kubelet's disk knows it.
#[derive(Clone, Debug)]
pub struct Pod {
    path: PathBuf,
    uid: String,
}

impl Pod {
    pub(super) fn create(root: &Path, uid: &str) -> Result<Self> {
        let path = root.join("pods").join(uid);
        fs::create_dir_all(&path).with_context(|| format!("create {}", path.display()))?;
        Ok(Self {
            path,
            uid: uid.to_owned(),
        })
    }

    pub fn uid(&self) -> &str {
        &self.uid
    }

    /// `pods/UID`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A volume with a first payload.
    pub fn volume(&self, kind: VolumeKind, name: &str, payload: &[(&str, &str)]) -> Result<Volume> {
        let volume = self.empty_volume(kind, name)?;
        volume.update(payload)?;
        Ok(volume)
    }

    /// A volume without content, for containers to write.
    pub fn empty_volume(&self, kind: VolumeKind, name: &str) -> Result<Volume> {
        Volume::create(&self.path, kind, name)
    }

    pub fn host_path(&self, folder: &Path, name: &str) -> Result<Volume> {
        Volume::on_host(&self.path, folder, name)
    }

    /// The kubelet's `CleanSubPaths`. Fails if a subpath has no mount or several mounts.
    pub fn clean_subpaths(&self) -> Result<()> {
        subpath::clean(&self.path.join("volume-subpaths"))
    }

    /// Deletes the pod with its subpaths, volumes and folder.
    pub fn delete(self) -> Result<()> {
        self.clean_subpaths()?;
        let resolved = fs::canonicalize(&self.path)
            .with_context(|| format!("resolve {}", self.path.display()))?;
        for mount in mounts::table()?
            .iter()
            .rev()
            .filter(|mount| mount.target.starts_with(resolved.join("volumes")))
        {
            unmount(&mount.target)?;
        }
        fs::remove_dir_all(&self.path).with_context(|| format!("remove {}", self.path.display()))
    }
}
