//! Texts of `/proc/PID`: the container in whose cgroup a process is, the cgroups of a container, and
//! the fields of `stat`.

use std::collections::BTreeSet;
use std::iter;

/// The outermost of these containers in whose cgroup a process is, by its `/proc/PID/cgroup`.
///
/// A part of the path is the id, or ends with it: `/kubepods/podUID/ID`,
/// `/kubepods.slice/cri-containerd-ID.scope`. A container may make its own cgroups below, and name
/// the cgroups after another container.
pub fn container_of<'c>(cgroup: &str, containers: &BTreeSet<&'c str>) -> Option<&'c str> {
    parts(cgroup).find_map(|part| ids(part).find_map(|id| containers.get(id).copied()))
}

/// The parts of the paths in all hierarchies.
fn parts(cgroup: &str) -> impl Iterator<Item = &str> {
    cgroup.lines().flat_map(|line| path_of(line).split('/'))
}

/// The cgroups of a container in all hierarchies, by the `/proc/PID/cgroup` of its init.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerCgroups(Vec<String>);

impl ContainerCgroups {
    /// The outermost cgroup with the container's id in each hierarchy. `None` if there is none.
    pub fn of_init(cgroup: &str, container: &str) -> Option<Self> {
        let mut found = Vec::new();
        for line in cgroup.lines() {
            let path = path_of(line);
            let mut end = line.len() - path.len();
            for part in path.split('/') {
                end += part.len();
                if ids(part).any(|id| id == container) {
                    found.push(line[..end].to_owned());
                    break;
                }
                end += 1;
            }
        }
        (!found.is_empty()).then_some(Self(found))
    }

    /// The controllers and the path of the cgroup in each hierarchy; no controller for cgroup v2.
    pub fn hierarchies(&self) -> Vec<(&str, &str)> {
        let mut hierarchies = Vec::new();
        for line in &self.0 {
            let controllers = line.split(':').nth(1).unwrap_or_default();
            hierarchies.push((controllers, path_of(line)));
        }
        hierarchies
    }

    /// True for a process in a cgroup of the container, or below. Another container may name a
    /// cgroup of its own after this container, so the whole path is compared.
    pub fn contain(&self, cgroup: &str) -> bool {
        let is_inside = |line: &str| {
            self.0.iter().any(|outer| {
                let rest = line.strip_prefix(outer.as_str());
                rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
            })
        };
        cgroup.lines().any(is_inside)
    }
}

/// The name of the pod's cgroup, by the `/proc/PID/cgroup` of a process: `podUID`,
/// `kubepods-burstable-podUID.slice`. `None` for a process of no pod.
pub fn pod_of(cgroup: &str) -> Option<&str> {
    parts(cgroup).find(|part| part.starts_with("pod") || part.contains("-pod"))
}

/// The lines of `/proc/PID/cgroup` of a process of this container, without the cgroups that the
/// container made. `None` if the process is not in a cgroup of the container.
pub fn cgroup_of_container(cgroup: &str, container: &str) -> Option<String> {
    ContainerCgroups::of_init(cgroup, container).map(|cgroups| cgroups.0.join("\n"))
}

/// The path of a line `HIERARCHY:CONTROLLERS:PATH`.
fn path_of(line: &str) -> &str {
    line.splitn(3, ':').nth(2).unwrap_or_default()
}

/// The ids that a part of a path may name.
fn ids(part: &str) -> impl Iterator<Item = &str> {
    part.split(':').flat_map(|part| {
        let part = part.strip_suffix(".scope").unwrap_or(part);
        let after_dashes = part.match_indices('-').map(|(dash, _)| &part[dash + 1..]);
        iter::once(part).chain(after_dashes)
    })
}

/// A field's number in proc_pid_stat(5).
pub const PARENT: usize = 4;

/// The time of the start, in the kernel's ticks since the boot.
pub const START_TIME: usize = 22;

