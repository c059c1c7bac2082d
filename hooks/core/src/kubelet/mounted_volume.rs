//! Volumes that are nothing but a mount: without it, their directory is an empty one on the node's own disk.
//!
//! A container that starts on such a directory writes to the node instead of its volume, and nobody notices until the
//! data is missed (kubernetes#109955). Which plugins mount, and with which filesystem, follows the `SetUp` of each in
//! Kubernetes' `pkg/volume`.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::mount_table::FsType;

/// `<root>/pods/<uid>/volumes/<plugin>/<volume>`, of a plugin that always mounts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountedVolume {
    mount_point: PathBuf,
    pod_uid: String,
    plugin: MountingPlugin,
    volume: String,
}

/// A plugin whose volumes are mounts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MountingPlugin {
    folder: &'static str,
    /// What of the volume's directory is the mount point.
    below: &'static str,
    /// The filesystems that it mounts; none listed: any.
    fs_types: &'static [&'static str],
    /// What usually keeps it from mounting.
    usual_cause: &'static str,
}

const BLOCK: &str = "the device was not attached, or MountVolume failed: see the pod's events";
const NODE_MOUNT: &str = "the filesystem's mount program is missing on the node, or its server could not be reached";
const TMPFS: &str = "something unmounted it: the kubelet always puts it on a tmpfs";

const PLUGINS: &[MountingPlugin] = &[
    MountingPlugin { folder: "kubernetes.io~aws-ebs", below: "", fs_types: &[], usual_cause: BLOCK },
    MountingPlugin { folder: "kubernetes.io~azure-disk", below: "", fs_types: &[], usual_cause: BLOCK },
    MountingPlugin {
        folder: "kubernetes.io~azure-file",
        below: "",
        fs_types: &["cifs", "nfs", "nfs4", "smb3"],
        usual_cause: NODE_MOUNT,
    },
    MountingPlugin {
        folder: "kubernetes.io~cephfs",
        below: "",
        fs_types: &["ceph", "fuse.ceph", "fuse.ceph-fuse"],
        usual_cause: NODE_MOUNT,
    },
    MountingPlugin { folder: "kubernetes.io~cinder", below: "", fs_types: &[], usual_cause: BLOCK },
    MountingPlugin {
        folder: "kubernetes.io~csi",
        below: "mount",
        fs_types: &[],
        usual_cause: "the CSI driver restarted and its FUSE daemon with it, or NodePublishVolume failed",
    },
    MountingPlugin { folder: "kubernetes.io~downward-api", below: "", fs_types: &["tmpfs"], usual_cause: TMPFS },
    MountingPlugin { folder: "kubernetes.io~fc", below: "", fs_types: &[], usual_cause: BLOCK },
    MountingPlugin { folder: "kubernetes.io~gce-pd", below: "", fs_types: &[], usual_cause: BLOCK },
    MountingPlugin {
        folder: "kubernetes.io~glusterfs",
        below: "",
        fs_types: &["fuse.glusterfs"],
        usual_cause: NODE_MOUNT,
    },
    MountingPlugin { folder: "kubernetes.io~iscsi", below: "", fs_types: &[], usual_cause: BLOCK },
    MountingPlugin { folder: "kubernetes.io~local-volume", below: "", fs_types: &[], usual_cause: BLOCK },
    MountingPlugin {
        folder: "kubernetes.io~nfs",
        below: "",
        fs_types: &["nfs", "nfs4"],
        usual_cause: "mount.nfs is missing on the node (package nfs-common or nfs-utils), or the server could not be reached",
    },
    MountingPlugin { folder: "kubernetes.io~rbd", below: "", fs_types: &[], usual_cause: BLOCK },
    MountingPlugin { folder: "kubernetes.io~secret", below: "", fs_types: &["tmpfs"], usual_cause: TMPFS },
    MountingPlugin { folder: "kubernetes.io~vsphere-volume", below: "", fs_types: &[], usual_cause: BLOCK },
];

impl MountedVolume {
    /// Takes a path apart that is such a volume, or lies in one; `None` when it is neither.
    pub fn from_path<'a>(path: &Path, kubelet_roots: impl IntoIterator<Item = &'a Path>) -> Option<Self> {
        kubelet_roots.into_iter().find_map(|root| Self::below(root, path))
    }

    fn below(root: &Path, path: &Path) -> Option<Self> {
        let names: Vec<&str> = path.strip_prefix(root).ok()?.iter().map(|name| name.to_str()).collect::<Option<_>>()?;
        let [pods, pod_uid, volumes, folder, volume, ref rest @ ..] = names[..] else { return None };
        let plugin = PLUGINS.iter().find(|plugin| plugin.folder == folder)?;
        let in_mount = plugin.below.is_empty() || rest.first() == Some(&plugin.below);
        if pods != "pods" || volumes != "volumes" || names.contains(&"..") || !in_mount {
            return None;
        }
        let directory: PathBuf = root.join(names[..5].iter().collect::<PathBuf>());
        let mount_point = if plugin.below.is_empty() { directory } else { directory.join(plugin.below) };
        Some(Self { mount_point, pod_uid: pod_uid.to_owned(), plugin: *plugin, volume: volume.to_owned() })
    }

    /// The same volume where it was before its files were copied below `prefix`.
    pub fn without_prefix(&self, prefix: &Path) -> Option<Self> {
        let below = self.mount_point.strip_prefix(prefix).ok()?;
        Some(Self { mount_point: Path::new("/").join(below), ..self.clone() })
    }

    /// Where the mount has to be.
    pub fn mount_point(&self) -> &Path {
        &self.mount_point
    }

    /// Whether a mount of this filesystem is what the plugin makes.
    pub fn may_be(&self, fs_type: &FsType) -> bool {
        self.plugin.fs_types.is_empty() || self.plugin.fs_types.contains(&fs_type.0.as_str())
    }

    /// What usually keeps such a volume from being mounted.
    pub fn usual_cause(&self) -> &'static str {
        self.plugin.usual_cause
    }
}

impl fmt::Display for MountedVolume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "volume {} ({}) of pod {}", self.volume, self.plugin.folder, self.pod_uid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(path: &str) -> Option<MountedVolume> {
        MountedVolume::from_path(Path::new(path), [Path::new("/var/lib/kubelet")])
    }

    #[test]
    fn a_volume_and_what_lies_in_it_are_taken() {
        let pod = "/var/lib/kubelet/pods/u-1/volumes";
        for path in [format!("{pod}/kubernetes.io~nfs/data"), format!("{pod}/kubernetes.io~nfs/data/deep/er")] {
            assert_eq!(taken(&path).unwrap().mount_point(), Path::new(&format!("{pod}/kubernetes.io~nfs/data")));
        }
        let csi = taken(&format!("{pod}/kubernetes.io~csi/pvc-1/mount")).unwrap();
        assert_eq!(csi.mount_point(), Path::new(&format!("{pod}/kubernetes.io~csi/pvc-1/mount")));
        assert_eq!(csi.to_string(), "volume pvc-1 (kubernetes.io~csi) of pod u-1");
    }

    #[test]
    fn volumes_that_need_no_mount_are_not_taken() {
        let pod = "/var/lib/kubelet/pods/u-1/volumes";
        for path in [
            "kubernetes.io~configmap/conf",
            "kubernetes.io~empty-dir/cache",
            "vendor~flex/x",
            "kubernetes.io~csi/pvc-1",
        ] {
            assert_eq!(taken(&format!("{pod}/{path}")), None, "{path}");
        }
    }
}
