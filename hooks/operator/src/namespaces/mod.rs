//! The mount namespaces of a machine, each read once.
//!
//! A process's namespace costs one stat(2) of `/proc/PID/ns/mnt` in a separate process, which a
//! hostile process can block. The table is read for the first process of each namespace. So five
//! hundred containers with ten processes each cost five thousand stats and five hundred reads, for
//! any number of mounts. A namespace can exist without processes: bind-mounted, as `mnt:[...]` of
//! an nsfs, or as an open descriptor of a process.

mod enter;

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::{fs, io};

use bindguard_core::error_chain;
use bindguard_core::mount_table::{MountTable, TableError};
use bindguard_sys::enter::{HeldProcess, MountNamespace};
use bindguard_sys::process_files::{ProcessFile, inodes, links_within};
use bindguard_sys::{ReadTableError, read_host_table_in_part};
use serde::Serialize;

use crate::container_cgroup::{container_ids, looks_like_an_id};
use crate::namespaces::enter::{NamespaceFile, mounts_of_namespace};
use crate::process_files::in_parts;

/// A `/proc`, and the process in it whose mounts are the reader's own.
#[derive(Debug, Clone)]
pub struct Proc {
    folder: PathBuf,
    own: &'static str,
}

/// Why the namespaces could not be read.
#[derive(Debug, thiserror::Error)]
pub enum NamespacesError {
    /// The processes could not be listed.
    #[error("list {}", path.display())]
    List {
        /// The `/proc`.
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// A file of the reader's own process could not be read.
    #[error("read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The reader's own mount table is not complete.
    #[error("parse {}", path.display())]
    Table {
        path: PathBuf,
        #[source]
        source: TableError,
    },
}

/// Why the mounts of another namespace are unknown.
#[derive(Debug, thiserror::Error)]
pub enum UnreadTable {
    /// The file of its process could not be read.
    #[error("read {}", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// It has no process, and a call for its file failed.
    #[error("{call} {}", file.display())]
    Call {
        call: &'static str,
        /// The file of the namespace.
        file: PathBuf,
        #[source]
        source: io::Error,
    },
    /// Its mount table is too large, or not complete.
    #[error(transparent)]
    Table(#[from] TableError),
    /// The tables that were read before need all the memory that is allowed.
    #[error("the mount tables of all namespaces need more than {} MiB of memory", MAX_MEMORY >> 20)]
    NoMemory,
    /// The container has its share of the namespaces and of the memory already.
    #[error(
        "{number} mount namespaces of this container are not read, beyond {MAX_OF_CONTAINER} or {} MiB",
        MAX_MEMORY_OF_CONTAINER >> 20
    )]
    LeftOut {
        /// Their number.
        number: usize,
    },
}

/// Limit of the memory for the tables of all other namespaces. Twenty services with namespaces of
/// their own, on a node with 30,000 mounts, need 240 MiB; twenty containers with full mount tables
/// need as much.
const MAX_MEMORY: usize = 256 << 20;

/// Limits for each container: its processes make namespaces and mounts as they like. A container that
/// is a node of a test cluster has some hundred containers.
const MAX_OF_CONTAINER: usize = 256;
const MAX_MEMORY_OF_CONTAINER: usize = MAX_MEMORY / 4;

/// The mount namespaces of a machine.
#[derive(Debug)]
pub struct Namespaces {
    /// The reader's own mounts. `problems` names a skipped line.
    pub own: MountTable,
    pub others: Vec<NamespaceMounts>,
    /// The numbers of processes and namespaces that were read.
    pub checked: Checked,
    /// The reasons why namespaces could not be read.
    pub problems: Vec<String>,
}

impl Default for Proc {
    /// `/proc`, and the calling thread's own mounts.
    fn default() -> Self {
        Self {
            folder: "/proc".into(),
            own: "thread-self",
        }
    }
}

impl Proc {
    /// Another `/proc`, such as the node's in a pod: the mounts of its process 1 are the reader's
    /// own.
    pub fn at(folder: PathBuf) -> Self {
        Self { folder, own: "1" }
    }

