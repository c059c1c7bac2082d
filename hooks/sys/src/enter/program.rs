//! The process of a container that runs a program, for a signal.
//!
//! A process belongs to the container if its cgroup does, and if it has as many pids as the
//! container's init. A container within the container has a pid namespace, and so an additional
//! pid. The pid namespace alone is not enough: pods share a pid namespace, or have the host's.
//!
//! The workers of nginx run the program of their parent, the master: a process whose parent runs the
//! same program does not count. If several processes remain, the oldest process counts.
//!
//! Between a look and a signal, the process may end, and its pid may be reused. So the process is
//! opened first, and cgroup and program are compared again through the pidfd. A process that blocks
//! the reader of its `exe` is left out.

use std::collections::HashSet;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;

use bindguard_core::cgroup::ContainerCgroups;
use bindguard_core::process_stat::{START_TIME, number};
use bindguard_core::refresh_request::ProgramName;

use super::process::HeldProcess;
use super::process_error::ProcessError;
use crate::process_files::{ProcessFile, contents_within, links_within};

/// Time limit to read a file of all processes of the container.
const FILES_TIMEOUT: Duration = Duration::from_secs(1);

/// Limit of looks: the process that was found may end meanwhile.
const MAX_LOOKS: u32 = 3;

/// A process of the container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Member {
    pid: u32,
    parent: u32,
}

impl HeldProcess {
    /// The process of this init's container that runs the program.
    ///
    /// # Errors
    /// [`ProcessError::NoProgram`] if there is none, and [`ProcessError::NoContainer`].
    pub fn running(&self, program: &ProgramName) -> Result<Self, ProcessError> {
        let container = self.container();
        let container = container.ok_or(ProcessError::NoContainer(self.pid()))?;
        let depth = Status::of(self.pid())
            .ok_or(ProcessError::Ended(self.pid()))?
            .depth;
        let cgroup = self.read("cgroup")?;
        let cgroups = ContainerCgroups::of_init(&String::from_utf8_lossy(&cgroup), container)
            .ok_or(ProcessError::NoContainer(self.pid()))?;
        let of_container = |pid| member(pid, &cgroups, depth);
        for _ in 0..MAX_LOOKS {
            let members: Vec<Member> = pids().filter_map(of_container).collect();
            let Some(pid) = first_of(&topmost(&running(&members, program))) else {
                break;
            };
            let found = match Self::open(pid) {
                Err(ProcessError::Ended(_)) => continue,
                found => found?,
            };
            let name = found.program_name();
            let runs_program = name.is_ok_and(|name| program.is_program(&name));
            // Still alive afterwards: the pid was not reused when its cgroup was read.
            if runs_program && of_container(pid).is_some() && found.is_alive() {
                return Ok(found);
            }
        }
        Err(ProcessError::NoProgram(program.as_str().to_owned()))
    }
}

fn pids() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// The process, if it belongs to the container.
fn member(pid: u32, cgroups: &ContainerCgroups, depth: usize) -> Option<Member> {
    let cgroup = fs::read(format!("/proc/{pid}/cgroup")).ok()?;
    if !cgroups.contain(&String::from_utf8_lossy(&cgroup)) {
        return None;
    }
    let status = Status::of(pid).filter(|status| status.depth == depth)?;
    let parent = status.parent;
    Some(Member { pid, parent })
}

/// The members that run the program.
fn running(members: &[Member], program: &ProgramName) -> Vec<Member> {
    let exe = |member: &Member| ProcessFile::of(member.pid, "exe");
    let files: Vec<ProcessFile> = members.iter().map(exe).collect();
    let links = links_within(FILES_TIMEOUT, &files);
    let is_program = |link: &PathBuf| {
        let name = link.file_name().unwrap_or_default();
        program.is_program(name.as_bytes())
    };
    let matching = members.iter().zip(links);
    let matching = matching.filter(|(_, link)| link.as_ref().is_ok_and(is_program));
    matching.map(|(member, _)| *member).collect()
}

/// The pids of the members whose parent is no member of the list.
fn topmost(members: &[Member]) -> Vec<u32> {
    let pids: HashSet<u32> = members.iter().map(|member| member.pid).collect();
    let top = members.iter().filter(|it| !pids.contains(&it.parent));
    top.map(|member| member.pid).collect()
}

/// The process that started first.
fn first_of(pids: &[u32]) -> Option<u32> {
    if let [pid] = pids {
        return Some(*pid);
    }
    let files: Vec<ProcessFile> = pids
        .iter()
        .map(|pid| ProcessFile::of(*pid, "stat"))
        .collect();
    let started = pids
        .iter()
        .zip(contents_within(FILES_TIMEOUT, &files))
        .filter_map(|(pid, stat)| {
            let stat = String::from_utf8_lossy(&stat.ok()?).into_owned();
            Some((number(&stat, START_TIME)?, *pid))
        });
    started.min().map(|(_, pid)| pid)
}

/// Facts of `/proc/PID/status`.
struct Status {
    parent: u32,
    /// The number of pids of the process: a pid for each pid namespace.
    depth: usize,
}

impl Status {
    fn of(pid: u32) -> Option<Self> {
        let text = fs::read(format!("/proc/{pid}/status")).ok()?;
        Self::from_text(&String::from_utf8_lossy(&text))
    }

    /// The kernel escapes a newline in the name of the process.
    fn from_text(text: &str) -> Option<Self> {
        let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name));
        Some(Self {
            parent: field("PPid:")?.trim().parse().ok()?,
            depth: field("NSpid:")?.split_whitespace().count(),
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::*;

    #[test]
    fn the_master_of_several_workers_gets_the_signal() {
        let member = |pid, parent| Member { pid, parent };
        let nginx = [member(9, 8), member(8, 7), member(10, 8)];
        assert_eq!(topmost(&nginx), [8]);
        assert_eq!(topmost(&[member(9, 1), member(8, 1)]), [9, 8]);
        assert_eq!(first_of(&[]), None);
    }

    #[test]
    fn the_name_of_a_process_adds_no_line() {
        let text = "Name:\ta\\nPPid:\t1\nPPid:\t7\nNSpid:\t9\t2\n";
        let status = Status::from_text(text).unwrap();
        assert_eq!((status.parent, status.depth), (7, 2));
    }
}
