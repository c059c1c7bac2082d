//! The init process of a container, by the container's id.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::iter;

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
    let containers: BTreeSet<&str> = containers.into_iter().filter(|container| !container.is_empty()).collect();
    let mut oldest = BTreeMap::<&str, (u64, u32)>::new();
    for pid in pids() {
        let cgroup = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        let Some(container) = container_of(&cgroup, &containers) else { continue };
        if let Some(started) = started(pid) {
            let first = oldest.entry(container).or_insert((started, pid));
            *first = (*first).min((started, pid));
        }
    }
    oldest.into_iter().map(|(container, (_, pid))| (container, pid)).collect()
}

/// The outermost of these containers in whose cgroup a process is, by its `/proc/PID/cgroup`.
///
/// A part of the path is the id, or ends with it: `/kubepods/podUID/ID`, `/kubepods.slice/cri-containerd-ID.scope`. A container may
/// make cgroups of its own below, and name them after another container.
fn container_of<'c>(cgroup: &str, containers: &BTreeSet<&'c str>) -> Option<&'c str> {
    cgroup.lines().flat_map(|line| line.split(['/', ':'])).find_map(|part| {
        let part = part.strip_suffix(".scope").unwrap_or(part);
        let after_dashes = part.match_indices('-').map(|(dash, _)| &part[dash + 1..]);
        iter::once(part).chain(after_dashes).find_map(|id| containers.get(id).copied())
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
        let containers = BTreeSet::from(["abc", "my-app", "outer"]);
        for (cgroup, expected) in [
            ("0::/kubepods/besteffort/podu-1/abc", Some("abc")),
            ("0::/kubepods.slice/kubepods-podu.slice/cri-containerd-abc.scope", Some("abc")),
            ("12:pids:/system.slice/docker-abc.scope/init", Some("abc")),
            ("0::/machine.slice/libpod-abc.scope/container", Some("abc")),
            ("2:cpu:/\n1:name=systemd:/default/my-app\n", Some("my-app")),
            ("0::/system.slice/docker-my-app.scope", Some("my-app")),
            ("0::/docker/outer/docker/abc", Some("outer")),
            ("0::/docker/outer/docker/unknown", Some("outer")),
            ("0::/kubepods/abcd", None),
            ("0::/kubepods/xabc", None),
            ("0::/podabc/other", None),
            ("0::/", None),
        ] {
            assert_eq!(container_of(cgroup, &containers), expected, "{cgroup}");
        }
    }

    #[test]
    fn a_process_has_a_time_and_no_container_has_none() {
        assert!(started(std::process::id()).is_some());
        assert_eq!(init_of(""), None);
        assert_eq!(init_of("no-such-container"), None);
    }
}
