//! The container in whose cgroup a process is.

use std::collections::BTreeSet;
use std::iter;

/// The outermost of these containers in whose cgroup a process is, by its `/proc/PID/cgroup`.
///
/// A part of the path is the id, or ends with it: `/kubepods/podUID/ID`,
/// `/kubepods.slice/cri-containerd-ID.scope`. A container may make cgroups of its own below, and
/// name them after another container.
pub fn container_of<'c>(cgroup: &str, containers: &BTreeSet<&'c str>) -> Option<&'c str> {
    cgroup
        .lines()
        .flat_map(|line| line.split(['/', ':']))
        .find_map(|part| {
            let part = part.strip_suffix(".scope").unwrap_or(part);
            let after_dashes = part.match_indices('-').map(|(dash, _)| &part[dash + 1..]);
            iter::once(part)
                .chain(after_dashes)
                .find_map(|id| containers.get(id).copied())
        })
}

#[cfg(test)]
mod tests {
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
            ("0::/", None),
        ] {
            assert_eq!(container_of(cgroup, &containers), expected, "{cgroup}");
        }
    }
}
