//! Processes of the reader's own mount namespace: daemons of this node, and of no container.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use bindguard_sys::process_files::{ProcessFile, arguments_of, inodes, links_within};

use crate::process_files::in_parts;

/// A process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// Its pid.
    pub pid: u32,
    /// The process's `comm`, at most 15 bytes.
    pub command: String,
    /// The text of its `/proc/PID/cgroup`.
    pub cgroup: String,
}

impl Process {
    pub(super) fn of(pid: u32) -> Option<Self> {
        let text = |name| fs::read_to_string(file(pid, name)).ok();
        Some(Self {
            pid,
            command: text("comm")?.trim_end().to_owned(),
            cgroup: text("cgroup")?,
        })
    }
}

/// The processes with this name.
pub fn processes_named(name: &str) -> Vec<Process> {
    let named = pids_named(name);
    let own = [namespace("mnt"), namespace("user")];
    let [mounts, users] = ["ns/mnt", "ns/user"].map(|link| inodes(&of_each(&named, link)));
    let is_ours = |(mounts, users): (io::Result<u64>, io::Result<u64>)| {
        own == [mounts.ok(), users.ok()] && own[0].is_some()
    };
    let ours = mounts.into_iter().zip(users).map(is_ours);
    named
        .iter()
        .zip(ours)
        .filter(|(_, is_ours)| *is_ours)
        .filter_map(|(pid, _)| Process::of(*pid))
        .collect()
}

/// The start arguments of each process named `name`. A process that gives no answer is left out.
pub fn arguments_of_processes(name: &str) -> Vec<Vec<String>> {
    let pids: Vec<u32> = processes_named(name)
        .iter()
        .map(|process| process.pid)
        .collect();
    arguments_of(&pids).into_iter().flatten().collect()
}

/// The processes, of containers too, that have this file open.
pub fn with_open(path: &Path) -> Vec<Process> {
    let descriptors = |pid: u32| {
        let entries = fs::read_dir(file(pid, "fd"))
            .into_iter()
            .flatten()
            .flatten();
        entries.map(move |entry| ProcessFile {
            pid,
            path: entry.path(),
        })
    };
    let mut found: Vec<u32> = Vec::new();
    in_parts(pids().into_iter().flat_map(descriptors), |files, left| {
        let links = links_within(left, &files);
        let has_it = |(file, link): (ProcessFile, io::Result<PathBuf>)| {
            link.is_ok_and(|open| open == path).then_some(file.pid)
        };
        found.extend(files.into_iter().zip(links).filter_map(has_it));
    });
    found.dedup();
    found.into_iter().filter_map(Process::of).collect()
}

/// The caller's own namespace.
pub(super) fn namespace(kind: &str) -> Option<u64> {
    fs::metadata(format!("/proc/thread-self/ns/{kind}"))
        .ok()
        .map(|metadata| metadata.ino())
}

fn of_each(pids: &[u32], name: &str) -> Vec<ProcessFile> {
    pids.iter().map(|pid| ProcessFile::of(*pid, name)).collect()
}

/// The pids of all processes with this name, of containers too.
pub fn pids_named(name: &str) -> Vec<u32> {
    let is_named = |pid: &u32| {
        fs::read_to_string(file(*pid, "comm")).is_ok_and(|comm| comm.trim_end() == name)
    };
    pids().into_iter().filter(is_named).collect()
}

/// The pids of all processes.
pub fn pids() -> Vec<u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries
        .filter_map(|entry| {
            entry
                .file_name()
                .to_str()
                .and_then(|name| name.parse().ok())
        })
        .collect()
}

fn file(pid: u32, name: &str) -> PathBuf {
    Path::new("/proc").join(pid.to_string()).join(name)
}
