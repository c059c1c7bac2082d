//! Putting a current mount in a stale one's place, so that nobody sees the file underneath in between.
//!
//! ```text
//!   stale                stale                 
//!   underneath   ──►     new          ──►    new
//!                        underneath          underneath
//!            attach below            detach the top
//! ```
//!
//! Stacking on top is no way: the kernel refuses to mount on a deleted file (ENOENT). Unmounting first is none either:
//! whoever opens the path in between gets the empty file that the kubelet made as a mount point.

mod beneath;
mod detach;
mod tuck;

use std::io;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::mount::OpenTreeFlags;

use crate::handle::Handle;

pub use beneath::attach_beneath;
pub use detach::detach;
pub use tuck::attach_tucked;

/// Why a mount could not be attached or detached.
#[derive(Debug, thiserror::Error)]
pub enum SwapError {
    /// The new file was removed while it was being bound: the volume changed again.
    #[error("the current file was removed while it was being bound")]
    TargetGone,
    /// This kernel, or this mount, does not allow it that way.
    #[error("{what} is not possible here")]
    NotPossible {
        /// The step.
        what: &'static str,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The step failed.
    #[error("{what}")]
    Failed {
        /// The step.
        what: &'static str,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
}

impl SwapError {
    fn from_errno(what: &'static str, errno: Errno) -> Self {
        match errno {
            Errno::NOENT => Self::TargetGone,
            // EINVAL: a kernel before 6.5 does not know the flag, or the mount may not be mounted beneath.
            Errno::INVAL | Errno::NOSYS | Errno::PERM => Self::NotPossible { what, source: errno.into() },
            errno => Self::Failed { what, source: errno.into() },
        }
    }

    /// A step that was not even tried.
    pub fn not_possible(what: &'static str) -> Self {
        Self::NotPossible { what, source: io::ErrorKind::Unsupported.into() }
    }

    /// The error and what the kernel said, in one line.
    pub fn in_full(&self) -> String {
        match self {
            Self::TargetGone => self.to_string(),
            Self::NotPossible { source, .. } | Self::Failed { source, .. } => format!("{self}: {source}"),
        }
    }
}

/// A new mount of this file or directory, not attached anywhere: what `mount --bind` makes first. open_tree(2)
fn clone_mount(of: &Handle) -> Result<OwnedFd, SwapError> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    rustix::mount::open_tree(of, "", flags)
        .map_err(|errno| SwapError::from_errno("cloning the mount of the current file", errno))
}
