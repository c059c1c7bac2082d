//! A fake kubelet with the real kubelet's syscalls, so that stories decide when each happens.
//!
//! The layout is the real kubelet's: `pods/UID/volumes/PLUGIN/VOLUME` and
//! `pods/UID/volume-subpaths/VOLUME/CONTAINER/INDEX`. `atomic_writer`, `block_volume`, `safe_open`
//! and `subpath` each mirror a file of the kubelet and name this file. Not mirrored: `SafeMakeDir`
//! (a kubelet makes a missing directory of a sub path) and fsGroup.

mod atomic_writer;
mod block_volume;
mod pod;
mod root;
mod safe_open;
mod subpath;
mod volume;

use std::path::{Path, PathBuf};

use anyhow::Result;

pub use self::block_volume::BlockVolume;
pub use self::pod::Pod;
pub use self::root::KubeletRoot;
pub use self::subpath::{Behaviour, Subpath};
pub use self::volume::{Volume, VolumeKind};

/// The kubelet of a node.
#[derive(Clone, Debug)]
pub struct Kubelet {
    root: PathBuf,
}

impl Kubelet {
    /// Lays out the root in the node's folder on disk. Must be called inside the node.
    pub(crate) fn start(disk: &Path, kind: KubeletRoot) -> Result<Self> {
        Ok(Self {
            root: kind.lay_out(disk)?,
        })
    }

    /// The root as passed to the kubelet (`--root-dir`): symlinks in it are not resolved.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// A block volume, mapped for a pod.
    pub fn block_volume(&self, uid: &str, name: &str, device: &Path) -> Result<BlockVolume> {
        BlockVolume::map(&self.root, uid, name, device)
    }

    pub fn pod(&self, uid: &str) -> Result<Pod> {
        Pod::create(&self.root, uid)
    }
}
