//! The table of volume plugins.
//!
//! Each entry follows the plugin's `GetPath` and `SetUp` in Kubernetes' `pkg/volume`: the path of its volumes, and the
//! filesystem that it mounts, if any. Secret, projected and downwardAPI volumes wrap an emptyDir of medium Memory
//! (`wrappedVolumeSpec`); a configMap's is on the kubelet's disk. An emptyDir requires no mount: its medium is recorded nowhere.

use super::plugin::{Plugin, RequiredMount, Writer};

const BLOCK: &str = "the device was not attached, or MountVolume failed: see the pod's events";
const NODE_MOUNT: &str = "the filesystem's mount program is missing on the node, or its server could not be reached";
const NFS: &str =
    "mount.nfs is missing on the node (bindguard doctor names its package), or the server could not be reached";
const CSI: &str = "the CSI driver restarted and its FUSE daemon with it, or NodePublishVolume failed";

/// The kubelet's mount for the medium Memory.
pub(super) const MEMORY: RequiredMount = RequiredMount {
    fs_types: &["tmpfs"],
    usual_cause: "something unmounted it: the kubelet always puts it on a tmpfs",
};

/// The tmpfs that a driver of a flexVolume mounted.
pub(super) const FLEX_MEMORY: RequiredMount =
    RequiredMount { fs_types: &["tmpfs"], usual_cause: "its driver unmounted it" };

/// A `hostPath`, or a claim that is bound to one: it has no folder in the pod.
pub(super) const HOST_PATH: Plugin =
    Plugin { folder: "kubernetes.io~host-path", below: "", writer: Writer::Containers, mount: None };

/// A volume of a driver that is neither the kubelet's own nor CSI's: `vendor~driver/<volume>`.
pub(super) const FLEX_VOLUME: Plugin =
    Plugin { folder: "flexVolume", below: "", writer: Writer::Containers, mount: None };

/// Sorted by how often a subPath is used with them.
pub(super) const PLUGINS: &[Plugin] = &[
    unmounted("kubernetes.io~configmap", Writer::Kubelet),
    on_tmpfs("kubernetes.io~secret"),
    on_tmpfs("kubernetes.io~projected"),
    on_tmpfs("kubernetes.io~downward-api"),
    unmounted("kubernetes.io~empty-dir", Writer::Containers),
    Plugin { below: "mount", ..mounted("kubernetes.io~csi", &[], CSI) },
    mounted("kubernetes.io~nfs", &["nfs", "nfs4"], NFS),
    mounted("kubernetes.io~local-volume", &[], BLOCK),
    mounted("kubernetes.io~aws-ebs", &[], BLOCK),
    mounted("kubernetes.io~azure-disk", &[], BLOCK),
    mounted("kubernetes.io~azure-file", &["cifs", "nfs", "nfs4", "smb3"], NODE_MOUNT),
    mounted("kubernetes.io~cephfs", &["ceph", "fuse.ceph", "fuse.ceph-fuse"], NODE_MOUNT),
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
    Plugin { folder, below: "", writer, mount: None }
}

const fn on_tmpfs(folder: &'static str) -> Plugin {
    Plugin { folder, below: "", writer: Writer::Kubelet, mount: Some(MEMORY) }
}

const fn mounted(folder: &'static str, fs_types: &'static [&'static str], usual_cause: &'static str) -> Plugin {
    let mount = Some(RequiredMount { fs_types, usual_cause });
    Plugin { folder, below: "", writer: Writer::Containers, mount }
}
