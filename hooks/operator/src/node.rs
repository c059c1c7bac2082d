//! The processes of a node: their names, users and open files, and the containers of their cgroups.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{fs, io};

use anyhow::{Context, ensure};
use bindguard_core::evidence::Observed;
use bindguard_core::identity::{PARENT, stat_number};
use bindguard_core::mount_table::MountId;
use bindguard_core::spec::IdMap;
use bindguard_core::text::lies_in;
use bindguard_sys::enter::HeldProcess;
use bindguard_sys::process_files::{
    ProcessFile, arguments_of, contents, contents_within, inodes, links, links_within,
};
use rustix::io::Errno;
use serde::Serialize;

const PROC: &str = "/proc";

/// True if the process is root, and so may read everything.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// The text of a small kernel file, such as a sysctl.
pub fn setting(path: &Path) -> Observed<String> {
    match fs::read_to_string(path) {
        Ok(text) => Observed::Seen(text),
        Err(error) if error.kind() == ErrorKind::NotFound => Observed::Absent,
        Err(error) => Observed::Unreadable(format!("read {}: {error}", path.display())),
    }
}

// The processes that use a mount: with an open file, or with a directory on the mount.

/// Limit of processes that are named.
const MAX_NAMED: usize = 5;

/// The processes that use the mount with this id, at this place of a container's mount namespace
/// with this number. A file that is only mapped is not found.
pub fn users_of_mount(mount: MountId, place: &Path, namespace: u64) -> Vec<Process> {
    let pids = pids();
    let mut users = BTreeSet::new();
    // The kernel prints the id of the mount of each open file: proc_pid_fdinfo(5).
    let line = format!("mnt_id:\t{}", mount.0);
    let open = open_files(Path::new(PROC), &pids, "fdinfo");
    read_in_parts(open, contents_within, |file, text| {
        if String::from_utf8_lossy(&text).lines().any(|it| it == line) {
            users.insert(file.pid);
        }
    });
    let inside = inodes(&of_each(&pids, "ns/mnt"));
    for name in ["cwd", "root"] {
        let directories = links(&of_each(&pids, name));
        for ((pid, inside), directory) in pids.iter().zip(&inside).zip(directories) {
            let is_in = directory.is_ok_and(|path| lies_in(&path, place));
            if is_in && matches!(inside, Ok(number) if *number == namespace) {
                users.insert(*pid);
            }
        }
    }
    let named = users.into_iter().filter_map(Process::of);
    named.take(MAX_NAMED).collect()
}

// The mount namespace of a container's runtime, which a command must share.
//
// A runtime binds the mounts of its own namespace. A debug pod, or a service with private mounts,
// has copies of these mounts, and may lack a mount of the node. A command in such a namespace would
// compare a container with the wrong mounts, so the command refuses to run. The agent enters the
// namespace of the runtime instead.

/// Checks that this process has the mount namespace of the process that supervises the container:
/// the parent of the container's init, a shim or conmon.
///
/// # Errors
/// If the namespaces differ, or the parent's cannot be read.
pub fn refuse_other_mounts(init: &HeldProcess) -> anyhow::Result<()> {
    let pid = init.pid();
    let stat = only(contents(&[ProcessFile::of(pid, "stat")]));
    let parent = stat.and_then(|stat| {
        let parent = stat_number(&String::from_utf8_lossy(&stat), PARENT);
        let parent = parent.and_then(|parent| u32::try_from(parent).ok());
        parent.ok_or_else(|| ErrorKind::InvalidData.into())
    });
    let parent = parent
        .with_context(|| format!("find the parent of process {pid}, the container's init"))?;
    let mounts = only(inodes(&[ProcessFile::of(parent, "ns/mnt")])).with_context(|| {
        format!("read the mount namespace of process {parent}, the container's runtime")
    })?;
    ensure!(
        Some(mounts) == namespace("mnt"),
        "this command is in another mount namespace than the container's runtime; run it as nsenter --target {parent} --mount bindguard"
    );
    Ok(())
}

/// The answer for the only file.
fn only<A>(mut answers: Vec<io::Result<A>>) -> io::Result<A> {
    answers
        .pop()
        .unwrap_or_else(|| Err(ErrorKind::NotFound.into()))
}

// Processes of the reader's own mount namespace: daemons of this node, and of no container.

#[derive(Debug, Serialize)]
pub struct Process {
    pub pid: u32,
    /// The process's `comm`, at most 15 bytes.
    #[serde(rename = "name")]
    pub command: String,
    /// The text of its `/proc/PID/cgroup`.
    #[serde(skip)]
    pub cgroup: String,
}

impl Process {
    fn of(pid: u32) -> Option<Self> {
        let text = |name| fs::read_to_string(file(pid, name)).ok();
        Some(Self {
            pid,
            command: text("comm")?.trim_end().to_owned(),
            cgroup: text("cgroup")?,
        })
    }
}

