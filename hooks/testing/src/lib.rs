//! Scenes for the tests of sys, guard, operator and agent: a mount namespace of the test's own
//! thread, a kubelet's pod in it, and a container that reads its files.
//!
//! The stories of `integration` use real containerds instead. No program depends on this crate.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test says what it expects by unwrapping it"
)]

mod cgroup;
mod denied_call;
mod documented;
mod exiting;
mod extent;
mod folder;
pub mod fuse;
pub mod held_memory;
mod helper;
pub mod hostile_process;
pub mod live;
pub mod namespace;
mod pod;
pub mod readers;
pub mod scene;

pub use bindguard_testing_macros::test_if;
pub use cgroup::Cgroup;
pub use denied_call::deny_call;
pub use documented::documented;
pub use exiting::Exiting;
pub use extent::rounds;
pub use folder::Folder;
pub use fuse::Fuse;
pub use helper::helper;
pub use namespace::{
    bind, is_before_linux_6_8, mount_tmpfs, mounts_of_host, own_namespace, skipped, unmount,
};
pub use pod::{Pod, mount_of};
