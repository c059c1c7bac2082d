//! What containerd runs this program for besides serving: short-lived, each answering on stdout.
//!
//! ```text
//!   start    finds or starts the server of a container's group   → unix://…
//!   delete   cleans up after a server that died                  → DeleteResponse
//!   -info    what shim and runtime can do (containerd 2.x)       → RuntimeInfo
//!   -v       the version, for people
//! ```
//! The answer to `start` is the plain address, not the JSON of newer shims: 1.6 and 1.7 understand nothing else, 2.x takes
//! it as the v2 of the protocol, and with v2 each container has a connection and a crash clean-up of its own.

pub(crate) mod address;
mod claim;
mod delete;
mod group;
mod info;
mod placement;
mod start;
mod stdin;

pub(crate) use claim::remove as remove_socket;
pub(crate) use delete::delete;
pub(crate) use info::{info, version};
pub(crate) use start::start;
