//! Refreshes running containers. Each kind of bind has a module that finds the current files:
//!
//! * [`volumes`]: a `subPath` of a volume that the kubelet, or a CSI driver in the same way, writes
//! * [`mounts`]: a mount that the host mounted anew, with the nested binds
//! * [`files`]: a single file of the host that was replaced
//! * [`host_roots`]: a bind that keeps mounts of the host alive, and the release of its copies
//!
//! [`container`] replaces the stale mounts. In pods the host's subpaths are re-bound first: from
//! then on every restart finds the current file, whatever shim starts the container.

mod container;
mod current_files;
mod files;
mod host_roots;
mod mounts;
mod records;
mod round;
mod running;
mod volumes;

pub(crate) use crate::refresh::running::refuse_sandbox;
pub use container::{MAX_MOUNTS_OF_FILE, RefreshAct, Refreshed, find_stale, refresh_container};
pub use current_files::{
    CurrentFiles, RunningContainers, Writer, WriterReach, places_by_binds, reach_by_spec,
};
pub use files::{BoundFiles, FileBind};
pub use host_roots::{
    HostRoots, Release, ReleaseError, Released, releasable_copies, release_copies,
};
pub use mounts::BoundMounts;
pub use records::TuckRecords;
pub use running::RefreshError;
pub use volumes::{PodVolumes, payload_of_driver};

pub use crate::rebind::{REPLACE_TIMEOUT, VolumeOfPod, rebind_volume};

/// A container's init process, held against reuse of its pid; a child that hangs in a container;
/// and the process that starts the children.
pub use bindguard_sys::enter::{
    Abandoned, HeldProcess, HelperProcess, NamespaceError, ProcessError,
};