    /// Reads every mount namespace.
    ///
    /// # Errors
    /// If it is no `/proc`, or the reader's own mounts cannot be read.
    pub fn namespaces(&self) -> Result<Namespaces, NamespacesError> {
        let unreadable = |source| NamespacesError::Read {
            path: self.file(self.own, "ns/mnt"),
            source,
        };
        let own_id = self.id_of(self.own).map_err(unreadable)?;
        let (mut by_id, mut problems, mut checked) = (
            BTreeMap::<u64, Vec<u32>>::new(),
            Vec::new(),
            Checked::default(),
        );
        let pids = self.pids()?;
        checked.processes = pids.len();
        let files: Vec<ProcessFile> = pids
            .iter()
            .map(|pid| self.file_of(*pid, "ns/mnt"))
            .collect();
        for (pid, id) in pids.into_iter().zip(inodes(&files)) {
            match id {
                Ok(id) => by_id.entry(id).or_default().push(pid),
                Err(error) if is_gone(&error) => {}
                Err(error) => problems.push(self.failed(&pid.to_string(), "ns/mnt", &error)),
            }
        }
        summed_up(&mut problems);
        let lived_in = by_id.iter().filter(|(id, _)| **id != own_id);
        let mut budget = Budget::default();
        let mut others: Vec<NamespaceMounts> = lived_in
            .filter_map(|(id, pids)| self.lived_in(*id, pids, &mut budget))
            .collect();
        // Read last. Otherwise a mount that the host makes meanwhile, and that another namespace
        // copies, would look unmounted by the host.
        let own = self.table_of(self.own)?;
        if let Some(skipped) = own.skipped() {
            let path = self.file(self.own, "mountinfo");
            problems.push(format!("{}: {skipped}", path.display()));
        }
        let empty = self.without_processes(&own, &mut budget, |id| {
            id == own_id || by_id.contains_key(&id)
        });
        others.extend(empty);
        others.extend(budget.left_out.into_values());
        checked.namespaces = others.len() + 1;
        Ok(Namespaces {
            own,
            others,
            checked,
            problems,
        })
    }

    /// `None` if all of its processes ended meanwhile, or if its container has its share already.
    fn lived_in(&self, id: u64, pids: &[u32], budget: &mut Budget) -> Option<NamespaceMounts> {
        for pid in pids {
            let text = |name: &str| {
                fs::read_to_string(self.file(&pid.to_string(), name)).unwrap_or_default()
            };
            let cgroup = text("cgroup");
            let container = container_of(&cgroup);
            let held_by = HeldBy::Process {
                pid: *pid,
                command: text("comm").trim_end().to_owned(),
                cgroup: cgroup.clone(),
            };
            if budget.is_used_up(&container) {
                budget.leave_out(container, id, held_by);
                return None;
            }
            let path = self.file(&pid.to_string(), "mountinfo");
            let namespace = self.mount_namespace(*pid, id).map_err(ReadTableError::from);
            let read = namespace.and_then(|namespace| namespace.mounts(|| File::open(&path)));
            let table = match read {
                Ok(table) => Ok(table),
                Err(ReadTableError::Read(error))
                    if is_gone(&error) || error.raw_os_error() == Some(EINVAL) =>
                {
                    continue;
                }
                Err(ReadTableError::Read(source)) => Err(UnreadTable::Read { path, source }),
                Err(ReadTableError::Table(error)) => Err(error.into()),
            };
            let table = budget.add(container, table);
            return Some(NamespaceMounts {
                id,
                held_by,
                processes: pids.len(),
                table,
            });
        }
        None
    }

    /// The namespace that a process is in. This `/proc` may be of another pid namespace, where the
    /// pid belongs to another process.
    fn mount_namespace(&self, pid: u32, id: u64) -> io::Result<MountNamespace> {
        let by_pid = HeldProcess::open(pid).and_then(|process| process.mount_namespace());
        match by_pid {
            Ok(namespace) if namespace.number()? == id => Ok(namespace),
            Ok(_) | Err(_) => MountNamespace::open(&self.file_of(pid, "ns/mnt")),
        }
    }

