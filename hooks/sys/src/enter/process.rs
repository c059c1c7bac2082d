//! A container's init process, held by a pidfd: what is read of it belongs to it and to no later
//! process of the same pid.

use std::collections::HashSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bindguard_core::identity::{ContainerCgroups, START_TIME, stat_number};
use bindguard_core::mount_table::{MountTable, TableError};
use bindguard_core::refresh_request::ProgramName;
use rustix::fs::{CWD, FileType, Mode, OFlags, StatxFlags, getxattr, openat};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::enter::namespace::MountNamespace;
use crate::handle::{Handle, statx_of, type_in};
use crate::kernel::{Kind, MOUNT, namespace_of};
use crate::mounts::ReadTableError;
use crate::own_process::{ChildProcess, is_answered, is_readable, receive, send, sockets};
use crate::process_files::{self, ProcessFile, contents_within, links_within};
use crate::{Failure, failed};

/// A process with its pidfd. The process may end at any time.
#[derive(Debug)]
pub struct HeldProcess {
    pid: u32,
    pidfd: OwnedFd,
    /// The id of the container whose init it is; `None` if that was not checked.
    pub(super) container: Option<String>,
}

impl HeldProcess {
    /// Opens a process by its pid.
    ///
    /// # Errors
    /// [`ProcessError::Ended`] if there is none, and the kernel's.
    pub fn open(pid: u32) -> Result<Self, ProcessError> {
        let pidfd = open_pidfd(pid).map_err(|errno| match errno {
            // INVAL, or NOENT of newer kernels: a thread of another process has this number.
            Errno::SRCH | Errno::INVAL | Errno::NOENT => ProcessError::Ended(pid),
            errno => failed(format!("open process {pid}"), Path::new(""))(errno).into(),
        })?;
        Ok(Self {
            pid,
            pidfd,
            container: None,
        })
    }

    /// The same, as the init of the container with this id.
    #[must_use]
    pub fn of_container(self, id: &str) -> Self {
        Self {
            container: Some(id.to_owned()),
            ..self
        }
    }

    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// True until it ends.
    pub fn is_alive(&self) -> bool {
        !self.ends_within(Duration::ZERO)
    }

    /// Waits for its end for at most this time. A process that exits loses its namespaces first, and
    /// ends when its mounts are gone and its children ended.
    pub fn ends_within(&self, time: Duration) -> bool {
        is_readable(&self.pidfd, time)
    }

    /// The text of a file below `/proc/PID` for which the kernel takes no lock that the process can
    /// hold: see [`process_files`].
    ///
    /// # Errors
    /// If it cannot be read, or the process ended.
    pub fn read(&self, name: &'static str) -> Result<Vec<u8>, ProcessError> {
        // A file of procfs has no size: a buffer that holds most of them saves a dozen short reads.
        let mut text = Vec::with_capacity(16 * 1024);
        let file = File::open(format!("/proc/{}/{name}", self.pid));
        let read = file.and_then(|mut file| file.read_to_end(&mut text));
        self.checked(name, read)?;
        Ok(text)
    }

    /// The file name of its program, by the link `exe` alone: the program's filesystem is not
    /// queried.
    ///
    /// # Errors
    /// As [`HeldProcess::read`], and [`ProcessError::Blocked`].
    pub fn program_name(&self) -> Result<Vec<u8>, ProcessError> {
        let mut links = process_files::links(&[ProcessFile::of(self.pid, "exe")]);
        let link = self.checked("exe", links.remove(0))?;
        Ok(link.file_name().unwrap_or_default().as_bytes().to_vec())
    }

    /// The time of its start, in ticks since the boot.
    ///
    /// # Errors
    /// As [`HeldProcess::program_name`].
    pub fn start_time(&self) -> Result<u64, ProcessError> {
        let name = "stat";
        let mut texts = process_files::contents(&[ProcessFile::of(self.pid, name)]);
        let text = self.checked(name, texts.remove(0))?;
        let start = stat_number(&String::from_utf8_lossy(&text), START_TIME);
        self.checked(name, start.ok_or(io::ErrorKind::InvalidData.into()))
    }

