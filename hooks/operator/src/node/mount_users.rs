//! The processes that use a mount: with an open file, or with a directory on the mount.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use bindguard_core::mount_table::MountId;
use bindguard_core::paths::lies_in;
use bindguard_sys::process_files::{ProcessFile, contents_within, inodes, links};
use serde::Serialize;

use super::processes::{Process, pids};
use crate::process_files::in_parts;

/// Limit of processes that are named.
const MAX_NAMED: usize = 5;

/// A process that uses a mount.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MountUser {
    /// Its pid.
    pub pid: u32,
    /// Its name.
    pub name: String,
}

/// The processes that use the mount with this id, at this place of a container's mount namespace
/// with this number. A file that is only mapped is not found.
pub fn users_of_mount(mount: MountId, place: &Path, namespace: u64) -> Vec<MountUser> {
    let pids = pids();
    let mut users: BTreeSet<u32> = with_open_file(mount, &pids);
    users.extend(with_directory(place, namespace, &pids));
    let named = users.into_iter().filter_map(|pid| {
        Some(MountUser {
            pid,
            name: Process::of(pid)?.command,
        })
    });
    named.take(MAX_NAMED).collect()
}

/// The kernel prints the id of the mount of each open file: proc_pid_fdinfo(5).
fn with_open_file(mount: MountId, pids: &[u32]) -> BTreeSet<u32> {
    let open_files = |pid: &u32| {
        let pid = *pid;
        let open = fs::read_dir(format!("/proc/{pid}/fdinfo"));
        let entries = open.into_iter().flatten().flatten();
        entries.map(move |entry| ProcessFile {
            pid,
            path: entry.path(),
        })
    };
    let line = format!("mnt_id:\t{}", mount.0);
    let is_on = |text: &[u8]| String::from_utf8_lossy(text).lines().any(|it| it == line);
    let mut users = BTreeSet::new();
    in_parts(pids.iter().flat_map(open_files), |files, left| {
        let texts = contents_within(left, &files);
        let open = files.iter().zip(texts);
        let open = open.filter(|(_, text)| text.as_ref().is_ok_and(|text| is_on(text)));
        users.extend(open.map(|(file, _)| file.pid));
    });
    users
}

fn with_directory(place: &Path, namespace: u64, pids: &[u32]) -> BTreeSet<u32> {
    let of_each = |name: &str| -> Vec<ProcessFile> {
        pids.iter().map(|pid| ProcessFile::of(*pid, name)).collect()
    };
    let inside = inodes(&of_each("ns/mnt"));
    let [cwd, root] = ["cwd", "root"].map(|name| links(&of_each(name)));
    let directories = cwd.into_iter().zip(root);
    let all = pids.iter().zip(inside).zip(directories);
    all.filter(|((_, inside), (cwd, root))| {
        let is_in = |link: &std::io::Result<std::path::PathBuf>| {
            link.as_ref().is_ok_and(|path| lies_in(path, place))
        };
        inside.as_ref().is_ok_and(|it| *it == namespace) && (is_in(cwd) || is_in(root))
    })
    .map(|((pid, _), _)| *pid)
    .collect()
}
