//! Volume plugins: where their volumes lie, who writes into them, and which of them are nothing without a mount.

use std::ffi::OsStr;
use std::fmt;

use super::plugins::{HOST_PATH, MEMORY, PLUGINS};
use super::pod_path::PodPath;
use crate::mount_table::FsType;

/// Who may change what is in a volume. It decides how far a path in it can be trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Writer {
    /// The kubelet alone, through AtomicWriter.
    Kubelet,
    /// The pod's containers: any name in it may be a trap.
    Containers,
}

/// A plugin whose volumes the guard understands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plugin {
    pub(super) folder: &'static str,
    pub(super) below: &'static str,
    pub(super) writer: Writer,
    pub(super) mount: Option<RequiredMount>,
}

/// The mount that a plugin's volumes are nothing without.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequiredMount {
    /// The filesystems that the plugin mounts; none listed: any.
    pub(super) fs_types: &'static [&'static str],
    /// What usually keeps it from mounting.
    pub(super) usual_cause: &'static str,
}

impl Plugin {
    /// All plugins that have a folder in a pod.
    pub fn all() -> impl Iterator<Item = Self> {
        PLUGINS.iter().copied()
    }

    /// The plugin of volumes that lie anywhere on the host.
    pub fn host_path() -> Self {
        HOST_PATH
    }

    /// The plugin whose volumes lie in this folder.
    pub fn from_folder(folder: &OsStr) -> Option<Self> {
        Self::all().find(|plugin| folder == plugin.folder)
    }

    /// The folder below `volumes` that its volumes are in: `kubernetes.io~configmap`.
    pub fn folder(self) -> &'static str {
        self.folder
    }

    /// What of a volume's folder the containers get: `mount` for CSI, otherwise all of it.
    pub fn below(self) -> &'static str {
        self.below
    }

    /// Who writes into its volumes.
    pub fn writer(self) -> Writer {
        self.writer
    }

    /// The mount that its volumes need, if they need one.
    pub fn required_mount(self) -> Option<RequiredMount> {
        self.mount
    }

    /// Whether `path` is `<root>/pods/<uid>/volumes/<plugin>/<volume>/<name>...` of a kubelet-written volume.
    pub fn holds_payload_path(path: &PodPath<'_, '_>) -> bool {
        let &[volumes, folder, _volume, _name, ..] = path.names() else { return false };
        volumes == "volumes" && Self::from_folder(folder).is_some_and(|plugin| plugin.writer() == Writer::Kubelet)
    }
}

impl RequiredMount {
    /// What an emptyDir of medium Memory needs.
    pub(super) fn memory() -> Self {
        MEMORY
    }

    /// Whether a mount of this filesystem is what the plugin makes.
    pub fn may_be(self, fs_type: &FsType) -> bool {
        self.fs_types.is_empty() || self.fs_types.contains(&fs_type.0.as_str())
    }

    /// What usually keeps the volume from being mounted.
    pub fn usual_cause(self) -> &'static str {
        self.usual_cause
    }
}

impl fmt::Display for Plugin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.folder)
    }
}