    /// The mounts of its mount namespace, without their sources.
    ///
    /// # Errors
    /// As [`HeldProcess::program_name`], and if the table is too large or a line is no mount.
    pub fn mounts(&self) -> Result<MountTable, ProcessError> {
        let pid = self.pid;
        let namespace = self.mount_namespace()?;
        let table = namespace.mounts(|| File::open(format!("/proc/{pid}/mountinfo")));
        if self.is_alive() {
            table.map_err(|error| ProcessError::of_table(pid, error))
        } else {
            Err(ProcessError::Ended(pid))
        }
    }

    /// The current mount namespace of the process.
    ///
    /// # Errors
    /// As [`HeldProcess::program_name`].
    pub fn mount_namespace(&self) -> Result<MountNamespace, ProcessError> {
        Ok(MountNamespace {
            file: self.namespace(MOUNT)?,
            process: self.pid,
        })
    }

    pub(super) fn namespace(&self, kind: Kind) -> Result<File, ProcessError> {
        let file = match namespace_of(&self.pidfd, kind) {
            // Before Linux 6.11 there is only the file, whose open may wait for a lock.
            Err(error)
                if matches!(
                    Errno::from_io_error(&error),
                    Some(Errno::NOTTY | Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS)
                ) =>
            {
                open_process_file(&ProcessFile::of(self.pid, kind.name)).map(File::from)
            }
            file => file,
        };
        self.checked(kind.name, file)
    }

    /// The result, if the process is still alive: the kernel does not reuse the pid of a live
    /// process.
    fn checked<T>(&self, name: &'static str, read: io::Result<T>) -> Result<T, ProcessError> {
        let pid = self.pid;
        if !self.is_alive() {
            return Err(ProcessError::Ended(pid));
        }
        read.map_err(|source| match source.kind() {
            io::ErrorKind::TimedOut => ProcessError::Blocked { pid, name },
            _ => ProcessError::unread(pid, name, source),
        })
    }

    /// Sends it a signal: pidfd_send_signal(2).
    ///
    /// # Errors
    /// If it ended, or may not be signalled.
    pub fn signal(&self, signal: Signal) -> Result<(), ProcessError> {
        let act = format!("send {signal:?} to process {}", self.pid);
        Ok(pidfd_send_signal(&self.pidfd, signal).map_err(failed(act, Path::new("")))?)
    }
}

/// The numbers of the mount namespaces of these processes, in the same order. A process that blocks
/// its readers costs the others at most this time.
pub fn mount_namespaces(pids: &[u32], time: Duration) -> Vec<io::Result<u64>> {
    let number = |pid: &u32| Ok(namespace_of(&open_pidfd(*pid)?, MOUNT)?.metadata()?.ino());
    // Before Linux 6.11 there is only the file, which a separate process reads.
    if number(&std::process::id()).is_err() {
        let files = ProcessFile::of_each(pids, MOUNT.name);
        return process_files::inodes_within(time, &files);
    }
    pids.iter().map(number).collect()
}

fn open_pidfd(pid: u32) -> Result<OwnedFd, Errno> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    pidfd_open(pid.ok_or(Errno::SRCH)?, PidfdFlags::empty())
}