    fn without_processes(
        &self,
        own: &MountTable,
        budget: &mut Budget,
        is_known: impl Fn(u64) -> bool,
    ) -> Vec<NamespaceMounts> {
        let mut found = BTreeMap::new();
        for entry in own
            .entries()
            .iter()
            .filter(|entry| entry.fs_type.0 == "nsfs")
        {
            if let Some(id) = entry
                .root
                .path
                .to_str()
                .and_then(namespace_id)
                .filter(|id| !is_known(*id))
            {
                let held_by = HeldBy::BindMount(entry.mount_point.clone());
                let file = NamespaceFile::BindMount(entry.mount_point.clone());
                found.entry(id).or_insert((held_by, file));
            }
        }
        let pids = self.pids().unwrap_or_default();
        let descriptors = pids.into_iter().flat_map(|pid| self.descriptors(pid));
        in_parts(descriptors, |descriptors, left| {
            let targets = links_within(left, &descriptors);
            for (descriptor, link) in descriptors.into_iter().zip(targets) {
                let pid = descriptor.pid;
                let link = link.ok();
                let id = link
                    .as_deref()
                    .and_then(Path::to_str)
                    .and_then(namespace_id);
                if let Some(id) = id.filter(|id| !is_known(*id)) {
                    let comm = fs::read_to_string(self.file(&pid.to_string(), "comm"));
                    let held_by = HeldBy::Descriptor {
                        pid,
                        command: comm.unwrap_or_default().trim_end().to_owned(),
                    };
                    let file = NamespaceFile::Descriptor(descriptor);
                    found.entry(id).or_insert((held_by, file));
                }
            }
        });
        let mut seen = Vec::new();
        for (id, (held_by, file)) in found {
            let container = match &held_by {
                HeldBy::Descriptor { pid, .. } => {
                    let cgroup = fs::read_to_string(self.file(&pid.to_string(), "cgroup"));
                    container_of(&cgroup.unwrap_or_default())
                }
                // Root of the node made the mount.
                HeldBy::BindMount(_) | HeldBy::Process { .. } => None,
            };
            if budget.is_used_up(&container) {
                budget.leave_out(container, id, held_by);
                continue;
            }
            let table = budget.add(container, mounts_of_namespace(&file));
            seen.push(NamespaceMounts {
                id,
                held_by,
                processes: 0,
                table,
            });
        }
        seen
    }

    fn file_of(&self, pid: u32, name: &str) -> ProcessFile {
        ProcessFile {
            pid,
            path: self.file(&pid.to_string(), name),
        }
    }

    fn descriptors(&self, pid: u32) -> impl Iterator<Item = ProcessFile> {
        let entries = fs::read_dir(self.file(&pid.to_string(), "fd"));
        let entries = entries.into_iter().flatten().flatten();
        entries.map(move |entry| ProcessFile {
            pid,
            path: entry.path(),
        })
    }

    fn pids(&self) -> Result<Vec<u32>, NamespacesError> {
        let unreadable = |source| NamespacesError::List {
            path: self.folder.clone(),
            source,
        };
        let entries = fs::read_dir(&self.folder).map_err(unreadable)?;
        let mut pids: Vec<u32> = entries
            .flatten()
            .filter_map(|entry| {
                entry
                    .file_name()
                    .to_str()
                    .and_then(|name| name.parse().ok())
            })
            .collect();
        pids.sort_unstable();
        Ok(pids)
    }

    /// The number of the namespace that a process is in: the inode of what its link leads to,
    /// namespaces(7).
    fn id_of(&self, pid: &str) -> io::Result<u64> {
        fs::metadata(self.file(pid, "ns/mnt")).map(|metadata| metadata.ino())
    }

