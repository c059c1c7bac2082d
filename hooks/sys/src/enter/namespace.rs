//! The mount namespace of a container. A single descriptor serves to check, enter and read the
//! namespace.
//!
//! A container's init may enter other namespaces at any moment: unshare(CLONE_NEWUSER |
//! CLONE_NEWNS) needs no privilege. In a namespace of its own the kernel has locked the flags of
//! its mounts, but not those of a mount that is attached later. So a namespace is accepted only if
//! its owner is the user namespace that the container's spec requests.

use std::fs::File;
use std::io::{Read, Seek};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::{fs, io};

use bindguard_core::identity::{cgroup_of_container, pod_of};
use bindguard_core::mount_table::{
    ExceededLimit, MountEntry, MountTable, TableError, TableLimits, TableParser,
};
use bindguard_core::spec::{IdMap, IdMaps, RequestedUserNamespace};
use nix::sched::{CloneFlags, unshare};
use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;

use crate::enter::process::{HeldProcess, ProcessError, open_process_file};
use crate::handle::open_folder;
use crate::kernel::{USER, listmount, mount_namespace_id, owner_of, parent_of, statmount_in};
use crate::mounts::{ReadTableError, read_container_table};
use crate::own_process::in_thread;
use crate::process_files::ProcessFile;
use crate::replace::enter_mounts;
use crate::{Failure, failed};

/// The mount namespace that the runtime made for a container.
#[derive(Debug)]
pub struct ContainerNamespace {
    namespace: MountNamespace,
    /// The user namespace that owns the mount namespace.
    pub users: File,
    /// True if the container has a user namespace of its own.
    pub has_own_users: bool,
    /// The id of the container, if that was checked.
    container: Option<String>,
    /// Opened inside; it shows the mounts of this namespace whatever namespace the process enters
    /// later.
    table: File,
}

impl MountNamespace {
    /// The namespace, if its owner is the user namespace that the container's spec requests. The
    /// process belongs to the container.
    ///
    /// # Errors
    /// If the owner differs, or cannot be read.
    pub fn accepted(
        self,
        process: &HeldProcess,
        requested: &RequestedUserNamespace,
    ) -> Result<ContainerNamespace, NamespaceError> {
        let compare = |source| self.failed("compare the user namespace", source);
        // The owner, or its parent, is no descendant of this process's user namespace, or is the
        // initial user namespace.
        let denied = |step: &'static str, error: io::Error| match Errno::from_io_error(&error) {
            Some(Errno::PERM) => NamespaceError::OtherOwner(self.process),
            _ => self.failed(step, error),
        };
        let owner = owner_of(&self.file)
            .map_err(|error| denied("find the owner of the mount namespace", error))?;
        let own = File::open("/proc/thread-self/ns/user").map_err(compare)?;
        let has_own_users = *requested != RequestedUserNamespace::OfRuntime;
        // A user namespace that a container makes for itself is a child of the container's.
        let of_runtime = if has_own_users {
            let parent = parent_of(&owner)
                .map_err(|error| denied("find the parent of the user namespace", error))?;
            is_same(&parent, &own)
        } else {
            is_same(&owner, &own)
        };
        if !of_runtime.map_err(compare)? {
            return Err(NamespaceError::OtherOwner(self.process));
        }
        match requested {
            RequestedUserNamespace::OfRuntime => {}
            RequestedUserNamespace::WithIds(ids) => {
                if self.ids(&owner, process)? != *ids {
                    return Err(NamespaceError::OtherIds(self.process));
                }
            }
            RequestedUserNamespace::AtPath(path) => {
                let is_same = fs::metadata(path)
                    .and_then(|named| Ok(identity(&named) == identity(&owner.metadata()?)));
                if !is_same.unwrap_or(false) {
                    return Err(NamespaceError::OtherPath {
                        process: self.process,
                        path: path.clone(),
                    });
                }
            }
        }
        let table = self
            .open_table()
            .map_err(|source| self.failed("open the mount table", source))?;
        Ok(ContainerNamespace {
            namespace: self,
            users: owner,
            has_own_users,
            container: process.container.clone(),
            table,
        })
    }

    /// The ids of its owner, read from a process that is in the owner before and after. No process
    /// returns to a user namespace that it left: that needs a privilege there, which a descendant
    /// does not have.
    fn ids(&self, owner: &File, process: &HeldProcess) -> Result<IdMaps, NamespaceError> {
        let map = |name| -> Result<IdMap, NamespaceError> {
            let text = process.read(name)?;
            let map = IdMap::from_proc(&String::from_utf8_lossy(&text));
            map.ok_or_else(|| self.failed("parse the ids", io::ErrorKind::InvalidData.into()))
        };
        let is_inside = || -> Result<bool, NamespaceError> {
            is_same(&process.namespace(USER)?, owner)
                .map_err(|source| self.failed("compare the user namespace", source))
        };
        let before = is_inside()?;
        let ids = IdMaps {
            users: map("uid_map")?,
            groups: map("gid_map")?,
        };
        if before && is_inside()? {
            Ok(ids)
        } else {
            Err(NamespaceError::OtherUsers(self.process))
        }
    }

    /// A thread enters the namespace and opens the table through the host's procfs: the container
    /// may have no `/proc`, or a fake `/proc`. The thread walks on no filesystem of the container.
    fn open_table(&self) -> io::Result<File> {
        in_thread("mount-table", || {
            let proc = open_folder("/proc")?;
            unshare(CloneFlags::CLONE_FS)?;
            enter_mounts(&self.file)?;
            let flags = OFlags::RDONLY | OFlags::CLOEXEC;
            Ok(rustix::fs::openat(&proc, "thread-self/mountinfo", flags, Mode::empty())?.into())
        })?
    }
}

