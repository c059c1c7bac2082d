//! Volume plugins: volume paths, writers and required mounts.
//!
//! Each entry of the table follows the plugin's `GetPath` and `SetUp` in Kubernetes' `pkg/volume`:
//! the volumes' path and the filesystem that the plugin mounts, if any. Secret, projected and
//! downwardAPI volumes wrap an emptyDir of medium Memory (`wrappedVolumeSpec`); a configMap is on
//! the kubelet's disk. An emptyDir requires no mount: no file records its medium.

use std::ffi::OsStr;
use std::fmt;

use super::payload::VolumeLayout;
use super::pod_path::PodPath;
use crate::mount_table::FsType;

/// The writer of a volume's content, which decides how far a path in the volume can be trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Writer {
    /// The kubelet alone, through AtomicWriter.
    Kubelet,
    /// The pod's containers: any name in the volume may be a trap.
    Containers,
}

/// A plugin whose volumes the guard understands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plugin {
    folder: &'static str,
    below: &'static str,
    writer: Writer,
    mount: Option<RequiredMount>,
}

/// The mount that a plugin's volumes require.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequiredMount {
    /// The filesystems that the plugin mounts; an empty list means any.
    fs_types: &'static [&'static str],
    /// The usual cause of a missing mount.
    usual_cause: &'static str,
}

impl Plugin {
    /// All plugins with their own folder in a pod's `volumes`.
    pub fn all() -> impl Iterator<Item = Self> {
        PLUGINS.iter().copied()
    }

    /// The plugin of volumes that can be anywhere on the host.
    pub fn host_path() -> Self {
        HOST_PATH
    }

    /// The plugin of volumes that a CSI driver mounts.
    pub fn csi() -> Self {
        CSI_DRIVER
    }

    /// The plugins with nearly all uses of a subPath.
    pub fn usual() -> impl Iterator<Item = Self> {
        Self::all().take(USUAL)
    }

    /// The plugin with this folder. A flexVolume's folder is named after its driver,
    /// `vendor~driver`.
    pub fn from_folder(folder: &OsStr) -> Option<Self> {
        let is_drivers =
            |folder: &str| folder.contains('~') && !folder.starts_with("kubernetes.io~");
        let flex_volume = || {
            folder
                .to_str()
                .filter(|folder| is_drivers(folder))
                .map(|_| FLEX_VOLUME)
        };
        Self::all()
            .find(|plugin| folder == plugin.folder)
            .or_else(flex_volume)
    }

