//! What nearly every story uses.

pub use crate::cri::{Cri, Sandbox, mount};
pub use crate::journal::JOURNAL;
pub use crate::leftovers::Leftovers;
pub use crate::mount_calls::{tmpfs, unmount};
pub use crate::process::{Finished, host, run, write_program};
pub use crate::programs::{CLI, GUARD};
pub use crate::scenes::only_a_current_mount;
pub use crate::waiting::until;
pub use crate::{
    Agent, Bind, Generation, Node, Oci, Runtime, Setup, Volume, VolumeKind, on_newest_and_older,
};
pub use anyhow::{Context, Result, anyhow, bail, ensure};
pub use nix::sys::signal::{Signal, kill};
pub use nix::unistd::Pid;
pub use serde_json::{Value, json};
pub use std::path::{Path, PathBuf};
pub use std::process::{Child, Command, Stdio};
pub use std::time::{Duration, Instant};
pub use std::{fs, thread};
