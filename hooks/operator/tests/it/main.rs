//! Surveys and reports of recorded and of real mount tables.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test says what it expects by unwrapping it"
)]

mod dead_kubelet_root;
mod dead_publish_mount;
mod hostile_mount_tables;
mod json_for_terminals;
mod json_is_stable;
mod names_of_a_kubelet;
mod recorded;
mod writers_of_host_folders;