/// Root's processes with this name in the reader's own mount namespace.
pub fn processes_named(name: &str) -> Vec<Process> {
    let named = root_pids_named(name);
    let own = namespace("mnt");
    let mounts = inodes(&of_each(&named, "ns/mnt"));
    let mut found = Vec::new();
    for (pid, mounts) in named.into_iter().zip(mounts) {
        if own.is_some() && mounts.ok() == own {
            found.extend(Process::of(pid));
        }
    }
    found
}

/// The pids of root's processes with this name, of containers too. Any user can give a process any
/// name.
pub fn root_pids_named(name: &str) -> Vec<u32> {
    let mut named = pids_named(name);
    named.retain(|pid| uid_of(*pid) == Some(0));
    let users = inodes(&of_each(&named, "ns/user"));
    let programs = links(&of_each(&named, "exe"));
    let own = namespace("user");
    let mut found = Vec::new();
    for ((pid, users), program) in named.into_iter().zip(users).zip(programs) {
        let program = program.unwrap_or_default();
        let program = program.file_name().unwrap_or_default().to_string_lossy();
        // A user can start a program of root's that changes its user, such as sudo, by a symlink of
        // any name. k3s is a single program with many names.
        let may_have_name = program.contains(name) || program == "k3s";
        // root of another user namespace is a user
        if own.is_some() && users.ok() == own && may_have_name {
            found.push(pid);
        }
    }
    found
}

/// The user of a process; `None` if its ids differ, as those of a program that changes its user.
pub fn uid_of(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(file(pid, "status")).ok()?;
    let mut uids = uids_in(&status);
    let first = uids.next()?;
    uids.all(|uid| uid == first).then_some(first.parse().ok()?)
}

/// True if a process is root of the host, or may become that: its user namespace maps the user, as
/// the initial user namespace does. False for a thread of the kernel, and a process that ended.
pub fn may_become_root(pid: u32) -> bool {
    let (map, status) = (file(pid, "uid_map"), file(pid, "status"));
    let (map, status) = match (fs::read_to_string(map), fs::read_to_string(status)) {
        (Ok(map), Ok(status)) => (map, status),
        (Err(error), _) | (_, Err(error)) => return !is_gone(&error),
    };
    // The kernel's own threads, and processes that end, have no memory.
    if !status.lines().any(|line| line.starts_with("VmSize:")) {
        return false;
    }
    let mut uids = uids_in(&status).peekable();
    IdMap::from_proc(&map).is_none_or(|map| map.has_root_of_host())
        || uids.peek().is_none()
        || uids.any(|uid| uid == "0")
}

fn uids_in(status: &str) -> impl Iterator<Item = &str> {
    let uids = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    uids.unwrap_or_default().split_whitespace()
}

/// The start arguments of each process of root named `name`. A process that gives no answer is left out.
pub fn arguments_of_processes(name: &str) -> Vec<Vec<String>> {
    let processes = processes_named(name);
    let pids: Vec<u32> = processes.iter().map(|process| process.pid).collect();
    arguments_of(&pids).into_iter().flatten().collect()
}

/// The processes, of containers too, that have this file open.
pub fn with_open(path: &Path) -> Vec<Process> {
    let mut found = BTreeSet::new();
    let pids = pids();
    let open = open_files(Path::new(PROC), &pids, "fd");
    read_in_parts(open, links_within, |file, link| {
        if link == path {
            found.insert(file.pid);
        }
    });
    found.into_iter().filter_map(Process::of).collect()
}

pub(crate) fn namespace(kind: &str) -> Option<u64> {
    let metadata = fs::metadata(format!("/proc/thread-self/ns/{kind}"));
    metadata.ok().map(|metadata| metadata.ino())
}

fn of_each(pids: &[u32], name: &str) -> Vec<ProcessFile> {
    pids.iter().map(|pid| ProcessFile::of(*pid, name)).collect()
}

/// The pids of all processes with this name, of containers and of any user.
pub fn pids_named(name: &str) -> Vec<u32> {
    let mut pids = pids();
    pids.retain(|pid| {
        fs::read_to_string(file(*pid, "comm")).is_ok_and(|comm| comm.trim_end() == name)
    });
    pids
}

/// The pids of all processes.
pub fn pids() -> Vec<u32> {
    pids_in(Path::new(PROC)).unwrap_or_default()
}

fn file(pid: u32, name: &str) -> PathBuf {
    Path::new(PROC).join(pid.to_string()).join(name)
}

// The open files of processes, some at a time: a process may have a million of them, and a container
// decides how many.

/// Limit of files that are in memory at a time.
const MAX_FILES: usize = 64 << 10;

/// Time limit for all files.
const FILES_TIMEOUT: Duration = Duration::from_secs(10);