impl ContainerNamespace {
    /// Its mounts, without their sources.
    ///
    /// # Errors
    /// If the table cannot be read, is too large, or has a line that is no mount.
    pub fn mounts(&self) -> Result<MountTable, ProcessError> {
        let text = || {
            let mut table = &self.table;
            table.rewind().map(|()| table)
        };
        mounts_in(&self.namespace.file, text)
            .map_err(|error| ProcessError::of_table(self.namespace.process, error))
    }

    /// The cgroup of its container's pod; that of the container outside of a pod. A container may
    /// give its own cgroups, below the cgroup with its id, any name.
    pub(super) fn pod(&self) -> String {
        let cgroup = fs::read_to_string(format!("/proc/{}/cgroup", self.namespace.process));
        // An ended process has no namespaces.
        let mut cgroup = cgroup.unwrap_or_default();
        if let Some(container) = &self.container {
            let outer = cgroup_of_container(&cgroup, container);
            cgroup = outer.unwrap_or_else(|| container.clone());
        }
        pod_of(&cgroup).unwrap_or(&cgroup).to_owned()
    }

    /// Its number, for records.
    ///
    /// # Errors
    /// If the kernel does not answer.
    pub fn number(&self) -> Result<u64, ProcessError> {
        self.namespace
            .number()
            .map_err(|source| self.unread(source))
    }

    fn unread(&self, source: io::Error) -> ProcessError {
        ProcessError::unread(self.namespace.process, "ns/mnt", source)
    }

    /// Locks the namespace against other refreshes: flock(2). `None` if another process has the
    /// lock. A container can lock only its own namespace.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn try_lock(&self) -> Result<Option<MountsLock<'_>>, ProcessError> {
        let file = &self.namespace.file;
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(MountsLock(file))),
            Err(Errno::WOULDBLOCK) => Ok(None),
            Err(errno) => Err(self.unread(errno.into())),
        }
    }
}

impl AsFd for ContainerNamespace {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.namespace.file.as_fd()
    }
}

/// A lock that ends with this value, also if a process that was forked meanwhile has a copy of the
/// descriptor.
#[derive(Debug)]
pub struct MountsLock<'a>(&'a File);

impl Drop for MountsLock<'_> {
    fn drop(&mut self) {
        // Closing the file unlocks it as well, but only once every copy is closed.
        let _ = flock(self.0, FlockOperation::Unlock);
    }
}

// The mount namespace that a process was in, by an open descriptor. The process may enter another
// namespace later; the descriptor still refers to this namespace.

/// The mount namespace that a process was in when it was opened.
#[derive(Debug)]
pub struct MountNamespace {
    pub(super) file: File,
    pub(super) process: u32,
}

/// Why a mount namespace is not taken for that of a container.
#[derive(Debug, thiserror::Error)]
pub enum NamespaceError {
    /// The owner of the mount namespace is not the user namespace that the spec requests.
    #[error(
        "process {0} is in a mount namespace that its runtime did not make: another user namespace than that of the container \
         owns it"
    )]
    OtherOwner(u32),
    /// The ids that the owner maps differ from the spec's.
    #[error(
        "the user namespace that owns the mounts of process {0} maps other ids than the container's spec"
    )]
    OtherIds(u32),
    /// The process left the user namespace of its mounts, so the ids of that namespace cannot be
    /// read.
    #[error("process {0} is in another user namespace than the one that owns its mounts")]
    OtherUsers(u32),
    /// The spec names a different user namespace.
    #[error("the user namespace that owns the mounts of process {process} is not {}", path.display())]
    OtherPath {
        /// The process.
        process: u32,
        /// The path in the spec.
        path: PathBuf,
    },
    /// The process ended, or could not be read.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// A step failed.
    #[error(transparent)]
    Failed(#[from] Failure),
}

