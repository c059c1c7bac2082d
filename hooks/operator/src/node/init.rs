//! The init process of a container, by the container's id.

use std::collections::BTreeMap;
use std::fs;

use super::processes::pids;

/// The pid of a container's init: of the processes in a cgroup with the container's id, the one that started first.
///
/// Every runtime names a container's cgroup after its id, and no record of a runtime has to be found. `None` if no process
/// is in it.
pub fn init_of(container: &str) -> Option<u32> {
    inits_of([container]).remove(container)
}

/// The same for many containers, with one pass over the processes.
pub fn inits_of<'c>(containers: impl IntoIterator<Item = &'c str>) -> BTreeMap<&'c str, u32> {
    let containers: Vec<&str> = containers.into_iter().filter(|container| !container.is_empty()).collect();
    let mut oldest = BTreeMap::<&str, (u64, u32)>::new();
    for pid in pids() {
        let cgroup = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        let is_its = |container: &&&str| cgroup.lines().any(|line| names(line, container));
        let Some(container) = containers.iter().find(is_its) else { continue };
        if let Some(started) = started(pid) {
            let first = oldest.entry(container).or_insert((started, pid));
            *first = (*first).min((started, pid));
        }
    }
    oldest.into_iter().map(|(container, (_, pid))| (container, pid)).collect()
}

/// True if a part of a cgroup's path is the id, or ends with it: `/kubepods/podUID/ID`, `/kubepods.slice/cri-containerd-ID.scope`.
/// A container may make cgroups of its own below.
fn names(line: &str, container: &str) -> bool {
    line.split(['/', ':']).any(|part| {
        let part = part.strip_suffix(".scope").unwrap_or(part);
        part.strip_suffix(container).is_some_and(|before| before.is_empty() || before.ends_with(['-', ':']))
    })
}

/// The time at which a process started, in the kernel's ticks since boot: field 22 of proc_pid_stat(5).
fn started(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may have spaces and parentheses itself.
    let (_, after_name) = stat.rsplit_once(") ")?;
    after_name.split(' ').nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cgroup_names_its_container() {
        for line in [
            "0::/kubepods/besteffort/podu-1/abc",
            "0::/kubepods.slice/kubepods-podu.slice/cri-containerd-abc.scope",
            "12:pids:/system.slice/docker-abc.scope/init",
            "0::/machine.slice/libpod-abc.scope/container",
        ] {
            assert!(names(line, "abc"), "{line}");
        }
        for line in ["0::/kubepods/abcd", "0::/kubepods/xabc", "0::/", "0::/podabc/other"] {
            assert!(!names(line, "abc"), "{line}");
        }
    }

    #[test]
    fn a_process_has_a_time_and_no_container_has_none() {
        assert!(started(std::process::id()).is_some());
        assert_eq!(init_of(""), None);
        assert_eq!(init_of("no-such-container"), None);
    }
}
