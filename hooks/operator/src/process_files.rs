//! The processes of a `/proc`, their containers, and their open files, some at a time: a process may have a million of
//! them, and a container decides how many.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::Path;
use std::time::{Duration, Instant};
use std::{fs, io};

use bindguard_sys::process_files::ProcessFile;
use rustix::io::Errno;

/// Limit of files that are in memory at a time.
const MAX_FILES: usize = 64 << 10;

/// Time limit for all files.
const FILES_TIMEOUT: Duration = Duration::from_secs(10);

/// The pids in a `/proc`, sorted.
pub fn pids_in(proc: &Path) -> io::Result<Vec<u32>> {
    let mut pids = Vec::new();
    for entry in fs::read_dir(proc)? {
        let name = entry?.file_name();
        pids.extend(name.to_str().and_then(|name| name.parse::<u32>().ok()));
    }
    pids.sort_unstable();
    Ok(pids)
}

/// The files in a folder of a process: `fd` or `fdinfo`.
pub fn open_files(proc: &Path, pid: u32, folder: &str) -> impl Iterator<Item = ProcessFile> {
    let entries = fs::read_dir(proc.join(pid.to_string()).join(folder));
    let entries = entries.into_iter().flatten().flatten();
    entries.map(move |entry| ProcessFile {
        pid,
        path: entry.path(),
    })
}

/// Hands over all files, at most [`MAX_FILES`] at a time, with the time that is left to read them.
pub fn in_parts(
    mut files: impl Iterator<Item = ProcessFile>,
    mut read: impl FnMut(Vec<ProcessFile>, Duration),
) {
    let start = Instant::now();
    loop {
        let part: Vec<ProcessFile> = files.by_ref().take(MAX_FILES).collect();
        if part.is_empty() {
            return;
        }
        read(part, FILES_TIMEOUT.saturating_sub(start.elapsed()));
    }
}

/// A process that ended: ENOENT when its folder is gone, ESRCH when only its insides are.
pub(crate) fn is_gone(error: &io::Error) -> bool {
    matches!(
        Errno::from_io_error(error),
        Some(Errno::NOENT | Errno::SRCH)
    ) || error.kind() == ErrorKind::NotFound
}

// The container and the pod of a process, by the names of its cgroups.
//
// ```text
// /kubepods/besteffort/pod<uid>/<id>                                                       cgroupfs driver
// /kubepods.slice/kubepods-besteffort-pod<uid with _>.slice/cri-containerd-<id>.scope      systemd driver
// /system.slice/docker-<id>.scope        /machine.slice/libpod-<id>.scope                  Docker, Podman
// /<namespace>/<id>                                                                        ctr
// ```

/// Possible ids of the process's container: names of its cgroups, innermost first.
pub fn container_ids(cgroup: &str) -> Vec<&str> {
    let (mut ids, mut seen) = (Vec::new(), BTreeSet::new());
    for path in cgroup.lines().filter_map(|line| line.splitn(3, ':').nth(2)) {
        for name in path.rsplit('/').filter(|name| !name.is_empty()) {
            // The systemd driver adds a prefix and a suffix to an id.
            let name = name.strip_suffix(".scope").unwrap_or(name);
            let id = match name.rsplit_once('-') {
                Some((_, last)) if looks_like_an_id(last) => last,
                _ => name,
            };
            if seen.insert(id) {
                ids.push(id);
            }
        }
    }
    ids
}

/// True for an id as containerd, CRI-O, Docker and Podman use it: 64 hexadecimal digits.
pub fn looks_like_an_id(name: &str) -> bool {
    name.len() == 64 && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// The uid of the process's pod.
pub fn pod_uid(cgroup: &str) -> Option<String> {
    let mut names = cgroup.lines().flat_map(|line| line.split('/'));
    names.find_map(|name| {
        let name = name.strip_suffix(".slice").unwrap_or(name);
        let of_systemd = || Some(name.rsplit_once("-pod")?.1);
        let uid = name.strip_prefix("pod").or_else(of_systemd)?;
        (uid.len() >= 32).then(|| uid.replace('_', "-"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_with_many_descriptors_is_read_in_parts() {
        let files = (0..=2 * MAX_FILES).map(|fd| ProcessFile::of(1, &format!("fd/{fd}")));
        let mut parts = Vec::new();
        in_parts(files, |part, left| {
            assert!(left <= FILES_TIMEOUT);
            parts.push(part.len());
        });
        assert_eq!(parts, [MAX_FILES, MAX_FILES, 1]);
    }
}

#[cfg(test)]
mod cgroup_tests {
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
