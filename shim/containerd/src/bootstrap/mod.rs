//! The verbs that containerd runs besides the server: short-lived processes that answer on stdout.
//!
//! ```text
//!   start    finds or starts the server of a container's group   → unix://…, or a BootstrapResult
//!   delete   cleans up after a server that died                  → DeleteResponse
//!   -info    the features of shim and runtime (containerd 2.x)   → RuntimeInfo
//!   -v       the version, for people
//! ```
//! [`answer`] lists the answers to `start` for each containerd.

pub(crate) mod address;
mod answer;
mod claim;
mod delete;
mod group;
mod info;
mod placement;
mod pod;
mod start;
mod stdin;

pub(crate) use claim::remove as remove_socket;
pub(crate) use delete::delete;
pub(crate) use info::{info, version};
pub(crate) use start::start;
