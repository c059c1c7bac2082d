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

mod bound_file_error;
mod container;
mod current_files;
mod driver_volumes;
mod engine_mounts;
mod files;
mod host;
mod host_root_error;
mod host_roots;
mod mounts;
mod outcome;
mod place;
mod pod_folder;
mod progress;
mod records;
mod release;
mod report;
mod restore;
mod round;
mod running;
mod sandbox;
mod specified_bind;
mod tree_parts;
mod volumes;
mod ways;

pub use bound_file_error::BoundFileError;
pub use container::{
    MAX_MOUNTS_OF_FILE, RefreshAct, find_stale, refresh_container, refresh_container_within,
};
pub use current_files::{CurrentFiles, FileKinds};
pub use driver_volumes::payload_of_driver;
pub use files::{BoundFiles, FileBind};
pub use host::{VolumeOfPod, rebind_volume};
pub use host_root_error::HostRootError;
pub use host_roots::HostRoots;
pub use mounts::BoundMounts;
pub use outcome::{
    AttachMethod, MountOutcome, MountRefresh, NotNotified, NotReplaced, RefreshError, Refreshed,
};
pub use place::PlaceError;
pub use records::{TuckRecordError, TuckRecords};
pub use release::{
    NotReleased, Release, ReleaseError, ReleaseOutcome, Released, releasable_copies, release_copies,
};
pub(crate) use sandbox::refuse_sandbox;

pub use running::{
    RunningContainer, RunningContainers, Writer, WriterReach, places_by_binds, reach_by_spec,
};
pub use volumes::{ContainerVolumes, PodVolumes, VolumesError};

/// A container's init process, held against reuse of its pid; a child that hangs in a container;
/// and the process that starts the children.
pub use bindguard_sys::enter::{
    Abandoned, HeldProcess, HelperProcess, NamespaceError, ProcessError,
};
