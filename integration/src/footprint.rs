//! A shim's use of a machine: memory that the shim's end frees, threads, descriptors, children.
//! proc_pid_smaps(5), proc_pid_status(5).

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

/// A shim returns memory one second after the last end of a child.
const REST: Duration = Duration::from_secs(2);
/// The interval between two checks for an idle shim.
const LOOKS: u32 = 15;

/// The resources of a process at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Footprint {
    /// Pages of its own, written or not, in KiB.
    pub private_kib: u64,
    /// Written pages, in KiB.
    pub private_dirty_kib: u64,
    /// Anonymous pages, in KiB. File pages do not count: the pages of a just copied program are
    /// dirty until their write-back.
    pub anonymous_kib: u64,
    /// The proportional share (PSS) of all resident pages, in KiB.
    pub pss_kib: u64,
    /// All resident pages (RSS), in KiB: independent of processes that share pages.
    pub rss_kib: u64,
    pub threads: u64,
    /// Open descriptors.
    pub descriptors: u64,
    /// Children, zombies included.
    pub children: u64,
}

impl Footprint {
    /// Of a process.
    pub fn of(pid: u32) -> Result<Self> {
        let rollup = format!("/proc/{pid}/smaps_rollup");
        let private_dirty_kib = field(&rollup, "Private_Dirty:")?;
        let descriptors = format!("/proc/{pid}/fd");
        let descriptors = fs::read_dir(&descriptors)
            .with_context(|| format!("read {descriptors}"))?
            .count();
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))
            .context("read its children")?;
        Ok(Self {
            private_kib: field(&rollup, "Private_Clean:")? + private_dirty_kib,
            private_dirty_kib,
            anonymous_kib: field(&rollup, "Anonymous:")?,
            pss_kib: field(&rollup, "Pss:")?,
            rss_kib: field(&rollup, "Rss:")?,
            threads: field(&format!("/proc/{pid}/status"), "Threads:")?,
            descriptors: descriptors as u64,
            children: children.split_whitespace().count() as u64,
        })
    }

    /// The footprint of a shim at rest: two reads in a row agree.
    pub fn at_rest(pid: u32) -> Result<Self> {
        let mut seen = Self::of(pid)?;
        for _ in 0..LOOKS {
            thread::sleep(REST);
            let now = Self::of(pid)?;
            if now == seen {
                return Ok(now);
            }
            seen = now;
        }
        bail!("process {pid} does not come to rest: {seen:?}")
    }

    /// Of the parent of `pid`: a container's init is its shim's child.
    pub fn of_parent(pid: u32) -> Result<Self> {
        Self::of(parent_of(pid)?)
    }

    /// Checks that nothing has grown since `before`; memory may grow by a tenth, because single
    /// pages are not returned.
    pub fn has_not_grown_since(&self, before: &Self) -> Result<()> {
        self.counts_no_more_than(before)?;
        ensure!(
            self.has_about_the_memory_of(before),
            "{before:?}, then {self:?}"
        );
        Ok(())
    }

    /// Checks that there are no more threads, descriptors and children than `before`.
    pub fn counts_no_more_than(&self, before: &Self) -> Result<()> {
        let counted = |of: &Self| [of.threads, of.descriptors, of.children];
        let grown = counted(self)
            .into_iter()
            .zip(counted(before))
            .any(|(now, then)| now > then);
        ensure!(!grown, "{before:?}, then {self:?}");
        Ok(())
    }

    /// At most a tenth more than `before`.
    pub fn has_about_the_memory_of(&self, before: &Self) -> bool {
        self.anonymous_kib * 10 <= before.anonymous_kib * 11
    }
}

/// The parent of a process.
pub fn parent_of(pid: u32) -> Result<u32> {
    u32::try_from(field(&format!("/proc/{pid}/status"), "PPid:")?).context("parse the parent's pid")
}

/// The pipes of a process, by the kernel's names, without the pipes that this test inherited from
/// its caller.
pub fn pipes_of(pid: u32) -> Result<BTreeSet<PathBuf>> {
    let own = pipes(process::id())?;
    Ok(pipes(pid)?
        .into_iter()
        .filter(|pipe| !own.contains(pipe))
        .collect())
}

fn pipes(pid: u32) -> Result<BTreeSet<PathBuf>> {
    let folder = format!("/proc/{pid}/fd");
    let descriptors = fs::read_dir(&folder).with_context(|| format!("read {folder}"))?;
    // A descriptor that was closed meanwhile is skipped.
    let opened = descriptors
        .flatten()
        .filter_map(|descriptor| fs::read_link(descriptor.path()).ok());
    Ok(opened
        .filter(|file| file.to_string_lossy().starts_with("pipe:"))
        .collect())
}

/// Context switches of a process's threads, voluntary or not.
pub fn context_switches(pid: u32) -> Result<u64> {
    let folder = format!("/proc/{pid}/task");
    let mut switches = 0;
    for thread in fs::read_dir(&folder).with_context(|| format!("read {folder}"))? {
        let status = thread?.path().join("status").display().to_string();
        switches += field(&status, "voluntary_ctxt_switches:")?
            + field(&status, "nonvoluntary_ctxt_switches:")?;
    }
    Ok(switches)
}

/// The processor time of a process's own threads, in ticks of 10 ms: proc_pid_stat(5).
pub fn processor_ticks(pid: u32) -> Result<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).context("read processor time")?;
    let fields = text
        .rsplit(')')
        .next()
        .unwrap_or_default()
        .split_whitespace()
        .skip(11)
        .take(2);
    fields.map(|ticks| Ok(ticks.parse::<u64>()?)).sum()
}

fn field(file: &str, name: &str) -> Result<u64> {
    let text = fs::read_to_string(file).with_context(|| format!("read {file}"))?;
    let value = text.lines().find_map(|line| {
        line.strip_prefix(name)?
            .split_whitespace()
            .next()?
            .parse()
            .ok()
    });
    value.with_context(|| format!("find {name} in {file}"))
}
