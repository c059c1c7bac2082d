//! bindguard's access to the kernel and the disk: reads, probes, binds, detaches. This crate
//! decides nothing.
//!
//! An open `O_PATH` descriptor refers to each file while it is inspected. A path can lead elsewhere
//! a moment later, and a mount id may belong to another mount as soon as the first mount is gone.
//! Such descriptors, mountinfo, statmount and `statx` with `AT_STATX_DONT_SYNC` never wait for a
//! file server or a FUSE daemon. On SMB and 9p statx does wait; [`Handle::unqueried`] avoids it
//! there. Calls that may wait run in a [separate process](probe), which can be abandoned.
#![deny(unsafe_code)]

pub mod bundle;
pub mod enter;
pub mod fault;
pub mod journal;
pub mod observe;
pub mod probe;
pub mod process_files;
pub mod replace;
pub mod unmount;

mod directories;
mod failure;
mod fork;
mod handle;
mod heap;
mod host_path;
mod inherited_state;
mod kernel_features;
mod mount_setattr;
mod mount_watch;
mod mounts;
mod named_variants;
mod read_file;
mod selinux;
mod separate_process;
mod size_errors;
mod statmount;
mod target;

pub use crate::directories::{make_folders, write_new_file};
pub use crate::mounts::{
    ReadTableError, read_container_table, read_host_table_in_part, read_mount_table,
    read_mount_table_in_part,
};
pub use crate::read_file::open_without_waiting;
pub use crate::replace::next_mount_id;
pub use crate::size_errors::{leave_room, with_size_errors};
pub use directories::{make_directories, remove_payload};
pub use failure::Failure;
pub use handle::Handle;
pub use heap::trim_heap;
pub use host_path::{HostWalk, WalkedFolder, walk_host_path, walk_path_of_process};
pub use inherited_state::{inherited_pipe, restore_inherited_state};
pub use kernel_features::{
    KernelFeatures, OldKernel, kernel_features, propagation_takes_locks, release_numbers,
    require_calls,
};
pub use mount_setattr::map_ids;
pub use mount_watch::MountWatch;
pub use mounts::{MountError, MountOf, Mounts};
pub use read_file::{read_file, unless_absent};
pub use selinux::selinux_denies_read;
pub use target::{OpenedTarget, TargetError, current_payload, open_target};
