//! Why the mounts in the host-root binds of a container cannot be compared with those of the host.

use std::path::PathBuf;
use std::sync::Arc;

use bindguard_sys::MountinfoError;

/// Why the mounts in a host-root bind cannot be compared with those of the host.
#[derive(Debug, thiserror::Error)]
pub enum HostRootError {
    /// The spec itself mounts below the bind.
    #[error("the spec mounts or masks {} below the bind", .0.display())]
    Below(PathBuf),
    /// The spec was not understood.
    #[error("find the mounts that the spec makes")]
    Spec(#[source] Arc<serde_json::Error>),
    /// The mounts of the host could not be read.
    #[error("compare with the mounts of the host")]
    HostMounts(#[source] MountinfoError),
}
