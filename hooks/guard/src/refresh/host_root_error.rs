//! Why a host-root bind of a running container stays as it is.

use std::path::PathBuf;
use std::sync::Arc;

use bindguard_core::refresh::NotOfHost;
use bindguard_sys::MountinfoError;

/// Why a host-root bind is not replaced.
#[derive(Debug, thiserror::Error)]
pub enum HostRootError {
    /// Mounts that arrive later would be writable.
    #[error("its bind is recursively read-only (rro), which requires a private mount")]
    RecursivelyReadOnly,
    /// The same, by policy.
    #[error("its bind is read-only, and policy keeps read-only binds private")]
    ReadOnlyKept,
    /// Policy, or an annotation of the pod, permits no change.
    #[error("policy only reports host-root binds")]
    OnlyReported,
    /// The new mount would receive no umount either.
    #[error(
        "{path} is private on the host, so rslave has no effect; run mount --make-rshared {path}",
        path = .mount.display()
    )]
    PrivateOnHost {
        /// The mount of the source on the host.
        mount: PathBuf,
    },
    /// A mount below must not be lost.
    #[error(transparent)]
    Below(NotOfHost),
    /// The spec was not understood.
    #[error("find the mounts that the spec makes")]
    Spec(#[source] Arc<serde_json::Error>),
    /// The mounts of the host could not be read.
    #[error("compare with the mounts of the host")]
    HostMounts(#[source] MountinfoError),
}
