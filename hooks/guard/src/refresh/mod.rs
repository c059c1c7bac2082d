//! Refreshes running containers. Each kind of bind has a module that finds the current files:
//!
//! * [`volumes`]: a `subPath` of a volume that the kubelet, or a CSI driver in the same way, writes
//! * [`mounts`] and [`engine_mounts`]: a mount that the host mounted anew, with the nested binds
//! * [`files`]: a single file of the host that was replaced
//! * [`host_roots`]: a bind that keeps mounts of the host alive
//!
//! [`container`] replaces the stale mounts. In pods the host's subpaths are re-bound first: from
//! then on every restart finds the current file, whatever shim starts the container. [`release`]
//! only unmounts copies that a container keeps.

mod container;
mod current_files;
mod files;
mod host_roots;
mod mounts;
mod outcome;
mod records;
mod release;
mod round;
mod running;
mod volumes;

pub use crate::refresh::files::BoundFileError;
pub use crate::refresh::host_roots::HostRootError;
pub use crate::refresh::host_roots::{VolumeOfPod, rebind_volume};
pub use crate::refresh::round::PlaceError;
pub(crate) use crate::refresh::running::refuse_sandbox;
pub use crate::refresh::volumes::payload_of_driver;
pub use container::{
    MAX_MOUNTS_OF_FILE, RefreshAct, find_stale, refresh_container, refresh_container_within,
};
pub use current_files::{CurrentFiles, FileKinds};
pub use files::{BoundFiles, FileBind};
pub use host_roots::HostRoots;
pub use mounts::BoundMounts;
pub use outcome::{
    AttachMethod, MountOutcome, MountRefresh, NotNotified, NotReplaced, RefreshError, Refreshed,
};
pub use records::{TuckRecordError, TuckRecords};
pub use release::{
    NotReleased, Release, ReleaseError, ReleaseOutcome, Released, releasable_copies, release_copies,
};

pub use running::{
    RunningContainer, RunningContainers, Writer, WriterReach, places_by_binds, reach_by_spec,
};
pub use volumes::{ContainerVolumes, PodVolumes, VolumesError};

/// A container's init process, held against reuse of its pid; a child that hangs in a container;
/// and the process that starts the children.
pub use bindguard_sys::enter::{
    Abandoned, HeldProcess, HelperProcess, NamespaceError, ProcessError,
};
