//! Finds the holders of the mounts at or below a path: the cause of "device or resource busy".
//!
//! A mount namespace begins with copies of another namespace's mounts, so a mount that is gone here
//! can still exist there. Two rules find related mounts. Neither needs equal paths in both
//! namespaces:
//!
//! ```text
//! it shows the same           its device and root are those of a mount at or below the path
//! it covers the same place    its parent shows the very directory of the filesystem that the path names
//! ```
//!
//! The second rule finds mounts that no mount here shows: after a lazy umount, and on a mount point
//! that cannot be removed.

mod mounts_to_find;
mod release;
mod report;
mod spread;
mod system;
mod trial;

pub use crate::container_cgroup::{container_ids, pod_uid};
pub use mounts_to_find::MountsToFind;
pub use release::ReleaseCommand;
pub use report::{HeldMount, Holder, HolderKind, HoldersReport};
pub use trial::Trial;