    fn table_of(&self, pid: &str) -> Result<MountTable, NamespacesError> {
        let path = self.file(pid, "mountinfo");
        let read = File::open(&path)
            .map_err(ReadTableError::from)
            .and_then(read_host_table_in_part);
        read.map_err(|error| match error {
            ReadTableError::Read(source) => NamespacesError::Read { path, source },
            ReadTableError::Table(source) => NamespacesError::Table { path, source },
        })
    }

    fn file(&self, pid: &str, name: &str) -> PathBuf {
        self.folder.join(pid).join(name)
    }

    fn failed(&self, pid: &str, name: &str, error: &io::Error) -> String {
        format!("read {}: {error}", self.file(pid, name).display())
    }
}

const EINVAL: i32 = 22;

/// A process that ended: ENOENT when its folder is gone, ESRCH when only its insides are.
pub(crate) fn is_gone(error: &io::Error) -> bool {
    const ESRCH: i32 = 3;
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(ESRCH)
}

/// Reports the first of many problems, and the number of further problems.
fn summed_up(problems: &mut Vec<String>) {
    if problems.len() > 1 {
        let more = problems.len() - 1;
        problems.truncate(1);
        problems[0].push_str(&format!(" (and {more} more; run it as root)"));
    }
}

/// The cost of the tables of other namespaces.
#[derive(Debug, Default)]
struct Budget {
    memory: usize,
    /// The number of tables of each container, and their memory.
    containers: BTreeMap<String, (usize, usize)>,
    /// The first namespace of each container that is not read represents all of them.
    left_out: BTreeMap<String, NamespaceMounts>,
}

impl Budget {
    fn is_used_up(&self, container: &Option<String>) -> bool {
        let used = container.as_ref().and_then(|id| self.containers.get(id));
        used.is_some_and(|(tables, memory)| {
            *tables >= MAX_OF_CONTAINER || *memory >= MAX_MEMORY_OF_CONTAINER
        })
    }

    fn leave_out(&mut self, container: Option<String>, id: u64, held_by: HeldBy) {
        let left_out = self.left_out.entry(container.unwrap_or_default());
        let left_out = left_out.or_insert(NamespaceMounts {
            id,
            held_by,
            processes: 0,
            table: Err(UnreadTable::LeftOut { number: 0 }),
        });
        if let Err(UnreadTable::LeftOut { number }) = &mut left_out.table {
            *number += 1;
        }
    }

    fn add(
        &mut self,
        container: Option<String>,
        table: Result<MountTable, UnreadTable>,
    ) -> Result<MountTable, UnreadTable> {
        let needed = table.as_ref().map_or(0, MountTable::memory);
        if let Some(container) = container {
            let (tables, memory) = self.containers.entry(container).or_default();
            *tables += 1;
            *memory += needed;
        }
        if self.memory + needed > MAX_MEMORY {
            return Err(UnreadTable::NoMemory);
        }
        self.memory += needed;
        table
    }
}

/// The container of a process, or its cgroup if that names none; `None` outside of every cgroup, as
/// on a node without a service manager. A container's processes can make cgroups below their own.
fn container_of(cgroup: &str) -> Option<String> {
    // The names begin with the innermost.
    let mut ids = container_ids(cgroup).into_iter().rev();
    if let Some(id) = ids.find(|id| looks_like_an_id(id)) {
        return Some(id.to_owned());
    }
    let is_root = |line: &str| line.ends_with(":/");
    (!cgroup.lines().all(is_root)).then(|| cgroup.to_owned())
}

/// `mnt:[4026531841]`
fn namespace_id(link: &str) -> Option<u64> {
    link.trim_start_matches('/')
        .strip_prefix("mnt:[")?
        .strip_suffix(']')?
        .parse()
        .ok()
}

// A mount namespace with its mounts, and the holder that keeps it alive.

#[derive(Debug)]
pub struct NamespaceMounts {
    /// Its number, as in `mnt:[4026531841]`.
    pub id: u64,
    /// The holder of the namespace.
    pub held_by: HeldBy,
    /// The number of processes in it.
    pub processes: usize,
    /// Its mounts, or why they could not be read.
    pub table: Result<MountTable, UnreadTable>,
}