    /// The plugin's folder below `volumes`, such as `kubernetes.io~configmap`; for a flexVolume its
    /// kind.
    pub fn folder(self) -> &'static str {
        self.folder
    }

    /// The part of a volume's folder that the containers get: `mount` for CSI, otherwise the whole
    /// folder.
    pub fn below(self) -> &'static str {
        self.below
    }

    /// The writer of the plugin's volumes.
    pub fn writer(self) -> Writer {
        self.writer
    }

    /// The layout of the plugin's volumes as far as the plugin decides it. A container or a driver
    /// may still use the kubelet's layout.
    pub fn layout(self) -> VolumeLayout {
        match self.writer {
            Writer::Kubelet => VolumeLayout::Payload,
            Writer::Containers => VolumeLayout::Plain,
        }
    }

    /// True if the plugin's volumes can be mount points. A flexVolume's driver may mount, but need
    /// not.
    pub fn may_mount(self) -> bool {
        self.mount.is_some() || self == FLEX_VOLUME
    }

    /// The mount that the plugin's volumes require, if any.
    pub fn required_mount(self) -> Option<RequiredMount> {
        self.mount
    }

    /// The mount that a volume needs if it is known to have been a tmpfs.
    pub(super) fn required_tmpfs(self) -> RequiredMount {
        if self == FLEX_VOLUME {
            FLEX_MEMORY
        } else {
            MEMORY
        }
    }

    /// True if `path` is `<root>/pods/<uid>/volumes/<plugin>/<volume>/<name>...` of a
    /// kubelet-written volume.
    pub fn holds_payload_path(path: &PodPath<'_, '_>) -> bool {
        let &[volumes, folder, _volume, _name, ..] = path.names() else {
            return false;
        };
        volumes == "volumes"
            && Self::from_folder(folder).is_some_and(|plugin| plugin.writer() == Writer::Kubelet)
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

const BLOCK: &str = "the device was not attached, or MountVolume failed: see the pod's events";
const NODE_MOUNT: &str =
    "the filesystem's mount program is missing on the node, or its server could not be reached";
const NFS: &str = "mount.nfs is missing on the node (bindguard doctor names its package), or the server could not be reached";
const CSI: &str =
    "the CSI driver restarted and its FUSE daemon with it, or NodePublishVolume failed";

/// The kubelet's mount for the medium Memory.
const MEMORY: RequiredMount = RequiredMount {
    fs_types: &["tmpfs"],
    usual_cause: "something unmounted it: the kubelet always puts it on a tmpfs",
};

/// The tmpfs that a driver of a flexVolume mounted.
const FLEX_MEMORY: RequiredMount = RequiredMount {
    fs_types: &["tmpfs"],
    usual_cause: "its driver unmounted it",
};

/// A `hostPath`, or a claim that is bound to a `hostPath`: the pod has no folder for the volume.
const HOST_PATH: Plugin = Plugin {
    folder: "kubernetes.io~host-path",
    below: "",
    writer: Writer::Containers,
    mount: None,
};

const CSI_DRIVER: Plugin = Plugin {
    below: "mount",
    ..mounted("kubernetes.io~csi", &[], CSI)
};

/// A volume of a driver outside of the kubelet and of CSI: `vendor~driver/<volume>`.
const FLEX_VOLUME: Plugin = Plugin {
    folder: "flexVolume",
    below: "",
    writer: Writer::Containers,
    mount: None,
};

/// Sorted by how often a subPath is used with them.
const PLUGINS: &[Plugin] = &[
    unmounted("kubernetes.io~configmap", Writer::Kubelet),
    on_tmpfs("kubernetes.io~secret"),
    on_tmpfs("kubernetes.io~projected"),
    on_tmpfs("kubernetes.io~downward-api"),
    unmounted("kubernetes.io~empty-dir", Writer::Containers),
    CSI_DRIVER,
    mounted("kubernetes.io~nfs", &["nfs", "nfs4"], NFS),
    mounted("kubernetes.io~local-volume", &[], BLOCK),
    mounted("kubernetes.io~aws-ebs", &[], BLOCK),
    mounted("kubernetes.io~azure-disk", &[], BLOCK),
    mounted(
        "kubernetes.io~azure-file",
        &["cifs", "nfs", "nfs4", "smb3"],
        NODE_MOUNT,
    ),
    mounted(
        "kubernetes.io~cephfs",
        &["ceph", "fuse.ceph", "fuse.ceph-fuse"],
        NODE_MOUNT,
    ),
    mounted("kubernetes.io~cinder", &[], BLOCK),
    mounted("kubernetes.io~fc", &[], BLOCK),
    mounted("kubernetes.io~gce-pd", &[], BLOCK),
    mounted("kubernetes.io~glusterfs", &["fuse.glusterfs"], NODE_MOUNT),
    mounted("kubernetes.io~iscsi", &[], BLOCK),
    mounted("kubernetes.io~rbd", &[], BLOCK),
    mounted("kubernetes.io~vsphere-volume", &[], BLOCK),
    // Plugins of earlier Kubernetes versions.
    mounted("kubernetes.io~flocker", &[], BLOCK),
    mounted("kubernetes.io~photon-pd", &[], BLOCK),
    mounted("kubernetes.io~portworx-volume", &[], BLOCK),
    mounted("kubernetes.io~quobyte", &[], NODE_MOUNT),
    mounted("kubernetes.io~scaleio", &[], BLOCK),
    mounted("kubernetes.io~storageos", &[], BLOCK),
    unmounted("kubernetes.io~git-repo", Writer::Containers),
];

const fn unmounted(folder: &'static str, writer: Writer) -> Plugin {
    Plugin {
        folder,
        below: "",
        writer,
        mount: None,
    }
}

const fn on_tmpfs(folder: &'static str) -> Plugin {
    Plugin {
        folder,
        below: "",
        writer: Writer::Kubelet,
        mount: Some(MEMORY),
    }
}

const fn mounted(
    folder: &'static str,
    fs_types: &'static [&'static str],
    usual_cause: &'static str,
) -> Plugin {
    let mount = Some(RequiredMount {
        fs_types,
        usual_cause,
    });
    Plugin {
        folder,
        below: "",
        writer: Writer::Containers,
        mount,
    }
}
