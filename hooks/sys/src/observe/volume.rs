//! A volume and its mount.

use std::path::Path;

use bindguard_core::error_chain;
use bindguard_core::evidence::{Observed, VolumeMount};
use bindguard_core::kubelet::{MountedVolume, Writer};

use crate::handle::{Handle, HandleError};
use crate::mounts::Mounts;
use crate::observe::unreadable;

/// The open directory of a volume, or the volume's mount point. An `O_PATH` open of a mount's root
/// sends no request to the server.
#[derive(Debug)]
pub struct HeldVolume(Result<Handle, HandleError>);

impl HeldVolume {
    /// Opens the directory. Anything may be mounted there.
    pub fn hold(directory: &Path) -> Self {
        Self(Handle::of(directory).map(Handle::unqueried))
    }

    /// Opens a volume whose writer is known: a kubelet-written volume is on this node.
    pub fn hold_of(volume: &MountedVolume) -> Self {
        match volume.writer() {
            Writer::Kubelet => Self(Handle::of(volume.mount_point())),
            Writer::Containers => Self::hold(volume.mount_point()),
        }
    }

    /// True if a call on its own mount may wait for a server or a daemon: the kernel alone cannot
    /// detect that it is alive.
    pub fn is_on_a_server(&self, mounts: &Mounts) -> bool {
        let mount = self
            .handle()
            .and_then(|handle| mounts.mount_of(handle).ok());
        mount.is_some_and(|mount| mount.is_mount_point && !mount.entry.fs_type.is_local())
    }

    /// The directory itself.
    pub fn handle(&self) -> Option<&Handle> {
        self.0.as_ref().ok()
    }

    /// Observes its mount.
    pub fn observe(&self, mounts: &Mounts) -> Observed<VolumeMount> {
        let handle = match &self.0 {
            Ok(handle) => handle,
            Err(error) => return unreadable(error),
        };
        match mounts.mount_of(handle) {
            Ok(mount) if mount.is_mount_point => Observed::Seen(VolumeMount {
                fs_type: mount.entry.fs_type.clone(),
                deleted: mount.entry.root.deleted,
            }),
            Ok(_) => Observed::Absent,
            Err(error) => Observed::Unreadable(error_chain(&error)),
        }
    }
}
