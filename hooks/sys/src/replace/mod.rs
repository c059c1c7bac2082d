//! Replaces a stale mount by a current mount, so that no process sees the file underneath in
//! between.
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
//!
//! The same engine serves the host and containers: [`crate::enter`] makes the same calls from a
//! child in a container's mount namespace.

mod attach;
mod detach;
mod new_mount;
mod step;
mod tuck;

pub use attach::attach_beneath;
pub use detach::detach;
pub use new_mount::{CloneError, CloneSettings, NewMount, clone_like, clone_mount};
pub use step::{ReplaceError, Step};
pub use tuck::attach_tucked;

pub(crate) use detach::detach_link;
pub(crate) use new_mount::{copy_of, propagation_type, tree_of};
pub(crate) use step::at;
pub(crate) use tuck::{FolderCopy, enter_private_mounts};
