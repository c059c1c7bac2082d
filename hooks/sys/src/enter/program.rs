//! The process of a container that runs a program, for a signal.
//!
//! A process belongs to the container if its cgroup does, and if it has as many pids as the
//! container's init. A container within the container has a pid namespace, and so an additional
//! pid. The pid namespace alone is not enough: pods share a pid namespace, or have the host's.
//!
//! The workers of nginx run the program of their parent, the master: a process whose parent runs the
//! same program does not count. If several processes remain, the oldest process counts.
//!
//! The container's cgroup lists the processes, so other containers cost nothing. A container that
//! forks all the time costs the time limit.
//!
//! Between a look and a signal, the process may end, and its pid may be reused. So the process is
//! opened first, and cgroup and program are compared again through the pidfd. A process that blocks
//! the reader of its `exe` is left out.

use std::collections::HashSet;
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Instant;
use std::{fs, io};

use bindguard_core::process::{ContainerCgroups, START_TIME, number};
use bindguard_core::refresh_request::ProgramName;

use crate::enter::process::HeldProcess;
use crate::enter::process::ProcessError;
use crate::process_files::{ProcessFile, contents_within, links_within};

/// The mount points of cgroup v2, alone and beside cgroup v1.
const UNIFIED: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];

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
    /// [`ProcessError::NoProgram`] if there is none, [`ProcessError::TooManyProcesses`] if not all
    /// are known at this time, and [`ProcessError::NoContainer`].
    pub fn running(&self, program: &ProgramName, until: Instant) -> Result<Self, ProcessError> {
        let container = self.container.as_deref();
        let container = container.ok_or(ProcessError::NoContainer(self.pid()))?;
        let depth = Status::of(self.pid())
            .ok_or(ProcessError::Ended(self.pid()))?
            .depth;
        let cgroup = self.read("cgroup")?;
        let cgroups = ContainerCgroups::of_init(&String::from_utf8_lossy(&cgroup), container)
            .ok_or(ProcessError::NoContainer(self.pid()))?;
        let too_many = || ProcessError::TooManyProcesses(program.as_str().to_owned());
        for _ in 0..MAX_LOOKS {
            let pids = match self.listed(&cgroups, until) {
                Some(pids) => pids,
                None => all_pids(),
            };
            let mut members = Vec::new();
            for pid in pids {
                if Instant::now() >= until {
                    return Err(too_many());
                }
                members.extend(member(pid, &cgroups, depth));
            }
            let found = first_of(&topmost(&running(&members, program, until)), until);
            if Instant::now() >= until {
                return Err(too_many());
            }
            let Some(pid) = found else {
                break;
            };
            let found = match Self::open(pid) {
                Err(ProcessError::Ended(_)) => continue,
                found => found?,
            };
            let name = found.program_name();
            let runs_program = name.is_ok_and(|name| program.is_program(&name));
            // Still alive afterwards: the pid was not reused when its cgroup was read.
            if runs_program && member(pid, &cgroups, depth).is_some() && found.is_alive() {
                return Ok(found);
            }
        }
        Err(ProcessError::NoProgram(program.as_str().to_owned()))
    }

    /// The pids that the container's cgroup and the cgroups below list; not all of them if the time
    /// ends. `None` if no hierarchy is found that lists the init.
    fn listed(&self, cgroups: &ContainerCgroups, until: Instant) -> Option<Vec<u32>> {
        for (controllers, path) in cgroups.hierarchies() {
            let mut folders = Vec::new();
            if controllers.is_empty() {
                folders.extend(UNIFIED.map(|root| format!("{root}{path}")));
            } else {
                let name = controllers.strip_prefix("name=").unwrap_or(controllers);
                folders.push(format!("/sys/fs/cgroup/{name}{path}"));
            }
            for folder in folders {
                if let Ok(pids) = pids_in(folder.into(), until)
                    && (pids.contains(&self.pid()) || Instant::now() >= until)
                {
                    return Some(pids);
                }
            }
        }
        None
    }
}

/// The pids in a cgroup and in the cgroups below, as far as they are read until this time.
///
/// # Errors
/// If the cgroup is not there.
fn pids_in(folder: PathBuf, until: Instant) -> io::Result<Vec<u32>> {
    let mut text = read_pids(&folder, until)?;
    let mut folders = vec![folder];
    while let Some(folder) = folders.pop() {
        // A cgroup may be removed meanwhile.
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            if Instant::now() >= until {
                break;
            }
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                // A threaded cgroup of cgroup v2 has no list: its processes are listed above.
                text.extend(read_pids(&entry.path(), until).unwrap_or_default());
                folders.push(entry.path());
            }
        }
    }
    let text = String::from_utf8_lossy(&text);
    Ok(text.lines().filter_map(|pid| pid.parse().ok()).collect())
}

/// While the processes of a cgroup fork, its list may have no end.
fn read_pids(folder: &Path, until: Instant) -> io::Result<Vec<u8>> {
    let mut list = File::open(folder.join("cgroup.procs"))?;
    let (mut text, mut part) = (Vec::new(), [0; 4096]);
    while Instant::now() < until {
        match list.read(&mut part)? {
            0 => break,
            size => text.extend_from_slice(&part[..size]),
        }
    }
    Ok(text)
}

fn all_pids() -> Vec<u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.collect()
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
fn running(members: &[Member], program: &ProgramName, until: Instant) -> Vec<Member> {
    let pids: Vec<u32> = members.iter().map(|member| member.pid).collect();
    let left = until.saturating_duration_since(Instant::now());
    let links = links_within(left, &ProcessFile::of_each(&pids, "exe"));
    let mut running = Vec::new();
    for (member, link) in members.iter().zip(links) {
        if let Ok(link) = link
            && program.is_program(link.file_name().unwrap_or_default().as_bytes())
        {
            running.push(*member);
        }
    }
    running
}

/// The pids of the members whose parent is no member of the list.
fn topmost(members: &[Member]) -> Vec<u32> {
    let pids: HashSet<u32> = members.iter().map(|member| member.pid).collect();
    let mut top = Vec::new();
    for member in members {
        if !pids.contains(&member.parent) {
            top.push(member.pid);
        }
    }
    top
}

/// The process that started first.
fn first_of(pids: &[u32], until: Instant) -> Option<u32> {
    if let [pid] = pids {
        return Some(*pid);
    }
    let left = until.saturating_duration_since(Instant::now());
    let mut first = None;
    let texts = contents_within(left, &ProcessFile::of_each(pids, "stat"));
    for (pid, text) in pids.iter().zip(texts) {
        let text = text.map(|text| String::from_utf8_lossy(&text).into_owned());
        if let Some(start) = text.ok().and_then(|text| number(&text, START_TIME))
            && first.is_none_or(|first| (start, *pid) < first)
        {
            first = Some((start, *pid));
        }
    }
    first.map(|(_, pid)| pid)
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
        assert_eq!(first_of(&[], Instant::now()), None);
    }

    #[test]
    fn the_name_of_a_process_adds_no_line() {
        let text = "Name:\ta\\nPPid:\t1\nPPid:\t7\nNSpid:\t9\t2\n";
        let status = Status::from_text(text).unwrap();
        assert_eq!((status.parent, status.depth), (7, 2));
    }
}
