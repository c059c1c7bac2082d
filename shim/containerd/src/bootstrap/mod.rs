//! What containerd runs this program for besides serving: short-lived, each answering on stdout.
//!
//! ```text
//!   start    finds or starts the server of a container's group   → unix://…, or a BootstrapResult
//!   delete   cleans up after a server that died                  → DeleteResponse
//!   -info    what shim and runtime can do (containerd 2.x)       → RuntimeInfo
//!   -v       the version, for people
//! ```
//! [`answer`] says which containerd gets which answer to `start`.

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
