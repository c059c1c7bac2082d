//! The mount namespaces of a machine, each read once.
//!
//! A process's namespace costs one stat(2) of `/proc/PID/ns/mnt` in a separate process, which a
//! hostile process can block. The table is read for the first process of each namespace. So five
//! hundred containers with ten processes each cost five thousand stats and five hundred reads, for
//! any number of mounts. A namespace can exist without processes: bind-mounted, as `mnt:[...]` of
//! an nsfs, or as an open descriptor of a process.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::{fs, io, thread};

use bindguard_core::error_chain;
use bindguard_core::mount_table::{MountTable, TableError};
use bindguard_sys::enter::{HeldProcess, MountNamespace, mounts_in, open_process_file};
use bindguard_sys::process_files::{ProcessFile, inodes, links_within};
use bindguard_sys::{Failure, ReadTableError, read_host_table_in_part};
use nix::sched::{CloneFlags, unshare};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde::Serialize;

use crate::node::{container_ids, is_gone, looks_like_an_id, open_files, pids_in, read_in_parts};

/// A `/proc`, and the process in it whose mounts are the reader's own.
#[derive(Debug)]
pub struct Proc {
    folder: PathBuf,
    own: &'static str,
}

/// Why the mounts of another namespace are unknown.
#[derive(Debug, thiserror::Error)]
pub enum UnreadTable {
    /// A call for a file of its process, or for the file that refers to it, failed.
    #[error(transparent)]
    Call(#[from] Failure),
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

/// A mount namespace with its mounts, and the holder that keeps it alive.
#[derive(Debug)]
pub struct NamespaceMounts {
    /// Its number, as in `mnt:[4026531841]`.
    pub id: u64,
    pub held_by: HeldBy,
    /// The number of processes in it.
    pub processes: usize,
    /// Its mounts, or why they could not be read.
    pub table: Result<MountTable, UnreadTable>,
}

/// The holder that keeps a mount namespace alive.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(tag = "held_by", rename_all = "kebab-case")]
pub enum HeldBy {
    /// The oldest process in the namespace.
    Process {
        /// Its pid in the reader's pid namespace.
        pid: u32,
        /// Its name, truncated by the kernel.
        #[serde(rename = "process_name")]
        command: String,
        /// The text of its `/proc/PID/cgroup`.
        #[serde(skip)]
        cgroup: String,
    },
    /// No process runs in it; a process has it open.
    Descriptor {
        pid: u32,
        #[serde(rename = "process_name")]
        command: String,
    },
    /// No process runs in it; it is bind-mounted here.
    BindMount {
        #[serde(skip)]
        path: PathBuf,
    },
    /// The reader's own mount namespace.
    #[default]
    OwnNamespace,
}

/// The number of objects checked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Checked {
    /// Processes whose namespace was queried.
    pub processes: usize,
    /// Mount namespaces; the table of each was read once.
    pub namespaces: usize,
}

impl NamespaceMounts {
    fn left_out(id: u64, held_by: HeldBy, processes: usize) -> Self {
        Self {
            id,
            held_by,
            processes,
            table: Err(UnreadTable::LeftOut { number: 0 }),
        }
    }

    /// The reason for unknown mounts, with the numbers of the namespace and of a process in the
    /// namespace.
    pub(crate) fn unread(&self) -> Option<String> {
        let why = error_chain(self.table.as_ref().err()?);
        let process = match &self.held_by {
            HeldBy::Process { pid, .. } => format!(" of process {pid}"),
            _ => String::new(),
        };
        Some(format!("mount namespace {}{process}: {why}", self.id))
    }
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
    pub fn namespaces(&self) -> Result<Namespaces, Failure> {
        // The number of a namespace is the inode of what the link leads to, namespaces(7).
        let own_path = self.folder.join(self.own).join("ns/mnt");
        let own_id = fs::metadata(&own_path)
            .map_err(|error| failed("read", &own_path, error))?
            .ino();
        let pids = pids_in(&self.folder).map_err(|error| failed("list", &self.folder, error))?;
        let (mut by_id, mut problems) = (BTreeMap::<u64, Vec<u32>>::new(), Vec::new());
        let processes = pids.len();
        let files: Vec<ProcessFile> = pids
            .iter()
            .map(|pid| self.file_of(*pid, "ns/mnt"))
            .collect();
        for (file, id) in files.iter().zip(inodes(&files)) {
            match id {
                Ok(id) => by_id.entry(id).or_default().push(file.pid),
                Err(error) if is_gone(&error) => {}
                Err(error) => problems.push(format!("read {}: {error}", file.path.display())),
            }
        }
        if problems.len() > 1 {
            let more = problems.len() - 1;
            problems.truncate(1);
            problems[0].push_str(&format!(" (and {more} more; run it as root)"));
        }
        let mut budget = Budget::default();
        for (id, pids) in by_id.iter().filter(|(id, _)| **id != own_id) {
            self.read_lived_in(*id, pids, &mut budget);
        }
        // Read last. Otherwise a mount that the host makes meanwhile, and that another namespace
        // copies, would look unmounted by the host.
        let path = self.folder.join(self.own).join("mountinfo");
        let read = File::open(&path).map_err(ReadTableError::from);
        let own = read.and_then(read_host_table_in_part);
        let own = own.map_err(|error| match error {
            ReadTableError::Read(error) => failed("read", &path, error),
            ReadTableError::Table(error) => failed("parse", &path, io::Error::other(error)),
        })?;
        if let Some(skipped) = own.skipped() {
            problems.push(format!("{}: {skipped}", path.display()));
        }
        self.read_empty(&own, &mut budget, |id| {
            id == own_id || by_id.contains_key(&id)
        });
        let mut others = budget.found;
        others.extend(budget.left_out.into_values());
        let checked = Checked {
            processes,
            namespaces: others.len() + 1,
        };
        Ok(Namespaces {
            own,
            others,
            checked,
            problems,
        })
    }