impl NamespaceMounts {
    /// The reason for unknown mounts, with the numbers of the namespace and of a process in the
    /// namespace.
    pub(crate) fn unread(&self) -> Option<String> {
        let why = error_chain(self.table.as_ref().err()?);
        Some(match &self.held_by {
            HeldBy::Process { pid, .. } => {
                format!("mount namespace {} of process {pid}: {why}", self.id)
            }
            HeldBy::Descriptor { .. } | HeldBy::BindMount(_) => {
                format!("mount namespace {}: {why}", self.id)
            }
        })
    }
}

/// The holder that keeps a mount namespace alive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HeldBy {
    /// The oldest process in the namespace.
    Process {
        /// Its pid in the reader's pid namespace.
        pid: u32,
        /// Its name, truncated by the kernel.
        command: String,
        /// The text of its `/proc/PID/cgroup`.
        cgroup: String,
    },
    /// No process runs in it; a process has it open.
    Descriptor { pid: u32, command: String },
    /// No process runs in it; it is bind-mounted here.
    BindMount(PathBuf),
}

/// The number of objects checked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Checked {
    /// Processes whose namespace was queried.
    pub processes: usize,
    /// Mount namespaces; the table of each was read once.
    pub namespaces: usize,
}

#[cfg(test)]
mod tests {
    use bindguard_core::places::Places;

    use super::*;
    use crate::doctor::{PointStatus, pinned};

    /// A process of a `/proc` made of plain files: hard links to the same file are the same
    /// namespace.
    fn process(proc: &Path, pid: u32, namespace: &Path, mountinfo: Option<&str>) {
        let folder = proc.join(pid.to_string());
        fs::create_dir_all(folder.join("ns")).unwrap();
        fs::hard_link(namespace, folder.join("ns/mnt")).unwrap();
        if let Some(text) = mountinfo {
            fs::write(folder.join("mountinfo"), text).unwrap();
        }
    }

    const LINE: &str = "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n";

    #[test]
    fn five_hundred_containers_are_read_once_each() {
        // Thousands of small files are a tmpfs's work.
        let proc = tempfile::tempdir_in("/dev/shm").unwrap();
        for container in 0..501u32 {
            let namespace = proc.path().join(format!("namespace-{container}"));
            fs::write(&namespace, "").unwrap();
            for process_of_it in 0..3 {
                // Only the first process has a table: a read of a later process would find no
                // table.
                let mountinfo = (process_of_it == 0).then_some(LINE);
                process(
                    proc.path(),
                    1 + container * 3 + process_of_it,
                    &namespace,
                    mountinfo,
                );
            }
        }
        let seen = Proc::at(proc.path().to_owned()).namespaces().unwrap();
        assert_eq!(
            seen.checked,
            Checked {
                processes: 1503,
                namespaces: 501
            }
        );
        assert!(
            seen.others
                .iter()
                .all(|other| other.table.is_ok() && other.processes == 3)
        );
        assert_eq!((seen.others.len(), seen.problems.len()), (500, 0));
    }

    const ID: &str = "2fdc5572f480c0eaa35b0b793e187da2930c2c41bef4b3d51483e5ff90038bea";

