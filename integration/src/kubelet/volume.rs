//! A pod's volume: its writer and its filesystem.
//!
//! configMap volumes are folders on the kubelet's disk. Secret, projected and downwardAPI volumes
//! are tmpfs mounts (each plugin wraps an emptyDir with `medium: Memory`), so the root of a bind
//! from them is relative to that tmpfs.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::atomic_writer;
use super::subpath::Subpath;
use crate::mount_calls::tmpfs;

/// The kind of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VolumeKind {
    /// Written by the kubelet, on disk.
    ConfigMap,
    /// Written by the kubelet, on tmpfs.
    Secret,
    /// Written by the kubelet, on tmpfs.
    Projected,
    /// Written by the kubelet, on tmpfs.
    DownwardApi,
    /// An inline CSI volume that its driver writes as the kubelet writes a secret, on tmpfs.
    InlineCsi,
    /// Written by the containers, on disk.
    EmptyDir,
    /// Written by the containers, on tmpfs.
    EmptyDirMemory,
}

impl VolumeKind {
    /// The volumes that the kubelet alone writes.
    pub const KUBELET_WRITTEN: [Self; 4] = [
        Self::ConfigMap,
        Self::Secret,
        Self::Projected,
        Self::DownwardApi,
    ];

    fn plugin(self) -> &'static str {
        match self {
            Self::ConfigMap => "kubernetes.io~configmap",
            Self::Secret => "kubernetes.io~secret",
            Self::Projected => "kubernetes.io~projected",
            Self::DownwardApi => "kubernetes.io~downward-api",
            Self::InlineCsi => "kubernetes.io~csi",
            Self::EmptyDir | Self::EmptyDirMemory => "kubernetes.io~empty-dir",
        }
    }

    fn is_tmpfs(self) -> bool {
        match self {
            Self::ConfigMap | Self::EmptyDir => false,
            Self::Secret | Self::Projected | Self::DownwardApi => true,
            Self::InlineCsi | Self::EmptyDirMemory => true,
        }
    }
}

/// A volume of a pod.
#[derive(Clone, Debug)]
pub struct Volume {
    path: PathBuf,
    subpaths: PathBuf,
}

impl Volume {
    pub(super) fn create(pod: &Path, kind: VolumeKind, name: &str) -> Result<Self> {
        let folder = pod.join("volumes").join(kind.plugin()).join(name);
        let path = match kind {
            VolumeKind::InlineCsi => folder.join("mount"),
            _ => folder.clone(),
        };
        fs::create_dir_all(&path).with_context(|| format!("create {}", path.display()))?;
        if kind == VolumeKind::InlineCsi {
            let record =
                r#"{"driverName":"secrets-store.csi.k8s.io","volumeLifecycleMode":"Ephemeral"}"#;
            fs::write(folder.join("vol_data.json"), record).context("write vol_data.json")?;
        }
        if kind.is_tmpfs() {
            tmpfs(&path, "mode=777")?;
        }
        Ok(Self {
            path,
            subpaths: pod.join("volume-subpaths").join(name),
        })
    }

    /// A hostPath volume: the pod's directory has no folder for a hostPath volume.
    pub(super) fn on_host(pod: &Path, folder: &Path, name: &str) -> Result<Self> {
        fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
        Ok(Self {
            path: folder.to_owned(),
            subpaths: pod.join("volume-subpaths").join(name),
        })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The kubelet writes a new payload: all of it, names that are missing here go away.
    pub fn update(&self, payload: &[(&str, &str)]) -> Result<()> {
        atomic_writer::write(&self.path, payload)
    }

    /// The same while a repair may run: then a file of the old payload can be a mount point for a
    /// moment. The real kubelet reports that it could not remove the old payload, and goes on.
    pub fn update_during_a_repair(&self, payload: &[(&str, &str)]) -> Result<()> {
        match self.update(payload) {
            Err(error) if is_busy(&error) => Ok(()),
            updated => updated,
        }
    }

    /// The number of timestamp directories: 1, unless a removal of an old directory failed.
    pub fn timestamp_directories(&self) -> Result<usize> {
        let entries =
            fs::read_dir(&self.path).with_context(|| format!("list {}", self.path.display()))?;
        Ok(entries
            .flatten()
            .filter(|entry| entry.file_name().to_string_lossy().starts_with("..2"))
            .count())
    }

    /// The `subPath` of the volume mount with this index in the container's list.
    pub fn subpath(&self, container: &str, index: u32, path: &str) -> Subpath {
        Subpath::new(
            &self.path,
            self.subpaths.join(container).join(index.to_string()),
            path,
        )
    }
}

fn is_busy(error: &anyhow::Error) -> bool {
    let cause = error.root_cause().downcast_ref::<std::io::Error>();
    cause.is_some_and(|cause| cause.kind() == ErrorKind::ResourceBusy)
}
