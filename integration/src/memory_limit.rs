//! A memory limit for a running process, like the limit of a pod or a systemd unit.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::waiting::until;

/// A cgroup with a memory limit. Drop removes the cgroup after its processes have ended.
#[derive(Debug)]
pub struct MemoryLimit {
    folder: PathBuf,
    is_v1: bool,
}

impl MemoryLimit {
    /// Moves a process into a cgroup of its own with this limit.
    pub fn of(pid: u32, bytes: u64) -> Result<Self> {
        let v1 = Path::new("/sys/fs/cgroup/memory");
        let is_v1 = v1.is_dir();
        let root = if is_v1 {
            v1
        } else {
            Path::new("/sys/fs/cgroup")
        };
        let limit = Self {
            folder: root.join(format!("bindguard-limit-{pid}")),
            is_v1,
        };
        fs::create_dir(&limit.folder)
            .with_context(|| format!("make the cgroup {}", limit.folder.display()))?;
        limit.write(
            if is_v1 {
                "memory.limit_in_bytes"
            } else {
                "memory.max"
            },
            bytes,
        )?;
        limit.write("cgroup.procs", pid.into())?;
        Ok(limit)
    }

    /// The number of processes that the kernel killed in it.
    pub fn killed(&self) -> Result<u64> {
        let name = if self.is_v1 {
            "memory.oom_control"
        } else {
            "memory.events"
        };
        let path = self.folder.join(name);
        let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        let count = text
            .lines()
            .find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok());
        count.with_context(|| format!("{name} has no oom_kill: {text}"))
    }

    fn write(&self, name: &str, value: u64) -> Result<()> {
        let path = self.folder.join(name);
        fs::write(&path, value.to_string()).with_context(|| format!("write {}", path.display()))
    }
}

impl Drop for MemoryLimit {
    fn drop(&mut self) {
        let removed = until("the cgroup is empty", || {
            Ok(fs::remove_dir(&self.folder).is_ok())
        });
        if let Err(error) = removed {
            eprintln!("{} is left: {error:#}", self.folder.display());
        }
    }
}