    /// A container can make namespaces without end, also in cgroups that it makes below its own.
    #[test]
    fn a_container_with_1500_namespaces_is_read_in_part() {
        let proc = tempfile::tempdir_in("/dev/shm").unwrap();
        for number in 0..1502u32 {
            let namespace = proc.path().join(format!("namespace-{number}"));
            fs::write(&namespace, "").unwrap();
            process(proc.path(), 1 + number, &namespace, Some(LINE));
            let container = match number {
                0 => "/".to_owned(),
                1501 => format!("/kubepods/{}", ID.replace('2', "3")),
                _ => format!("/kubepods/cri-containerd-{ID}.scope/{}", number % 7),
            };
            let file = proc.path().join(format!("{}/cgroup", 1 + number));
            fs::write(file, format!("0::{container}\n")).unwrap();
        }
        let seen = Proc::at(proc.path().to_owned()).namespaces().unwrap();
        let read = seen.others.iter().filter(|other| other.table.is_ok());
        assert_eq!(read.count(), 256 + 1);
        let is_other = |other: &NamespaceMounts| {
            matches!(&other.held_by, HeldBy::Process { pid: 1502, .. }) && other.table.is_ok()
        };
        assert!(
            seen.others.iter().any(is_other),
            "another container is unread"
        );
        let unread: Vec<String> = seen
            .others
            .iter()
            .filter_map(NamespaceMounts::unread)
            .collect();
        assert_eq!(unread.len(), 1, "{unread:?}");
        assert!(
            unread[0].contains("1244 mount namespaces of this container are not read"),
            "{unread:?}"
        );
        let point = pinned(&seen.own, &seen.others, &seen.problems, &Places::default());
        assert_eq!(point.status, PointStatus::Unknown, "{point:?}");
    }

    /// A process can keep namespaces without processes as open files.
    #[test]
    fn a_process_with_1500_open_namespaces_is_read_in_part() {
        let proc = tempfile::tempdir_in("/dev/shm").unwrap();
        let namespace = proc.path().join("namespace");
        fs::write(&namespace, "").unwrap();
        for pid in [1, 2] {
            process(proc.path(), pid, &namespace, Some(LINE));
        }
        fs::write(proc.path().join("2/cgroup"), format!("0::/{ID}\n")).unwrap();
        fs::create_dir(proc.path().join("2/fd")).unwrap();
        for number in 0..1500 {
            let file = proc.path().join(format!("2/fd/{number}"));
            std::os::unix::fs::symlink(format!("mnt:[{}]", 900_000 + number), file).unwrap();
        }
        let seen = Proc::at(proc.path().to_owned()).namespaces().unwrap();
        assert_eq!(seen.others.len(), 256 + 1);
        let last = seen.others.last().and_then(NamespaceMounts::unread);
        let last = last.unwrap_or_default();
        assert!(last.contains("1244 mount namespaces of"), "{last}");
    }

    #[test]
    fn a_process_that_went_away_leaves_its_namespace_to_the_next() {
        let proc = tempfile::tempdir().unwrap();
        for (name, pids) in [
            ("own", &[(1, Some(LINE))][..]),
            ("left", &[(2, None), (3, Some(LINE))]),
            ("gone", &[(4, None)]),
        ] {
            let namespace = proc.path().join(name);
            fs::write(&namespace, "").unwrap();
            pids.iter()
                .for_each(|(pid, mountinfo)| process(proc.path(), *pid, &namespace, *mountinfo));
        }
        let seen = Proc::at(proc.path().to_owned()).namespaces().unwrap();
        let HeldBy::Process { pid, .. } = seen.others[0].held_by else {
            panic!("{seen:?}")
        };
        assert_eq!((seen.others.len(), pid, seen.problems.len()), (1, 3, 0));
    }

    #[test]
    fn a_table_that_is_cut_off_is_no_table() {
        let proc = tempfile::tempdir().unwrap();
        for (pid, text) in [(1, LINE), (2, &LINE[..20]), (3, &LINE[..LINE.len() - 2])] {
            let namespace = proc.path().join(format!("namespace-{pid}"));
            fs::write(&namespace, "").unwrap();
            process(proc.path(), pid, &namespace, Some(text));
        }
        let seen = Proc::at(proc.path().to_owned()).namespaces().unwrap();
        assert!(seen.others.iter().all(|other| other.table.is_err()));
        fs::write(proc.path().join("1/mountinfo"), &LINE[..20]).unwrap();
        assert!(
            Proc::at(proc.path().to_owned())
                .namespaces()
                .unwrap_err()
                .to_string()
                .contains("1/mountinfo")
        );
    }
}
