//! A difference between a bind of the spec and the mounts of the new container.

use crate::mount_table::MountAttributes;

/// A difference between a bind of the spec and the mounts of the new container.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Difference {
    /// The container sees no mount at the destination, or too few.
    #[error("nothing is mounted at its destination, or another mount hides its mount")]
    NotMounted,
    /// Another file or directory is mounted at the destination.
    #[error("its destination shows {root} of the {fs_type} filesystem {device}")]
    OtherSource {
        /// The root of the mount at the destination, as the kernel prints it.
        root: String,
        /// That mount's filesystem type.
        fs_type: String,
        /// That mount's device.
        device: String,
    },
    /// The mount permits what the spec denies.
    #[error("its mount in the container is not {0}")]
    Permits(MountAttributes),
    /// The mount sends or receives more mounts than the spec requests.
    #[error("its mount in the container propagates mounts further than the spec says")]
    Propagates,
    /// A host-root bind does not receive the host's umounts.
    #[error("its mount in the container has no master: the host's umounts do not reach it")]
    WithoutMaster,
}
