//! System calls in private mount namespaces, and the journal on a disk.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test says what it expects by unwrapping it"
)]

mod cached_paths;
mod descriptors_of_mounts;
mod enter;
mod enter_hanging;
mod enter_hostile;
mod enter_limit;
mod enter_scene;
mod hanging_probes;
mod journal;
mod mount_ids;
mod mount_watch;
mod mounts;
mod process_files;
mod program_of_container;
mod replace;

mod target;