impl AsFd for HeldProcess {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

// Errors of reading a process of a container.

/// Why a process could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    #[error("process {0} ended")]
    Ended(u32),
    /// A step failed.
    #[error(transparent)]
    Failed(#[from] Failure),
    /// A file of the process could not be read within the time limit: the process holds a lock that
    /// the reader needs.
    #[error(
        "read {name} of process {pid}: the process blocks its readers, for example in an execve(2) that waits for a file server"
    )]
    Blocked {
        pid: u32,
        /// The name below `/proc/PID`.
        name: &'static str,
    },
    /// Its mount table was not accepted, for example because it is too large.
    #[error("parse the mount table of process {pid}")]
    Table {
        pid: u32,
        #[source]
        source: TableError,
    },
    /// No process of the container runs the program.
    #[error("no process of the container runs {0:?}")]
    NoProgram(String),
    /// Not all processes of the container were read, so the program may be among the rest.
    #[error("the container has too many processes to find {0:?} in time")]
    TooManyProcesses(String),
    /// The cgroup of the container is not known, so neither are its processes.
    #[error("the processes of the container with process {0} are not known")]
    NoContainer(u32),
}

impl ProcessError {
    /// The error of reading a file below `/proc/PID`.
    pub(super) fn unread(pid: u32, name: &str, source: io::Error) -> Self {
        failed(format!("read {name} of process {pid}"), Path::new(""))(source).into()
    }

    /// The error of reading the mount table of a process.
    pub(super) fn of_table(pid: u32, error: ReadTableError) -> Self {
        match error {
            ReadTableError::Read(source) => Self::unread(pid, "mountinfo", source),
            ReadTableError::Table(source) => Self::Table { pid, source },
        }
    }
}

// Opens a file below `/proc/PID` in a child, which passes the descriptor back: unix(7).
//
// The process can hold a lock that the open needs: see [`crate::process_files`]. Then the child is
// killed. The kill ends the child's wait for the lock.

/// Time limit of an open.
const OPEN_TIMEOUT: Duration = Duration::from_secs(1);

/// Time limit of an open whose child waits for a processor.
const BUSY_TIMEOUT: Duration = Duration::from_secs(10);

/// Opens a file of a process to read it.
///
/// # Errors
/// The kernel's, and `TimedOut` if the process holds a lock.
pub fn open_process_file(file: &ProcessFile) -> io::Result<OwnedFd> {
    // A process can replace its descriptor with a fifo, whose open would wait for a writer.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let (ours, theirs) = sockets()?;
    let child = ChildProcess::start(&[theirs.as_raw_fd()], || {
        let opened = openat(CWD, &file.path, flags, Mode::empty());
        let number = opened.as_ref().err().map(|errno| errno.raw_os_error());
        let opened = opened.as_ref().ok().map(AsFd::as_fd);
        // If the reader is gone, the answer is not needed.
        let _ = send(&theirs, &number, opened.as_slice());
    })?;
    drop(theirs);
    let until = Instant::now() + BUSY_TIMEOUT;
    let opened = if is_answered(&ours, child.pid, OPEN_TIMEOUT, until) {
        receive::<Option<i32>>(&ours)
    } else {
        Err(io::ErrorKind::TimedOut.into())
    };
    child.kill();
    let (number, mut descriptors) = opened?;
    match number {
        Some(number) => Err(io::Error::from_raw_os_error(number)),
        // There are too many open files.
        None => Ok(descriptors.pop().ok_or(Errno::MFILE)?),
    }
}

// SELinux's decision if a process may read a file, by the files of selinuxfs. The kernel's
// security/selinux/selinuxfs.c has their formats.

const SELINUXFS: &str = "/sys/fs/selinux";

/// Limit of a label: a page, the kernel's limit for a request.
const MAX_LABEL: usize = 4096;

/// The flag of an answer about a process whose type is permissive: nothing is denied to the process.
const IS_PERMISSIVE: u32 = 1;

/// True if SELinux enforces a policy that denies this process to read the file. False if no policy
/// is enforced, or if the kernel does not answer.
pub fn selinux_denies_read(process: &HeldProcess, file: &Handle) -> bool {
    let enforce = fs::read(Path::new(SELINUXFS).join("enforce"));
    enforce.is_ok_and(|text| text.first() == Some(&b'1'))
        && denies_read(process, file).unwrap_or(false)
}

