//! A whole node in a mount namespace: real containerds, real runc and crun, a fake kubelet.
//!
//! bindguard's promises are about a node, so the tests need a node: each file of `tests/` has a
//! story on the [`node`] made here, and the `demo` binary shows the two main faults and their
//! repair.
//!
//! ```text
//!   Setup ──start──► Node ── containerd (1.7, 2.1, 2.3, 2.4) ── shim ── bindguard-runtime ── runc, crun
//!                     │  ├── Ctr, Cri                clients
//!                     │  ├── Kubelet                 volumes and subpaths, by the real kubelet's syscalls
//!                     │  ├── Cluster                 a real kubelet in its place, with its API server (`make kubelet`)
//!                     │  └── Keeper                  kills and removes all of it, also when the test is SIGKILLed
//!                     └ a mount namespace of the test's own thread, with a private /run
//! ```
//!
//! Nothing here depends on bindguard's own crates: a harness that shared the code under test would
//! share its mistakes.

pub mod agent;
pub mod bundle;
pub mod cgroup_hierarchy;
pub mod cluster;
pub mod cri;
pub mod crio;
pub mod criu;
pub mod ctr;
pub mod demo;
pub mod differential;
pub mod doc_commands;
pub mod engines;
pub mod events;
pub mod footprint;
pub mod foreign_mounts;
pub mod fuse_daemon;
pub mod image;
pub mod journal;
pub mod kube_api;
pub mod kubelet;
pub mod leftovers;
pub mod memory_limit;
pub mod mount_calls;
pub mod mounts;
pub mod node;
pub mod node_image;
pub mod output;
pub mod polling;
pub mod prelude;
pub mod privilege;
pub mod process;
pub mod programs;
pub mod runtime;
pub mod s3_server;
pub mod scenes;
pub mod shim;
pub mod silent_server;
pub mod stale;
pub mod stopped;
pub mod systemd;
pub mod waiting;

pub use agent::Agent;
pub use ctr::{Bind, Ctr, Runtime};
pub use kubelet::{Kubelet, KubeletRoot, Pod, Volume, VolumeKind};
pub use node::{Node, Setup};
pub use polling::PollingReader;
pub use programs::{Generation, Oci};
pub use silent_server::SilentServer;

/// Makes a test for each generation of containerd from a function that runs the story on a
/// generation. `make test` runs all of these tests.
#[macro_export]
macro_rules! on_every_generation {
    ($story:expr) => {
        $crate::on_older_generations!($story);
        $crate::on_newest_generation!($story);
    };
}

/// As [`on_every_generation`], for stories about the shim and the guard. `make test` runs the test
/// on the newest containerd alone. CI runs `make test OLDER=1`, which includes the older
/// containerds.
#[macro_export]
macro_rules! on_newest_and_older {
    ($story:expr) => {
        mod older {
            use super::*;

            $crate::on_older_generations!($story);
        }
        $crate::on_newest_generation!($story);
    };
}

/// A test for each version of containerd's config file: 1.7 writes version 2.
#[macro_export]
macro_rules! on_every_config_version {
    ($story:expr) => {
        #[test]
        fn containerd_1_7() {
            ($story)($crate::Generation::V1_7);
        }
        $crate::on_newest_generation!($story);
    };
}

/// A part of [`on_every_generation`].
#[macro_export]
macro_rules! on_older_generations {
    ($story:expr) => {
        #[test]
        fn containerd_1_7() {
            ($story)($crate::Generation::V1_7);
        }
        #[test]
        fn containerd_2_1() {
            ($story)($crate::Generation::V2_1);
        }
        #[test]
        fn containerd_2_3() {
            ($story)($crate::Generation::V2_3);
        }
    };
}

/// A part of [`on_every_generation`].
#[macro_export]
macro_rules! on_newest_generation {
    ($story:expr) => {
        #[test]
        fn newest_containerd() {
            ($story)($crate::Generation::NEWEST);
        }
    };
}

/// As [`on_every_generation`], where systemd makes the cgroups, and on the newest containerd with
/// crun as well. Only the booted node of `make kernels` has such a systemd; elsewhere these tests
/// are skipped aloud.
#[macro_export]
macro_rules! on_every_generation_with_systemd {
    ($story:expr) => {
        mod with_systemd {
            use super::*;

            #[test]
            fn containerd_1_7() {
                ($story)($crate::Setup::on($crate::Generation::V1_7).systemd());
            }
            #[test]
            fn newest_containerd() {
                ($story)($crate::Setup::on($crate::Generation::NEWEST).systemd());
            }
            #[test]
            fn newest_containerd_crun() {
                let crun = $crate::Oci::Crun($crate::Generation::NEWEST);
                ($story)(
                    $crate::Setup::on($crate::Generation::NEWEST)
                        .oci(crun)
                        .systemd(),
                );
            }
        }
    };
}