/// A field as a number, from the third on. `None` if the text has no such field, or if the field is
/// no number.
pub fn number(stat: &str, field: usize) -> Option<u64> {
    // The program's name in parentheses may have spaces and parentheses itself.
    let (_, from_third) = stat.rsplit_once(") ")?;
    let after = field.checked_sub(3)?;
    from_third.split_whitespace().nth(after)?.parse().ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::*;

    #[test]
    fn a_cgroup_names_its_container() {
        let containers = BTreeSet::from(["abc", "my-app", "outer"]);
        for (cgroup, expected) in [
            ("0::/kubepods/besteffort/podu-1/abc", Some("abc")),
            (
                "0::/kubepods.slice/kubepods-podu.slice/cri-containerd-abc.scope",
                Some("abc"),
            ),
            ("12:pids:/system.slice/docker-abc.scope/init", Some("abc")),
            ("0::/machine.slice/libpod-abc.scope/container", Some("abc")),
            ("2:cpu:/\n1:name=systemd:/default/my-app\n", Some("my-app")),
            ("0::/system.slice/docker-my-app.scope", Some("my-app")),
            ("0::/docker/outer/docker/abc", Some("outer")),
            ("0::/docker/outer/docker/unknown", Some("outer")),
            ("0::/kubepods/abcd", None),
            ("0::/kubepods/xabc", None),
            ("0::/podabc/other", None),
            ("2:abc:/other", None),
            ("0::/system.slice:docker:abc", Some("abc")),
            ("0::/", None),
        ] {
            assert_eq!(container_of(cgroup, &containers), expected, "{cgroup}");
        }
    }

    #[test]
    fn a_cgroup_names_its_pod() {
        for (cgroup, expected) in [
            ("0::/kubepods/burstable/podu-1/abc/podu-2", Some("podu-1")),
            (
                "0::/kubepods.slice/kubepods-podu.slice/cri-containerd-abc.scope",
                Some("kubepods-podu.slice"),
            ),
            ("2:cpu:/\n1:name=systemd:/kubepods/podu/abc\n", Some("podu")),
            ("0::/machine.slice/libpod-abc.scope", None),
        ] {
            assert_eq!(pod_of(cgroup), expected, "{cgroup}");
        }
    }

    #[test]
    fn the_cgroups_that_a_container_made_are_left_out() {
        let of = |cgroup| cgroup_of_container(cgroup, "abc");
        let made = "2:cpu:/docker/abc/one\n0::/system.slice/docker-abc.scope/pod-b";
        let own = "2:cpu:/docker/abc\n0::/system.slice/docker-abc.scope";
        assert_eq!(of(made).as_deref(), Some(own));
        assert_eq!(of(own).as_deref(), Some(own));
        assert_eq!(of("0::/docker/other"), None);
    }

    #[test]
    fn a_cgroup_of_another_container_with_the_id_is_not_of_the_container() {
        let init = "2:cpu:/pods/abc/init\n1:name=systemd:/pods/abc\n0::/\n";
        let cgroups = ContainerCgroups::of_init(init, "abc").unwrap();
        for (cgroup, expected) in [
            ("2:cpu:/pods/abc", true),
            ("1:name=systemd:/pods/abc/worker", true),
            ("2:cpu:/pods/abcd", false),
            ("2:cpu:/pods/conmon-abc.scope", false),
            ("2:cpu:/pods/hostile/abc", false),
            ("2:cpu:/pods/hostile/pods/abc", false),
            ("0::/", false),
        ] {
            assert_eq!(cgroups.contain(cgroup), expected, "{cgroup}");
        }
        assert_eq!(ContainerCgroups::of_init(init, "other"), None);
    }
}

#[cfg(test)]
mod stat_tests {
    use super::*;

    #[test]
    fn a_name_with_parentheses_moves_no_field() {
        let stat = "7 (a) b (c) S 1 7 7 0 -1 4194560 0 0 0 0 0 0 0 0 20 0 1 0 123456 0\n";
        assert_eq!(number(stat, PARENT), Some(1));
        assert_eq!(number(stat, START_TIME), Some(123_456));
        assert_eq!(number(stat, 3), None);
        assert_eq!(number(stat, 2), None);
        assert_eq!(number("7 (cut", PARENT), None);
    }
}
