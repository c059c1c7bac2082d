//! CPU time of everything that is started from here: client, containerd, shim, guard and runtime.
//!
//! A cpuacct cgroup counts it, whatever the processes do; containers have cgroups of their own and are not in it. On a
//! busy machine CPU time repeats within a few per cent, wall time does not.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};

const HIERARCHY: &str = "/sys/fs/cgroup/cpuacct";

/// A cgroup that this process is in until the account is closed.
pub(super) struct CpuAccount(PathBuf);

impl CpuAccount {
    /// Moves this process, and with it all that it starts, into a new cgroup.
    pub(super) fn open() -> Result<Self> {
        let folder = PathBuf::from(format!("{HIERARCHY}/bindguard-bench-{}", std::process::id()));
        fs::create_dir(&folder).with_context(|| format!("create {}: is there no cgroup v1 here?", folder.display()))?;
        let account = Self(folder);
        account.enter(account.0.join("cgroup.procs"))?;
        Ok(account)
    }

    /// Milliseconds so far.
    pub(super) fn spent(&self) -> Result<f64> {
        let file = self.0.join("cpuacct.usage");
        let nanoseconds: f64 =
            fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?.trim().parse()?;
        Ok(nanoseconds / 1e6)
    }

    fn enter(&self, procs: PathBuf) -> Result<()> {
        fs::write(&procs, std::process::id().to_string()).with_context(|| format!("write {}", procs.display()))
    }
}

impl Drop for CpuAccount {
    fn drop(&mut self) {
        let left = self.enter(PathBuf::from(HIERARCHY).join("cgroup.procs"));
        if left.is_err() || fs::remove_dir(&self.0).is_err() {
            eprintln!("the cgroup {} stays behind", self.0.display());
        }
    }
}
