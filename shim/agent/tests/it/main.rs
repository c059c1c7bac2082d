//! The agent as a process: its re-binds on the host, kubediag, and a kubelet at the same moment.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test says what it expects by unwrapping it"
)]

mod agent;
mod host_subpaths;
mod kubediag;
mod kubelet_at_the_same_moment;