fn denies_read(process: &HeldProcess, file: &Handle) -> io::Result<bool> {
    let (class, permissions) = match type_in(&statx_of(file, StatxFlags::TYPE)?) {
        FileType::Directory => ("dir", &["search", "read"][..]),
        FileType::RegularFile => ("file", &["read"][..]),
        FileType::Socket => ("sock_file", &["write"][..]),
        _ => return Ok(false),
    };
    let process = process.read("attr/current").map_err(io::Error::other)?;
    let class = Path::new(SELINUXFS).join("class").join(class);
    // The kernel knows the label of an open file: no request goes to a server.
    let mut label = vec![0; MAX_LABEL];
    let length = getxattr(file.magic_path(), c"security.selinux", &mut label)?;
    let (process, label) = (text_of(&process)?, text_of(&label[..length])?);
    let index = number_in(class.join("index"))?;
    let (allowed, flags) = answer(&format!("{process} {label} {index}"))?;
    if flags & IS_PERMISSIVE != 0 {
        return Ok(false);
    }
    for permission in permissions {
        let number = number_in(class.join("perms").join(permission))?;
        let bit = number.checked_sub(1).and_then(|bit| 1_u32.checked_shl(bit));
        if bit.is_some_and(|bit| allowed & bit == 0) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The allowed permissions and the flags.
fn answer(request: &str) -> io::Result<(u32, u32)> {
    let mut access = OpenOptions::new()
        .read(true)
        .write(true)
        .open(Path::new(SELINUXFS).join("access"))?;
    access.write_all(request.as_bytes())?;
    let mut answer = String::new();
    access.read_to_string(&mut answer)?;
    let mut fields = answer.split_whitespace();
    let mut number = |index| u32::from_str_radix(fields.nth(index)?, 16).ok();
    let answered = number(0).zip(number(4));
    answered.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn number_in(file: PathBuf) -> io::Result<u32> {
    let text = fs::read_to_string(file)?;
    text.trim().parse().map_err(io::Error::other)
}

/// A label without the NUL byte or the newline at its end.
fn text_of(label: &[u8]) -> io::Result<&str> {
    let text = str::from_utf8(label).map_err(io::Error::other)?;
    Ok(text.trim_end_matches(['\0', '\n']))
}

// The process of a container that runs a program, for a signal.
//
// A process belongs to the container if its cgroup does, and if it has as many pids as the
// container's init. A container within the container has a pid namespace, and so an additional
// pid. The pid namespace alone is not enough: pods share a pid namespace, or have the host's.
//
// The workers of nginx run the program of their parent, the master: a process whose parent runs the
// same program does not count. If several processes remain, the oldest process counts.
//
// The container's cgroup lists the processes, so other containers cost nothing. A container that
// forks all the time costs the time limit.
//
// Between a look and a signal, the process may end, and its pid may be reused. So the process is
// opened first, and cgroup and program are compared again through the pidfd. A process that blocks
// the reader of its `exe` is left out.

/// The mount points of cgroup v2, alone and beside cgroup v1.
const UNIFIED: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];

/// Limit of looks: the process that was found may end meanwhile.
const MAX_LOOKS: u32 = 3;

/// A process, by its `/proc/PID/status`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Member {
    pid: u32,
    parent: u32,
    /// The number of pids of the process: a pid for each pid namespace.
    depth: usize,
}

impl HeldProcess {
    /// The process of this init's container that runs the program.
    ///
    /// # Errors
    /// [`ProcessError::NoProgram`] if there is none, [`ProcessError::TooManyProcesses`] if not all
    /// are known at this time, and [`ProcessError::NoContainer`].
    pub fn running(&self, program: &ProgramName, until: Instant) -> Result<Self, ProcessError> {
        let container = self
            .container
            .as_deref()
            .ok_or(ProcessError::NoContainer(self.pid()))?;
        let init = Member::of(self.pid()).ok_or(ProcessError::Ended(self.pid()))?;
        let cgroup = self.read("cgroup")?;
        let cgroups = ContainerCgroups::of_init(&String::from_utf8_lossy(&cgroup), container)
            .ok_or(ProcessError::NoContainer(self.pid()))?;
        let too_many = || ProcessError::TooManyProcesses(program.as_str().to_owned());
        for _ in 0..MAX_LOOKS {
            let pids = match self.listed(&cgroups, until) {
                Some(pids) => pids,
                None => {
                    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
                    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
                    pids.collect()
                }
            };
            let mut members = Vec::new();
            for pid in pids {
                if Instant::now() >= until {
                    return Err(too_many());
                }
                members.extend(member(pid, &cgroups, init.depth));
            }
            let found = first_of(&topmost(&running(&members, program, until)), until);
            if Instant::now() >= until {
                return Err(too_many());
            }
            let Some(pid) = found else {
                break;
            };
            let found = match Self::open(pid) {
                Err(ProcessError::Ended(_)) => continue,
                found => found?,
            };
            let name = found.program_name();
            let runs_program = name.is_ok_and(|name| program.is_program(&name));
            // Still alive afterwards: the pid was not reused when its cgroup was read.
            if runs_program && member(pid, &cgroups, init.depth).is_some() && found.is_alive() {
                return Ok(found);
            }
        }
        Err(ProcessError::NoProgram(program.as_str().to_owned()))
    }

    /// The pids that the container's cgroup and the cgroups below list; not all of them if the time
    /// ends. `None` if no hierarchy is found that lists the init.
    fn listed(&self, cgroups: &ContainerCgroups, until: Instant) -> Option<Vec<u32>> {
        for (controllers, path) in cgroups.hierarchies() {
            let mut folders = Vec::new();
            if controllers.is_empty() {
                folders.extend(UNIFIED.map(|root| format!("{root}{path}")));
            } else {
                let name = controllers.strip_prefix("name=").unwrap_or(controllers);
                folders.push(format!("/sys/fs/cgroup/{name}{path}"));
            }
            for folder in folders {
                if let Ok(pids) = pids_in(folder.into(), until)
                    && (pids.contains(&self.pid()) || Instant::now() >= until)
                {
                    return Some(pids);
                }
            }
        }
        None
    }
}

/// The pids in a cgroup and in the cgroups below, as far as they are read until this time.
///
/// # Errors
/// If the cgroup is not there.
fn pids_in(folder: PathBuf, until: Instant) -> io::Result<Vec<u32>> {
    let mut text = read_pids(&folder, until)?;
    let mut folders = vec![folder];
    while let Some(folder) = folders.pop() {
        // A cgroup may be removed meanwhile.
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            if Instant::now() >= until {
                break;
            }
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                // A threaded cgroup of cgroup v2 has no list: its processes are listed above.
                text.extend(read_pids(&entry.path(), until).unwrap_or_default());
                folders.push(entry.path());
            }
        }
    }
    let text = String::from_utf8_lossy(&text);
    Ok(text.lines().filter_map(|pid| pid.parse().ok()).collect())
}