impl MountNamespace {
    /// Opens the mount namespace of a process, by the process's file below a `/proc`.
    ///
    /// # Errors
    /// See [`open_process_file`].
    pub fn open(file: &ProcessFile) -> io::Result<Self> {
        Ok(Self {
            file: open_process_file(file)?.into(),
            process: file.pid,
        })
    }

    /// Its number: namespaces(7).
    ///
    /// # Errors
    /// If the kernel does not answer.
    pub fn number(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.ino())
    }

    /// Its mounts, without their sources. `text` opens its mountinfo.
    ///
    /// # Errors
    /// See [`mounts_in`].
    pub fn mounts<R: Read>(
        &self,
        text: impl FnOnce() -> io::Result<R>,
    ) -> Result<MountTable, ReadTableError> {
        mounts_in(&self.file, text)
    }

    /// True if it is that of the calling thread. No container of runc or crun is in that namespace;
    /// the virtual machine of a sandbox such as Kata is.
    ///
    /// # Errors
    /// If it cannot be compared.
    pub fn is_own(&self) -> Result<bool, NamespaceError> {
        let own = File::open("/proc/thread-self/ns/mnt").and_then(|own| is_same(&own, &self.file));
        own.map_err(|source| self.failed("compare the mount namespace", source))
    }

    pub(super) fn failed(&self, step: &'static str, source: io::Error) -> NamespaceError {
        failed(format!("{step} of process {}", self.process), Path::new(""))(source).into()
    }
}

/// Namespaces are compared while both are open: a number may belong to another namespace later.
pub(super) fn is_same(one: &File, other: &File) -> io::Result<bool> {
    Ok(identity(&one.metadata()?) == identity(&other.metadata()?))
}

pub(super) fn identity(namespace: &fs::Metadata) -> (u64, u64) {
    (namespace.dev(), namespace.ino())
}

// The mount table of another namespace, read mount by mount: listmount(2) and statmount(2).
//
// The kernel prints a line of mountinfo into a buffer of its own, which it doubles until the line
// fits. That buffer counts as memory of the reader. A container that nests folders makes a line of
// 40 MB, which kills a reader with 64 MiB. statmount(2) stops at the size of the caller's buffer.
//
// Before Linux 6.11 the text is the only way to read the mounts of another namespace.

/// The number of ids in a call.
const IDS: usize = 512;

/// The mounts of a namespace, without their sources. `text` opens its mountinfo, for kernels that
/// cannot list the mounts of another namespace.
///
/// # Errors
/// If they cannot be read, exceed [`TableLimits::CONTAINER`], or the text has a line that is no
/// mount.
pub fn mounts_in<R: Read>(
    namespace: &File,
    text: impl FnOnce() -> io::Result<R>,
) -> Result<MountTable, ReadTableError> {
    match listed(namespace) {
        Err(ReadTableError::Read(error)) if is_unknown(&error) => read_container_table(text()?),
        table => table,
    }
}

fn listed(namespace: &File) -> Result<MountTable, ReadTableError> {
    let namespace = mount_namespace_id(namespace)?;
    let mut parser = TableParser::new(TableLimits::CONTAINER);
    let limit = TableLimits::CONTAINER.line;
    let (mut ids, mut last) = ([0; IDS], 0);
    loop {
        let count = match listmount(Some(namespace), last, &mut ids) {
            // Without the right to list the mounts of a namespace the kernel pretends that it is
            // gone. The namespace is open here.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(io::Error::from(Errno::PERM).into());
            }
            count => count?,
        };
        for id in &ids[..count] {
            match statmount_in(Some(namespace), *id, None, limit) {
                Ok(mount) => parser.add_entry(MountEntry {
                    unique_id: Some(*id),
                    ..mount.entry
                })?,
                // It was unmounted since it was listed, or is not below the root of the namespace.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) if Errno::from_io_error(&error) == Some(Errno::OVERFLOW) => {
                    return Err(TableError::TooLarge(ExceededLimit::Line(limit)).into());
                }
                Err(error) => return Err(error.into()),
            }
        }
        match ids[..count].last() {
            Some(id) if count == IDS => last = *id,
            _ => return Ok(parser.finish()?),
        }
    }
}

/// The errors of kernels, and of seccomp filters, that do not know a call or its argument.
fn is_unknown(error: &io::Error) -> bool {
    matches!(
        Errno::from_io_error(error),
        Some(Errno::NOSYS | Errno::NOTTY | Errno::INVAL | Errno::TOOBIG | Errno::PERM)
    )
}
