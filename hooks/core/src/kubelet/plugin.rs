//! Volume plugins: the paths of their volumes, their writers, and the mounts that they require.

use std::ffi::OsStr;
use std::fmt;

use super::payload::Layout;
use super::plugins::{FLEX_MEMORY, FLEX_VOLUME, HOST_PATH, MEMORY, PLUGINS};
use super::pod_path::PodPath;
use crate::mount_table::FsType;

/// The writer of a volume's content. It decides how far a path in the volume can be trusted.
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

/// The mount that a plugin's volumes require.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequiredMount {
    /// The filesystems that the plugin mounts; none listed: any.
    pub(super) fs_types: &'static [&'static str],
    /// The usual cause if it is missing.
    pub(super) usual_cause: &'static str,
}

impl Plugin {
    /// All plugins whose folder in a pod has a name of its own.
    pub fn all() -> impl Iterator<Item = Self> {
        PLUGINS.iter().copied()
    }

    /// The plugin of volumes that can be anywhere on the host.
    pub fn host_path() -> Self {
        HOST_PATH
    }

    /// The plugins for nearly all uses of a subPath.
    pub fn usual() -> impl Iterator<Item = Self> {
        Self::all().take(USUAL)
    }

    /// The plugin whose volumes are in this folder. A flexVolume's folder is named after its driver, `vendor~driver`.
    pub fn from_folder(folder: &OsStr) -> Option<Self> {
        let is_drivers = |folder: &str| folder.contains('~') && !folder.starts_with("kubernetes.io~");
        let flex_volume = || folder.to_str().filter(|folder| is_drivers(folder)).map(|_| FLEX_VOLUME);
        Self::all().find(|plugin| folder == plugin.folder).or_else(flex_volume)
    }

    /// The folder below `volumes` that its volumes are in, such as `kubernetes.io~configmap`; for a flexVolume its kind.
    pub fn folder(self) -> &'static str {
        self.folder
    }

    /// The part of a volume's folder that the containers get: `mount` for CSI, otherwise all of it.
    pub fn below(self) -> &'static str {
        self.below
    }

    /// The writer of its volumes.
    pub fn writer(self) -> Writer {
        self.writer
    }

    /// The layout of its volumes as far as the plugin decides it: other writers than the kubelet may use the kubelet's layout.
    pub fn layout(self) -> Layout {
        match self.writer {
            Writer::Kubelet => Layout::Payload,
            Writer::Containers => Layout::Plain,
        }
    }

    /// True if its volumes can be mounts of their own. A flexVolume's driver may mount, but need not.
    pub fn may_mount(self) -> bool {
        self.mount.is_some() || self == FLEX_VOLUME
    }

    /// The mount that its volumes need, if they need one.
    pub fn required_mount(self) -> Option<RequiredMount> {
        self.mount
    }

    /// The mount that a volume needs if it is known to have been a tmpfs.
    pub(super) fn required_tmpfs(self) -> RequiredMount {
        if self == FLEX_VOLUME { FLEX_MEMORY } else { MEMORY }
    }

    /// True if `path` is `<root>/pods/<uid>/volumes/<plugin>/<volume>/<name>...` of a kubelet-written volume.
    pub fn holds_payload_path(path: &PodPath<'_, '_>) -> bool {
        let &[volumes, folder, _volume, _name, ..] = path.names() else { return false };
        volumes == "volumes" && Self::from_folder(folder).is_some_and(|plugin| plugin.writer() == Writer::Kubelet)
    }
}

/// The number of usual plugins, the first in the table.
const USUAL: usize = 6;

impl RequiredMount {
    /// True if the plugin can have made a mount of this filesystem.
    pub fn may_be(self, fs_type: &FsType) -> bool {
        self.fs_types.is_empty() || self.fs_types.contains(&fs_type.0.as_str())
    }

    /// The usual cause if the volume is not mounted.
    pub fn usual_cause(self) -> &'static str {
        self.usual_cause
    }
}

impl fmt::Display for Plugin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.folder)
    }
}
