//! The candidates: the shim under test, its peers, and the bare runtimes as the floor.

use std::env;
use std::path::PathBuf;

use bindguard_integration::doc_commands::repository;
use bindguard_integration::programs::{Matrix, SHIM, binaries_under_test};
use bindguard_integration::{Generation, Runtime};
use serde::{Deserialize, Serialize};

/// A program that the bench compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Candidate {
    /// containerd-shim-bindguard-v2, with its guard.
    Bindguard,
    /// containerd's shim in Rust, the crate containerd-runc-shim.
    Rust,
    /// containerd-shim-runc-v2 of containerd 1.7.
    Go17,
    /// containerd-shim-runc-v2 of containerd 2.1.
    Go21,
    /// containerd-shim-runc-v2 of containerd 2.4.
    Go24,
    /// No shim: runc alone.
    Runc,
    /// crun by itself.
    Crun,
    /// Two empty static programs, the first of which starts the second: the floor of `start` with
    /// its server.
    EmptyPrograms,
}

impl Candidate {
    /// Every shim.
    pub const SHIMS: [Self; 5] = [
        Self::Bindguard,
        Self::Rust,
        Self::Go17,
        Self::Go21,
        Self::Go24,
    ];
    /// Everybody, in the order of the tables.
    pub const ALL: [Self; 8] = [
        Self::Bindguard,
        Self::Rust,
        Self::Go17,
        Self::Go21,
        Self::Go24,
        Self::Runc,
        Self::Crun,
        Self::EmptyPrograms,
    ];

    /// As tables call it.
    pub fn title(self) -> &'static str {
        match self {
            Self::Bindguard => "bindguard",
            Self::Rust => "Rust runc-shim",
            Self::Go24 => "Go 2.4",
            Self::Go17 => "Go 1.7",
            Self::Go21 => "Go 2.1",
            Self::Runc => "runc alone",
            Self::Crun => "crun alone",
            Self::EmptyPrograms => "two empty programs",
        }
    }

    /// True for a shim of a different project.
    pub fn is_peer(self) -> bool {
        match self {
            Self::Rust | Self::Go24 | Self::Go17 | Self::Go21 => true,
            Self::Bindguard | Self::Runc | Self::Crun | Self::EmptyPrograms => false,
        }
    }

    /// containerd's name for the runtime.
    pub fn runtime(self) -> Runtime {
        match self {
            Self::Bindguard | Self::Runc | Self::Crun | Self::EmptyPrograms => Runtime::Bindguard,
            Self::Rust => Runtime::Named("rust"),
            Self::Go24 => Runtime::Named("go24"),
            Self::Go17 => Runtime::Named("go17"),
            Self::Go21 => Runtime::Named("go21"),
        }
    }

    /// The name of its program on the node's `PATH`.
    pub fn link(self) -> String {
        match (self, self.runtime()) {
            (Self::Runc, _) => "runc".to_owned(),
            (Self::Crun, _) => "crun".to_owned(),
            (Self::EmptyPrograms, _) => "empty-program".to_owned(),
            (_, Runtime::Named(name)) => format!("containerd-shim-{name}-v2"),
            _ => SHIM.to_owned(),
        }
    }

    /// The program, if the machine has it.
    pub fn program(self, matrix: &Matrix) -> Option<PathBuf> {
        let go = |generation| Some(matrix.program(generation, "containerd-shim-runc-v2"));
        let program = match self {
            Self::Bindguard => binaries_under_test().ok().map(|folder| folder.join(SHIM)),
            Self::Rust => Some(rust_shim()),
            Self::Go24 => go(Generation::V2_4),
            Self::Go17 => go(Generation::V1_7),
            Self::Go21 => go(Generation::V2_1),
            Self::Runc => Some(matrix.program(Generation::NEWEST, "runc")),
            Self::Crun => Some(matrix.program(Generation::NEWEST, "crun")),
            Self::EmptyPrograms => Some(repository().join("target/tools/bin/empty-program")),
        };
        program.filter(|program| program.is_file())
    }
}

/// `$BINDGUARD_RUST_SHIM`, else the shim that `make bench` installs.
fn rust_shim() -> PathBuf {
    let installed = || repository().join("target/tools/bin/containerd-shim-runc-v2-rs");
    env::var_os("BINDGUARD_RUST_SHIM").map_or_else(installed, PathBuf::from)
}