/// While the processes of a cgroup fork, its list may have no end.
fn read_pids(folder: &Path, until: Instant) -> io::Result<Vec<u8>> {
    let mut list = File::open(folder.join("cgroup.procs"))?;
    let (mut text, mut part) = (Vec::new(), [0; 4096]);
    while Instant::now() < until {
        match list.read(&mut part)? {
            0 => break,
            size => text.extend_from_slice(&part[..size]),
        }
    }
    Ok(text)
}

/// The process, if it belongs to the container.
fn member(pid: u32, cgroups: &ContainerCgroups, depth: usize) -> Option<Member> {
    let cgroup = fs::read(format!("/proc/{pid}/cgroup")).ok()?;
    if !cgroups.contain(&String::from_utf8_lossy(&cgroup)) {
        return None;
    }
    Member::of(pid).filter(|member| member.depth == depth)
}

/// The members that run the program.
fn running(members: &[Member], program: &ProgramName, until: Instant) -> Vec<Member> {
    let pids: Vec<u32> = members.iter().map(|member| member.pid).collect();
    let left = until.saturating_duration_since(Instant::now());
    let links = links_within(left, &ProcessFile::of_each(&pids, "exe"));
    let mut running = Vec::new();
    for (member, link) in members.iter().zip(links) {
        if let Ok(link) = link
            && program.is_program(link.file_name().unwrap_or_default().as_bytes())
        {
            running.push(*member);
        }
    }
    running
}

