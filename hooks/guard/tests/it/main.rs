//! Whole admissions and refreshes in private mount namespaces, with a module for each story.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test says what it expects by unwrapping it"
)]

mod admit;
mod admit_spec;
mod attributes_of_the_mount;
mod cifs;
mod dead_sources;
mod fuzz_seeds;
mod histories;
mod histories_of_volumes;
mod host_root_binds;
mod hostile_volumes;
mod journal;
mod journal_schema;
mod json_schema;
mod many_binds;
mod mounts_below_emptydirs;
mod mounts_within_volumes;
mod names_of_a_kubelet;
mod nfs;
mod nfs_server;
mod ninep;
mod older_kernels;
mod payloads_of_drivers;
mod prove;
mod prove_honest;
mod prove_hostile;
mod refresh;
mod refresh_detach_hangs;
mod refresh_driver_volumes;
mod refresh_engine_mounts;
mod refresh_files;
mod refresh_files_hostile;
mod refresh_host_roots;
mod refresh_hostile;
mod refresh_idmapped;
mod refresh_interrupted;
mod refresh_killed;
mod refresh_linked_root;
mod refresh_mounts;
mod refresh_mounts_hostile;
mod refresh_namespaces;
mod refresh_nested;
mod refresh_nested_binds;
mod refresh_nested_hostile;
mod refresh_nfs;
mod refresh_open_descriptors;
mod refresh_scene;
mod refresh_selinux;
mod refresh_slow;
mod refresh_without_record;
mod release_copies;
mod repairers_at_once;
mod silent_sources;
mod silent_sources_of_many_creates;
mod smb_server;
mod unreadable_paths;
mod vanished_directories;
mod volumes_mounted_anew;
mod written_by_containers;
