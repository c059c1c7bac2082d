//! Captured data and models, through the public functions of `bindguard-core`.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test says what it expects by unwrapping it"
)]

mod fixtures;
mod missing_binds;
mod model;
mod mountinfo;
mod plan;
mod proof;
mod proof_hostile;
mod record_of_made_mounts;
mod refusals;
mod spec_edits;
mod subpath_of_a_server;
