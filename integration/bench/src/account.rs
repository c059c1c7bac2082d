//! CPU time of everything that is started from here: client, containerd, shim, guard and runtime.
//!
//! A cgroup counts the CPU time, whatever the processes do: a cpuacct cgroup of version 1 if the
//! machine has cpuacct, else a version 2 cgroup. Containers have separate cgroups and do not count.
//! On a busy machine CPU time repeats within a few per cent, wall time does not. The bench's own
//! time is subtracted.
//!
//! The cgroup lies below the node's name, so the node's keeper ends what is in it and removes it,
//! however the bench ends.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use bindguard_integration::Node;

use crate::clocks;

/// The cpuacct hierarchy of version 1, and version 2.
const HIERARCHIES: [&str; 2] = ["/sys/fs/cgroup/cpuacct", "/sys/fs/cgroup"];

/// A cgroup that this process is in until the account is closed.
#[derive(Debug)]
pub struct CpuAccount(PathBuf);

impl CpuAccount {
    /// Moves this process and the node's processes, and with them all later children, into a new
    /// cgroup.
    pub fn open(node: &Node) -> Result<Self> {
        let folder = hierarchy()?.join(node.name()).join("account");
        fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
        let account = Self(folder);
        for pid in node.all_processes().into_iter().chain([std::process::id()]) {
            enter(&account.0, pid)?;
        }
        Ok(account)
    }

    /// A sub-account, for processes that are moved there.
    pub fn within(&self, name: &str) -> Result<SubAccount> {
        let folder = self.0.join(name);
        fs::create_dir(&folder).with_context(|| format!("create {}", folder.display()))?;
        Ok(SubAccount(folder))
    }

    /// The CPU time so far in milliseconds, without the CPU time of the bench.
    pub fn spent(&self) -> Result<f64> {
        Ok(usage(&self.0)? - clocks::of_this_process()?)
    }

    /// Waits until the bench and containerd are alone: a shim ends a moment after its last client
    /// got its answer.
    pub fn settle(&self) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(30);
        while let Some(shim) = self.shims()?.first() {
            if Instant::now() > deadline {
                bail!("the shim {shim} does not end");
            }
            thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// The pids of all processes with the name of a shim.
    pub fn shims(&self) -> Result<Vec<u32>> {
        let is_shim = |pid: &u32| {
            fs::read_to_string(format!("/proc/{pid}/comm"))
                .is_ok_and(|name| name.starts_with("containerd-shim"))
        };
        Ok(members(&self.0)?.into_iter().filter(is_shim).collect())
    }
}

impl Drop for CpuAccount {
    /// The keeper ends every process in it.
    fn drop(&mut self) {
        if let Err(error) = hierarchy().and_then(|hierarchy| enter(hierarchy, std::process::id())) {
            eprintln!("{error:#}");
        }
    }
}

/// CPU time of some of the processes.
#[derive(Debug)]
pub struct SubAccount(PathBuf);

impl SubAccount {
    /// Counts a process, and what it starts from now on.
    pub fn take(&self, pid: u32) -> Result<()> {
        enter(&self.0, pid)
    }

    /// Milliseconds so far.
    pub fn spent(&self) -> Result<f64> {
        usage(&self.0)
    }
}

fn hierarchy() -> Result<&'static Path> {
    let found = HIERARCHIES
        .into_iter()
        .map(Path::new)
        .find(|root| root.join("cgroup.procs").is_file());
    found.context("find a cgroup hierarchy that counts CPU time")
}

fn enter(folder: &Path, pid: u32) -> Result<()> {
    let file = folder.join("cgroup.procs");
    fs::write(&file, pid.to_string()).with_context(|| format!("write {}", file.display()))
}

fn members(folder: &Path) -> Result<Vec<u32>> {
    let file = folder.join("cgroup.procs");
    let pids = fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
    Ok(pids.lines().filter_map(|pid| pid.parse().ok()).collect())
}

fn usage(folder: &Path) -> Result<f64> {
    let (version_1, version_2) = (folder.join("cpuacct.usage"), folder.join("cpu.stat"));
    let (file, per_millisecond) = if version_1.is_file() {
        (version_1, 1e6)
    } else {
        (version_2, 1e3)
    };
    let text = fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
    let spent: Option<f64> = text
        .trim_start_matches("usage_usec ")
        .lines()
        .next()
        .and_then(|line| line.parse().ok());
    Ok(spent.with_context(|| format!("parse {text:?}"))? / per_millisecond)
}
