//! bindguard's access to the kernel and the disk: reads, probes, binds, detaches. This crate
//! decides nothing.
//!
//! An open `O_PATH` descriptor refers to each file while it is inspected. A path can lead elsewhere
//! a moment later, and a mount id may belong to another mount as soon as the first mount is gone.
//! Such descriptors, mountinfo, statmount and `statx` with `AT_STATX_DONT_SYNC` never wait for a
//! file server or a FUSE daemon. On SMB and 9p statx does wait; [`Handle::unqueried`] avoids it
//! there. Calls that may wait run in a [separate process](probe), which can be abandoned.
#![deny(unsafe_code)]

pub mod enter;
pub mod files;
pub mod journal;
pub mod observe;
pub mod probe;
pub mod process_files;
pub mod replace;

mod handle;
mod host_path;
mod kernel;
mod mounts;
mod own_process;
mod target;

use std::borrow::Cow;
use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

pub use enter::selinux_denies_read;
pub use files::{
    leave_room, make_folders, read_file, unless_absent, with_size_errors, write_new_file,
};
pub use handle::{Handle, open_without_waiting};
pub use host_path::{HostWalk, WalkedFolder, walk_host_path, walk_path_of_process};
pub use kernel::{
    KernelFeatures, OldKernel, kernel_features, map_ids, propagation_takes_locks, release_numbers,
    require_calls,
};
pub use mounts::{
    MountError, MountOf, MountWatch, Mounts, ReadTableError, read_container_table,
    read_host_table_in_part, read_mount_table, read_mount_table_in_part,
};
pub use own_process::{
    FaultPoint, denies_beneath, inherited_pipe, restore_inherited_state, trim_heap,
};
pub use replace::next_mount_id;
pub use target::{
    OpenedTarget, TargetError, current_payload, make_directories, open_target, remove_payload,
};

/// A step on a file failed.
#[derive(Debug, thiserror::Error)]
#[error("{act}{}{}", if path.as_os_str().is_empty() { "" } else { " " }, path.display())]
pub struct Failure {
    pub act: Cow<'static, str>,
    /// Empty if the act is on no file.
    pub path: PathBuf,
    #[source]
    pub source: io::Error,
}

impl Failure {
    /// True if the kernel reported that there is no such file.
    pub fn is_not_found(&self) -> bool {
        self.source.kind() == io::ErrorKind::NotFound
    }
}

/// Why a step failed, for people.
#[derive(Debug, thiserror::Error)]
#[error("{act}")]
pub struct SourceError {
    act: String,
    source: Option<Box<dyn Error + Send + Sync>>,
}

impl SourceError {
    pub fn new(act: impl Into<String>) -> Self {
        Self {
            act: act.into(),
            source: None,
        }
    }

    /// Makes the error of an act from its cause.
    pub fn of<E: Error + Send + Sync + 'static>(act: impl Into<String>) -> impl FnOnce(E) -> Self {
        move |source| Self {
            act: act.into(),
            source: Some(Box::new(source)),
        }
    }
}

/// Makes the error of an act on a path from its cause.
pub(crate) fn failed<E: Into<io::Error>>(
    act: impl Into<Cow<'static, str>>,
    path: &Path,
) -> impl FnOnce(E) -> Failure {
    move |source| Failure {
        act: act.into(),
        path: path.to_owned(),
        source: source.into(),
    }
}

/// Error number of the kernel; `EIO` for an error of another origin.
pub(crate) fn errno_of(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}
