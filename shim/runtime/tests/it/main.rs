//! `bindguard-runtime` as a process.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test says what it expects by unwrapping it"
)]

mod host_root_under_youki;
mod process_state_is_unchanged;
mod proof_at_start;
mod spec_beside_the_bundle;
mod unread_streams;