    /// Reads the namespace of these processes, unless all of them ended meanwhile.
    fn read_lived_in(&self, id: u64, pids: &[u32], budget: &mut Budget) {
        for pid in pids {
            let cgroup = self.text(*pid, "cgroup");
            let container = container_of(&cgroup);
            let held_by = HeldBy::Process {
                pid: *pid,
                command: self.text(*pid, "comm").trim_end().to_owned(),
                cgroup,
            };
            let path = self.file_of(*pid, "mountinfo").path;
            let read = || {
                // This /proc may be of another pid namespace, where the pid belongs to another
                // process.
                let by_pid = HeldProcess::open(*pid).and_then(|process| process.mount_namespace());
                let namespace = match by_pid {
                    Ok(namespace) if namespace.number().is_ok_and(|number| number == id) => {
                        Ok(namespace)
                    }
                    Ok(_) | Err(_) => MountNamespace::open(&self.file_of(*pid, "ns/mnt")),
                };
                let read = namespace.map_err(ReadTableError::from);
                match read.and_then(|namespace| namespace.mounts(|| File::open(&path))) {
                    Err(ReadTableError::Read(error))
                        if is_gone(&error)
                            || Errno::from_io_error(&error) == Some(Errno::INVAL) =>
                    {
                        None
                    }
                    read => Some(read.map_err(|error| unread("read", &path, error))),
                }
            };
            let namespace = NamespaceMounts::left_out(id, held_by, pids.len());
            if budget.add(container, namespace, read) {
                return;
            }
        }
    }

    /// Reads the namespaces without processes.
    fn read_empty(&self, own: &MountTable, budget: &mut Budget, is_known: impl Fn(u64) -> bool) {
        let mut found = BTreeMap::new();
        for entry in own.entries() {
            let id = namespace_id(&entry.root.path).filter(|id| !is_known(*id));
            if let Some(id) = id.filter(|_| entry.fs_type.0 == "nsfs") {
                let path = entry.mount_point.clone();
                // Root of the node made the mount.
                let held_by = HeldBy::BindMount { path: path.clone() };
                found.entry(id).or_insert((held_by, path, None));
            }
        }
        let pids = pids_in(&self.folder).unwrap_or_default();
        let descriptors = open_files(&self.folder, &pids, "fd");
        read_in_parts(
            descriptors,
            links_within,
            |ProcessFile { pid, path }, link| {
                if let Some(id) = namespace_id(&link).filter(|id| !is_known(*id)) {
                    let command = self.text(pid, "comm").trim_end().to_owned();
                    let held_by = HeldBy::Descriptor { pid, command };
                    found.entry(id).or_insert((held_by, path, Some(pid)));
                }
            },
        );
        for (id, (held_by, path, pid)) in found {
            let container = pid.and_then(|pid| container_of(&self.text(pid, "cgroup")));
            let namespace = NamespaceMounts::left_out(id, held_by, 0);
            budget.add(container, namespace, || {
                Some(mounts_of_namespace(path, pid))
            });
        }
    }

    fn file_of(&self, pid: u32, name: &str) -> ProcessFile {
        let path = self.folder.join(pid.to_string()).join(name);
        ProcessFile { pid, path }
    }

