//! Processes of the reader's own mount namespace: daemons of this node, and of no container.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// Its pid.
    pub pid: u32,
    /// Its name, as the kernel cuts it.
    pub command: String,
    /// The text of its `/proc/PID/cgroup`.
    pub cgroup: String,
}

impl Process {
    /// The path of a file in its `/proc` directory.
    pub fn file(&self, name: &str) -> PathBuf {
        file(self.pid, name)
    }

    /// The arguments that it was started with.
    pub fn arguments(&self) -> Vec<String> {
        let bytes = fs::read(self.file("cmdline")).unwrap_or_default();
        let words = bytes.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned());
        words.filter(|word| !word.is_empty()).collect()
    }

    fn of(pid: u32) -> Option<Self> {
        let text = |name| fs::read_to_string(file(pid, name)).ok();
        Some(Self { pid, command: text("comm")?.trim_end().to_owned(), cgroup: text("cgroup")? })
    }
}

/// The processes with this name.
pub fn processes_named(name: &str) -> Vec<Process> {
    let own = namespace_of(Path::new("/proc/thread-self"));
    let is_named = |pid: &u32| fs::read_to_string(file(*pid, "comm")).is_ok_and(|comm| comm.trim_end() == name);
    let is_ours = |pid: &u32| own.is_some() && namespace_of(&file(*pid, "")) == own;
    pids().into_iter().filter(|pid| is_named(pid) && is_ours(pid)).filter_map(Process::of).collect()
}

/// The processes, of containers too, that have this file open.
pub fn with_open(path: &Path) -> Vec<Process> {
    let has_it = |pid: &u32| {
        let descriptors = fs::read_dir(file(*pid, "fd")).into_iter().flatten().flatten();
        descriptors.filter_map(|entry| fs::read_link(entry.path()).ok()).any(|open| open == path)
    };
    pids().into_iter().filter(has_it).filter_map(Process::of).collect()
}

fn namespace_of(process: &Path) -> Option<u64> {
    fs::metadata(process.join("ns/mnt")).ok().map(|metadata| metadata.ino())
}

pub(super) fn pids() -> Vec<u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str().and_then(|name| name.parse().ok())).collect()
}

fn file(pid: u32, name: &str) -> PathBuf {
    Path::new("/proc").join(pid.to_string()).join(name)
}
