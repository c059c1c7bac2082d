//! Memory that goes away with a process, and its threads: proc_pid_smaps(5), proc_pid_status(5).

use std::fs;

use anyhow::{Context, Result};

/// What one process costs a node.
pub(super) struct Footprint {
    /// Private clean and dirty pages, in KiB.
    pub(super) private_kib: u64,
    /// Threads.
    pub(super) threads: u64,
}

impl Footprint {
    /// Of the parent of `pid`: a container's init is its shim's child.
    pub(super) fn of_parent(pid: u32) -> Result<Self> {
        let parent = field(&format!("/proc/{pid}/status"), "PPid:")?;
        let smaps = format!("/proc/{parent}/smaps_rollup");
        let private_kib = field(&smaps, "Private_Clean:")? + field(&smaps, "Private_Dirty:")?;
        Ok(Self { private_kib, threads: field(&format!("/proc/{parent}/status"), "Threads:")? })
    }
}

fn field(file: &str, name: &str) -> Result<u64> {
    let text = fs::read_to_string(file).with_context(|| format!("read {file}"))?;
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next()?.parse().ok());
    value.with_context(|| format!("find {name} in {file}"))
}
