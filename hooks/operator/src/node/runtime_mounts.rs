//! The mount namespace of a container's runtime, which a command must share.
//!
//! A runtime binds the mounts of its own namespace. A debug pod, or a service with private mounts,
//! has copies of these mounts, and may lack a mount of the node. A command in such a namespace would
//! compare a container with the wrong mounts, so the command refuses to run. The agent enters the
//! namespace of the runtime instead.

use std::io;

use bindguard_core::process_stat::{PARENT, number};
use bindguard_sys::enter::HeldProcess;
use bindguard_sys::process_files::{ProcessFile, contents, inodes};

use super::processes::namespace;

/// Why a command does not act on a container.
#[derive(Debug, thiserror::Error)]
pub enum NotOfRuntime {
    /// The command runs in another mount namespace.
    #[error(
        "this command is in another mount namespace than the container's runtime; run it as nsenter --target {0} --mount bindguard"
    )]
    OtherNamespace(u32),
    /// The container's init ended, or blocks its readers.
    #[error("find the parent of process {pid}, the container's init")]
    Init {
        /// The init.
        pid: u32,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The namespace of the runtime's process is not known.
    #[error("read the mount namespace of process {pid}, the container's runtime")]
    Unknown {
        /// The parent of the container's init.
        pid: u32,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

/// Checks that this process has the mount namespace of the process that supervises the container:
/// the parent of the container's init, a shim or conmon.
///
/// # Errors
/// If the namespaces differ, or the parent's cannot be read.
pub fn refuse_other_mounts(init: &HeldProcess) -> Result<(), NotOfRuntime> {
    let parent = parent_of(init).map_err(|source| NotOfRuntime::Init {
        pid: init.pid(),
        source,
    })?;
    match only(inodes(&[ProcessFile::of(parent, "ns/mnt")])) {
        Ok(theirs) if Some(theirs) == namespace("mnt") => Ok(()),
        Ok(_) => Err(NotOfRuntime::OtherNamespace(parent)),
        Err(source) => Err(NotOfRuntime::Unknown {
            pid: parent,
            source,
        }),
    }
}

fn parent_of(process: &HeldProcess) -> io::Result<u32> {
    let stat = only(contents(&[ProcessFile::of(process.pid(), "stat")]))?;
    let parent = number(&String::from_utf8_lossy(&stat), PARENT);
    let parent = parent.and_then(|parent| parent.try_into().ok());
    parent.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// The answer for the only file.
fn only<A>(answers: Vec<io::Result<A>>) -> io::Result<A> {
    let none = || Err(io::ErrorKind::NotFound.into());
    answers.into_iter().next().unwrap_or_else(none)
}
