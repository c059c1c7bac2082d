//! A claim with `volumeMode: Block`: no volume in the pod's `volumes`, but a device and two ways to
//! it.
//!
//! Mirrors `MapDevice` and `UnmapDevice` of
//! `pkg/volume/util/volumepathhandler/volume_path_handler.go`, as the kubelet calls them for CSI.
//! Not mirrored: the loop device that it lays over the bind, as a lock.
//!
//! ```text
//!   plugins/kubernetes.io/csi/volumeDevices/VOLUME/dev/UID       a file, and the device's node bound over it
//!   pods/UID/volumeDevices/kubernetes.io~csi/VOLUME -> /dev/...   what `makeBlockVolumes` puts into the CRI's devices
//! ```

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::mount_calls::{bind, unmount};

/// A block volume that is mapped for a pod.
#[derive(Debug)]
pub struct BlockVolume {
    node_path: PathBuf,
    link: PathBuf,
}

impl BlockVolume {
    pub(super) fn map(kubelet: &Path, uid: &str, name: &str, device: &Path) -> Result<Self> {
        let global = kubelet
            .join("plugins/kubernetes.io/csi/volumeDevices")
            .join(name)
            .join("dev");
        let pod = kubelet
            .join("pods")
            .join(uid)
            .join("volumeDevices/kubernetes.io~csi");
        let mapped = Self {
            node_path: global.join(uid),
            link: pod.join(name),
        };
        for folder in [&global, &pod] {
            fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
        }
        fs::write(&mapped.node_path, "")
            .with_context(|| format!("create {}", mapped.node_path.display()))?;
        bind(device, &mapped.node_path)?;
        symlink(device, &mapped.link).with_context(|| format!("link {}", mapped.link.display()))?;
        Ok(mapped)
    }

    /// The pod's bind of the device's node.
    pub fn node_path(&self) -> &Path {
        &self.node_path
    }

    /// The pod's link, which the CRI gets and follows.
    pub fn link(&self) -> &Path {
        &self.link
    }

    /// Takes both away: a plain umount, which fails when the bind is in use.
    pub fn unmap(self) -> Result<()> {
        fs::remove_file(&self.link).with_context(|| format!("remove {}", self.link.display()))?;
        unmount(&self.node_path)?;
        fs::remove_file(&self.node_path)
            .with_context(|| format!("remove {}", self.node_path.display()))
    }
}
