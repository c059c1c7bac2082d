//! The container and the pod of a process, by the names of its cgroups.
//!
//! ```text
//! /kubepods/besteffort/pod<uid>/<id>                                                       cgroupfs driver
//! /kubepods.slice/kubepods-besteffort-pod<uid with _>.slice/cri-containerd-<id>.scope      systemd driver
//! /system.slice/docker-<id>.scope        /machine.slice/libpod-<id>.scope                  Docker, Podman
//! /<namespace>/<id>                                                                        ctr
//! ```

/// Possible ids of the process's container: names of its cgroups, innermost first.
pub fn container_ids(cgroup: &str) -> Vec<&str> {
    let paths = cgroup.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    let mut names: Vec<&str> = paths
        .flat_map(|path| path.rsplit('/').filter(|name| !name.is_empty()))
        .map(id)
        .collect();
    let mut seen = std::collections::BTreeSet::new();
    names.retain(|name| seen.insert(*name));
    names
}

/// Removes the prefix and suffix that the systemd driver adds to an id.
fn id(name: &str) -> &str {
    let name = name.strip_suffix(".scope").unwrap_or(name);
    match name.rsplit_once('-') {
        Some((_, last)) if looks_like_an_id(last) => last,
        _ => name,
    }
}

/// True for an id as containerd, CRI-O, Docker and Podman use it: 64 hexadecimal digits.
pub fn looks_like_an_id(name: &str) -> bool {
    name.len() == 64 && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// The uid of the process's pod.
pub fn pod_uid(cgroup: &str) -> Option<String> {
    let names = cgroup.lines().flat_map(|line| line.split('/'));
    names
        .filter_map(|name| {
            let name = name.strip_suffix(".slice").unwrap_or(name);
            let uid = name
                .strip_prefix("pod")
                .or_else(|| name.rsplit_once("-pod").map(|(_, uid)| uid))?;
            (uid.len() >= 32).then(|| uid.replace('_', "-"))
        })
        .next()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "2fdc5572f480c0eaa35b0b793e187da2930c2c41bef4b3d51483e5ff90038bea";

    #[test]
    fn ids_and_uids_are_found_under_both_drivers() {
        let cgroupfs =
            format!("4:memory:/kubepods/besteffort/podd3ddcaaf-0088-4d72-b57b-f31f05314446/{ID}\n");
        let systemd = format!(
            "0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-podd3ddcaaf_0088_4d72_b57b_f31f05314446.slice/cri-containerd-{ID}.scope\n"
        );
        for text in [cgroupfs, systemd] {
            assert_eq!(container_ids(&text)[0], ID);
            assert_eq!(
                pod_uid(&text).unwrap(),
                "d3ddcaaf-0088-4d72-b57b-f31f05314446"
            );
        }
        assert_eq!(
            container_ids("0::/default/web/init.scope\n"),
            ["init", "web", "default"]
        );
        assert_eq!(pod_uid("0::/system.slice/podman.service\n"), None);
    }
}
