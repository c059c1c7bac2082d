//! Replaces a stale mount by a current one, so that no process sees the file underneath in between.
//!
//! ```text
//!   stale                stale                 
//!   underneath   ──►     new          ──►    new
//!                        underneath          underneath
//!            attach below            detach the top
//! ```
//!
//! Stacking on top does not work: the kernel refuses to mount on a deleted file (ENOENT).
//! Unmounting first does not work either: a process that opens the path in between gets the empty
//! file that the kubelet made as a mount point.

mod beneath;
mod clone;
mod detach;
mod tuck;

use std::io;

use rustix::io::Errno;

pub use beneath::attach_beneath;
pub use detach::detach;
pub use tuck::attach_tucked;

/// Why a mount could not be attached or detached.
#[derive(Debug, thiserror::Error)]
pub enum SwapError {
    /// The new file was removed while it was being bound: the volume changed again.
    #[error("the current file was removed while it was being bound")]
    TargetGone,
    /// Another repairer of the same subpath attached its mount at the same moment.
    #[error("another repairer attached a mount at the same time")]
    Overtaken,
    /// This kernel, or this mount, does not allow it that way.
    #[error("{what} is not possible here")]
    NotPossible {
        /// The step.
        what: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The step failed.
    #[error("{what}")]
    Failed {
        /// The step.
        what: &'static str,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
}

impl SwapError {
    fn from_errno(what: &'static str, errno: Errno) -> Self {
        match errno {
            Errno::NOENT => Self::TargetGone,
            // EINVAL: a kernel before 6.5 does not know the flag, or the mount may not be mounted
            // beneath.
            Errno::INVAL | Errno::NOSYS | Errno::PERM => Self::NotPossible {
                what,
                source: errno.into(),
            },
            errno => Self::Failed {
                what,
                source: errno.into(),
            },
        }
    }

    fn from_io(what: &'static str, error: io::Error) -> Self {
        match Errno::from_io_error(&error) {
            Some(errno) => Self::from_errno(what, errno),
            None => Self::Failed {
                what,
                source: error,
            },
        }
    }

    /// A step that was not tried.
    pub fn not_possible(what: &'static str) -> Self {
        Self::NotPossible {
            what,
            source: io::ErrorKind::Unsupported.into(),
        }
    }
}