/// The pids in a `/proc`, sorted.
pub(crate) fn pids_in(proc: &Path) -> io::Result<Vec<u32>> {
    let mut pids = Vec::new();
    for entry in fs::read_dir(proc)? {
        let name = entry?.file_name();
        pids.extend(name.to_str().and_then(|name| name.parse::<u32>().ok()));
    }
    pids.sort_unstable();
    Ok(pids)
}

/// The files in a folder of each process: `fd` or `fdinfo`.
pub(crate) fn open_files(
    proc: &Path,
    pids: &[u32],
    folder: &str,
) -> impl Iterator<Item = ProcessFile> {
    pids.iter().flat_map(move |pid| {
        let entries = fs::read_dir(proc.join(pid.to_string()).join(folder));
        let entries = entries.into_iter().flatten().flatten();
        entries.map(|entry| ProcessFile {
            pid: *pid,
            path: entry.path(),
        })
    })
}

/// Reads all files within [`FILES_TIMEOUT`], at most [`MAX_FILES`] at a time.
pub(crate) fn read_in_parts<A>(
    mut files: impl Iterator<Item = ProcessFile>,
    mut read: impl FnMut(Duration, &[ProcessFile]) -> Vec<io::Result<A>>,
    mut found: impl FnMut(ProcessFile, A),
) {
    let start = Instant::now();
    loop {
        let part: Vec<ProcessFile> = files.by_ref().take(MAX_FILES).collect();
        if part.is_empty() {
            return;
        }
        let answers = read(FILES_TIMEOUT.saturating_sub(start.elapsed()), &part);
        for (file, answer) in part.into_iter().zip(answers) {
            if let Ok(answer) = answer {
                found(file, answer);
            }
        }
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
pub(crate) fn looks_like_an_id(name: &str) -> bool {
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
mod processes_tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::os::unix::process::CommandExt;
    use std::process::{Child, Command};
    use std::thread::yield_now;

    use super::*;

    const NAME: &str = "bg-named";
    const USER: u32 = 65534;

    /// Starts a process, and waits until it has the name.
    fn named(command: &mut Command) -> Child {
        let child = command.spawn().unwrap();
        while fs::read_to_string(file(child.id(), "comm")).unwrap().trim() != NAME {
            yield_now();
        }
        child
    }

    /// A user chooses the name of a process, also for a program of root's that changes its user.
    #[test]
    fn only_root_gives_a_process_the_name_of_a_daemon() {
        if !is_root() {
            eprintln!("SKIPPED: not root");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let (program, other) = (folder.path().join(NAME), folder.path().join("other"));
        // cp is a separate process: a program that a child has open for writing cannot be run
        for copy in [&program, &other] {
            let copied = Command::new("cp").arg("/bin/sleep").arg(copy).status();
            assert!(copied.unwrap().success());
        }
        fs::set_permissions(&other, fs::Permissions::from_mode(0o4755)).unwrap();
        fs::create_dir(folder.path().join("links")).unwrap();
        let link = folder.path().join("links").join(NAME);
        symlink(&other, &link).unwrap();
        let sleep = |program: &Path| {
            let mut command = Command::new(program);
            command.arg("1000");
            command
        };
        let mut in_user_namespace = Command::new("unshare");
        in_user_namespace
            .args(["--user", "--map-root-user"])
            .arg(&program)
            .arg("1000");
        let mut processes = vec![
            named(&mut sleep(&program)),
            named(sleep(&program).uid(USER)),
            named(sleep(&link).uid(USER)),
            named(&mut sleep(&link)),
        ];
        let mut in_user_namespace = in_user_namespace.spawn().unwrap();
        // a machine may refuse user namespaces
        while in_user_namespace.try_wait().unwrap().is_none() {
            if fs::read_to_string(file(in_user_namespace.id(), "comm"))
                .unwrap()
                .trim()
                == NAME
            {
                break;
            }
            yield_now();
        }
        processes.push(in_user_namespace);
        let found = root_pids_named(NAME);
        for process in &mut processes {
            process.kill().unwrap();
            process.wait().unwrap();
        }
        assert_eq!(found, [processes[0].id()]);
    }
}

#[cfg(test)]
mod files_tests {
    use super::*;

    #[test]
    fn a_process_with_many_descriptors_is_read_in_parts() {
        let files = (0..=2 * MAX_FILES).map(|fd| ProcessFile::of(1, &format!("fd/{fd}")));
        let mut parts = Vec::new();
        let read = |left, part: &[ProcessFile]| {
            assert!(left <= FILES_TIMEOUT);
            parts.push(part.len());
            part.iter().map(|_| Ok(())).collect()
        };
        let mut count = 0;
        read_in_parts(files, read, |_, ()| count += 1);
        assert_eq!(count, 2 * MAX_FILES + 1);
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