    fn text(&self, pid: u32, name: &str) -> String {
        fs::read_to_string(self.file_of(pid, name).path).unwrap_or_default()
    }
}

fn failed(act: &'static str, path: &Path, source: io::Error) -> Failure {
    Failure {
        act: act.into(),
        path: path.to_owned(),
        source,
    }
}

fn unread(act: &'static str, path: &Path, error: ReadTableError) -> UnreadTable {
    match error {
        ReadTableError::Read(source) => failed(act, path, source).into(),
        ReadTableError::Table(error) => error.into(),
    }
}

/// The mounts of the namespace to which a file leads: a mount of the reader's own namespace, or a
/// descriptor of a process, which can block its readers.
fn mounts_of_namespace(path: PathBuf, pid: Option<u32>) -> Result<MountTable, UnreadTable> {
    let file = ProcessFile {
        pid: pid.unwrap_or_default(),
        path,
    };
    let path = &file.path;
    let opened = match pid {
        Some(_) => open_process_file(&file).map(File::from),
        None => File::open(path),
    };
    let namespace = opened.map_err(|error| failed("open", path, error))?;
    mounts_in(&namespace, || open_table(&namespace))
        .map_err(|error| unread("read the mounts of", path, error))
}

/// The mountinfo of a namespace, opened by a thread that enters it. Only before Linux 6.11.
fn open_table(namespace: &File) -> io::Result<File> {
    let open = || {
        // Open the thread's own directory before: inside, there may be no /proc.
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let own = rustix::fs::open("/proc/thread-self", flags, Mode::empty())?;
        // setns(2) fails while threads share a root directory.
        unshare(CloneFlags::CLONE_FS)?;
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Mount))?;
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let table = rustix::fs::openat(&own, "mountinfo", flags, Mode::empty())?;
        Ok(File::from(table))
    };
    thread::scope(|scope| {
        let panicked = |_| Err(io::Error::other("the thread panicked"));
        scope.spawn(open).join().unwrap_or_else(panicked)
    })
}

/// The namespaces that were read, and the cost of their tables.
#[derive(Debug, Default)]
struct Budget {
    found: Vec<NamespaceMounts>,
    memory: usize,
    /// The number of tables of each container, and their memory.
    containers: BTreeMap<String, (usize, usize)>,
    /// The first namespace of each container that is not read represents all of them.
    left_out: BTreeMap<String, NamespaceMounts>,
}

impl Budget {
    /// Adds a namespace with its table, unless its container has its share already. `read` returns
    /// `None` if the namespace ended, and this function false.
    fn add(
        &mut self,
        container: Option<String>,
        mut namespace: NamespaceMounts,
        read: impl FnOnce() -> Option<Result<MountTable, UnreadTable>>,
    ) -> bool {
        if let Some(id) = &container
            && let Some((tables, memory)) = self.containers.get(id)
            && (*tables >= MAX_OF_CONTAINER || *memory >= MAX_MEMORY_OF_CONTAINER)
        {
            let left_out = self.left_out.entry(id.clone()).or_insert(namespace);
            if let Err(UnreadTable::LeftOut { number }) = &mut left_out.table {
                *number += 1;
            }
            return true;
        }
        let Some(table) = read() else { return false };
        let needed = table.as_ref().map_or(0, MountTable::memory);
        if let Some(container) = container {
            let (tables, memory) = self.containers.entry(container).or_default();
            *tables += 1;
            *memory += needed;
        }
        namespace.table = table;
        if self.memory + needed > MAX_MEMORY {
            namespace.table = Err(UnreadTable::NoMemory);
        } else {
            self.memory += needed;
        }
        self.found.push(namespace);
        true
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
fn namespace_id(link: &Path) -> Option<u64> {
    let link = link.to_str()?.trim_start_matches('/');
    link.strip_prefix("mnt:[")?.strip_suffix(']')?.parse().ok()
}

#[cfg(test)]
mod tests {
    use bindguard_core::places::Places;
    use bindguard_testing::held_memory::{Executing, unless_it_hangs};

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

    /// A process can hang in execve(2) between the reading of its links and the open.
    #[test]
    fn a_process_that_hangs_in_execve_does_not_delay_the_survey() {
        let Some(executing) = Executing::start() else {
            return;
        };
        let pid = executing.pid();
        let table = unless_it_hangs(move || {
            mounts_of_namespace(ProcessFile::of(pid, "fd/0").path, Some(pid))
        });
        // A kernel that takes no lock opens the file, which is no namespace.
        assert!(
            matches!(&table, Some(Err(UnreadTable::Call(failure))) if ["open", "read the mounts of"].contains(&&*failure.act)),
            "{table:?}"
        );
        let namespaces = unless_it_hangs(|| Proc::default().namespaces());
        assert!(matches!(&namespaces, Some(Ok(_))), "{namespaces:?}");
    }
}
