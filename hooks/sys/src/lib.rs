//! The kernel and the disk, for bindguard: reads, probes, binds, detaches. Nothing here decides anything.
//!
//! What is looked at is held by an open `O_PATH` descriptor while it is looked at: a path can lead elsewhere a moment
//! later, and a mount id belongs to another mount as soon as the first is gone. Such descriptors, mountinfo, statmount
//! and `statx` with `AT_STATX_DONT_SYNC` never wait for a file server or a FUSE daemon; on SMB and 9p statx does, which a
//! [wary](Handle::wary) handle is for. What may wait is asked by a process [apart](probe), which is not waited for.
#![deny(unsafe_code)]

pub mod bundle;
pub mod fault;
pub mod in_container;
pub mod journal;
pub mod namespaces;
pub mod node;
pub mod observe;
pub mod probe;
pub mod stranded;
pub mod swap;

mod apart;
mod at_hand;
mod block_device;
mod directories;
mod handle;
mod links_beside;
mod mount_setattr;
mod mountinfo;
mod mounts;
mod payload;
mod read_file;
mod size_errors;
mod statmount;
mod target;

pub use at_hand::hold_known;
pub use block_device::block_device;
pub use directories::{DirectoriesError, make_directories};
pub use handle::{Handle, HandleError};
pub use mountinfo::{MountinfoError, read_mount_table};
pub use mounts::{MountOf, Mounts};
pub use read_file::read_file;
pub use size_errors::with_size_errors;
pub use target::{OpenedTarget, TargetError, open_target};
