//! Checks of a node: each point is a condition that hinders bindguard or leaves mounts in a wrong
//! state.
//!
//! Each point is a function over plain evidence, in its own file. A failed point names the command
//! to run.

mod agent;
mod below_emptydirs;
mod containerd;
mod detach_mounts;
mod distribution;
mod fuse_daemons;
mod host_root;
mod kernel;
mod kernel_fixes;
mod mount_helpers;
mod pinned;
mod point;
mod programs;
mod read_only_binds;
mod runtime_faults;
mod subpaths;

pub use agent::{agent, describe as describe_agent, seconds};
pub use below_emptydirs::below_emptydirs;
pub use containerd::{ContainerdSeen, RunningPods, RuntimeEntry, containerd};
pub use detach_mounts::detach_mounts;
pub use distribution::{LinuxDistribution, Packages, os_release, os_release_value};
pub use fuse_daemons::fuse_daemons;
pub use host_root::host_root;
pub use kernel::kernel;
pub use mount_helpers::{helper_of, mount_helpers};
pub use pinned::pinned;
pub use point::{DoctorReport, Point, PointStatus};
pub use programs::{ProgramSeen, programs};
pub use read_only_binds::read_only_binds;
pub use subpaths::subpaths;