/// The pids of the members whose parent is no member of the list.
fn topmost(members: &[Member]) -> Vec<u32> {
    let pids: HashSet<u32> = members.iter().map(|member| member.pid).collect();
    let mut top = Vec::new();
    for member in members {
        if !pids.contains(&member.parent) {
            top.push(member.pid);
        }
    }
    top
}

/// The process that started first.
fn first_of(pids: &[u32], until: Instant) -> Option<u32> {
    if let [pid] = pids {
        return Some(*pid);
    }
    let left = until.saturating_duration_since(Instant::now());
    let mut first = None;
    let texts = contents_within(left, &ProcessFile::of_each(pids, "stat"));
    for (pid, text) in pids.iter().zip(texts) {
        let text = text.map(|text| String::from_utf8_lossy(&text).into_owned());
        if let Some(start) = text.ok().and_then(|text| stat_number(&text, START_TIME))
            && first.is_none_or(|first| (start, *pid) < first)
        {
            first = Some((start, *pid));
        }
    }
    first.map(|(_, pid)| pid)
}

impl Member {
    fn of(pid: u32) -> Option<Self> {
        let text = fs::read(format!("/proc/{pid}/status")).ok()?;
        Self::from_text(pid, &String::from_utf8_lossy(&text))
    }

    /// The kernel escapes a newline in the name of the process.
    fn from_text(pid: u32, text: &str) -> Option<Self> {
        let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name));
        Some(Self {
            pid,
            parent: field("PPid:")?.trim().parse().ok()?,
            depth: field("NSpid:")?.split_whitespace().count(),
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::thread;

    use bindguard_testing::deny_call;
    use nix::libc;

    use super::*;

    #[test]
    fn only_a_process_that_is_gone_has_ended() {
        let own = std::process::id();
        let opened = thread::spawn(move || {
            let of_thread = rustix::thread::gettid().as_raw_nonzero().get() as u32;
            let of_thread = HeldProcess::open(of_thread);
            deny_call(libc::SYS_pidfd_open, nix::errno::Errno::EMFILE);
            (of_thread, HeldProcess::open(own))
        });
        let (of_thread, denied) = opened.join().unwrap();
        assert!(
            matches!(of_thread, Err(ProcessError::Ended(_))),
            "{of_thread:?}"
        );
        assert!(matches!(denied, Err(ProcessError::Failed(_))), "{denied:?}");
        assert!(HeldProcess::open(own).is_ok());
    }
}

#[cfg(test)]
mod program_tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::*;

    #[test]
    fn the_master_of_several_workers_gets_the_signal() {
        let member = |pid, parent| Member {
            pid,
            parent,
            depth: 1,
        };
        let nginx = [member(9, 8), member(8, 7), member(10, 8)];
        assert_eq!(topmost(&nginx), [8]);
        assert_eq!(topmost(&[member(9, 1), member(8, 1)]), [9, 8]);
        assert_eq!(first_of(&[], Instant::now()), None);
    }

    #[test]
    fn the_name_of_a_process_adds_no_line() {
        let text = "Name:\ta\\nPPid:\t1\nPPid:\t7\nNSpid:\t9\t2\n";
        let status = Member::from_text(9, text).unwrap();
        assert_eq!((status.parent, status.depth), (7, 2));
    }
}
