//! The mount of an open file, as the kernel reports it.
//!
//! statx(2) and statmount(2) report it in microseconds, however many mounts a node has. Before
//! Linux 6.8, and where the call is denied, the mount table is read once, at its first use. That is
//! after every file of interest is open, so mount ids still name the same mounts.

use std::cell::{OnceCell, RefCell};
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use bindguard_core::mount_table::{
    Device, FsType, MountEntry, MountId, MountTable, TableError, TableLimits, TableParser,
};
use bindguard_core::text::is_root;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::handle::{Handle, open_without_waiting};
use crate::kernel::{listmount, statmount};
use crate::{Failure, failed};

/// Why the mount of a file is unknown.
#[derive(Debug, Clone, thiserror::Error)]
pub enum MountError {
    /// The file could not be inspected, or the mount table could not be read.
    #[error(transparent)]
    Failed(Arc<Failure>),
    /// The mount is gone, or belongs to another namespace.
    #[error("mount {} is not in the mount table", .0.0)]
    NotListed(MountId),
}

impl From<Failure> for MountError {
    fn from(failure: Failure) -> Self {
        Self::Failed(Arc::new(failure))
    }
}

/// The mounts of the calling thread's namespace. Open the files to be inspected before you create
/// [`Mounts`].
#[derive(Debug, Default)]
pub struct Mounts {
    only_table: bool,
    /// Results of statmount(2) by unique id: most sources of a node share a few mounts.
    cached: Rc<RefCell<HashMap<u64, Cached>>>,
    table: OnceCell<Result<MountTable, MountError>>,
}

/// A mount, and the unique id of its parent.
type Cached = (Rc<MountEntry>, u64);

/// The mount of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountOf {
    /// The mount itself.
    pub entry: Rc<MountEntry>,
    /// The parent mount; `None` for the root of the namespace.
    pub parent: Option<Rc<MountEntry>>,
    /// True if the file is the root of its mount: its path is a mount point.
    pub is_mount_point: bool,
}

impl MountOf {
    /// True if a second mount lies directly below this mount at the same mount point. A swap leaves
    /// this state if interrupted between attaching the new mount and detaching the stale mount.
    pub fn covers_its_equal(&self) -> bool {
        self.parent
            .as_ref()
            .is_some_and(|parent| parent.mount_point == self.entry.mount_point)
    }
}

impl Mounts {
    /// Uses only the mount table, as on a kernel without statmount(2).
    pub fn from_mountinfo() -> Self {
        Self {
            only_table: true,
            ..Self::default()
        }
    }

    /// As above, for files that were opened since. Keeps the results of statmount(2), whose ids are
    /// never reused, and reads the mount table again when it is needed.
    pub fn for_newly_opened(&self) -> Self {
        Self {
            only_table: self.only_table,
            cached: Rc::clone(&self.cached),
            table: OnceCell::new(),
        }
    }

    /// Returns the mount that a handle is on.
    ///
    /// # Errors
    /// If the kernel does not report it.
    pub fn mount_of(&self, handle: &Handle) -> Result<MountOf, MountError> {
        // statmount(2) needs the mount's id from statx(2), which the filesystem answers.
        if handle.is_unqueried() {
            return self.by_table(handle);
        }
        match self.by_statmount(handle).filter(|_| !self.only_table) {
            Some(mount) if !is_incomplete(&mount.entry.fs_type) => Ok(mount),
            _ => self.by_table(handle),
        }
    }

    /// Opens the file that an absolute path leads to, a final symlink followed, if neither a server
    /// nor a daemon must answer the walk.
    ///
    /// # Errors
    /// See [`open_without_waiting`].
    pub fn open_without_waiting(&self, path: &Path) -> io::Result<Handle> {
        open_without_waiting(path, |handle| self.is_local(handle))
    }

    /// True if a call on the file cannot wait for a server or a daemon. False if its mount is
    /// unknown.
    pub fn is_local(&self, handle: &Handle) -> bool {
        self.mount_of(handle)
            .is_ok_and(|mount| mount.entry.fs_type.is_local())
    }

    /// True if a call on the file may wait for a server or a daemon, as far as statmount(2) reports
    /// it. Does not read the mount table.
    pub(crate) fn is_on_a_server(&self, handle: &Handle) -> bool {
        self.by_statmount(handle)
            .is_some_and(|mount| !mount.entry.fs_type.is_local())
    }

    /// The mount table, read at the first call. Lines that are no mounts are skipped.
    pub(crate) fn table(&self) -> Result<&MountTable, MountError> {
        let read = || Ok(read_mount_table_in_part()?);
        self.table.get_or_init(read).as_ref().map_err(Clone::clone)
    }

    /// The mount table, if every line was read: it may show that something is not mounted.
    pub(crate) fn complete_table(&self) -> Result<&MountTable, MountError> {
        let table = self.table()?;
        match table.skipped() {
            Some(skipped) => Err(not_parsed(skipped.clone()).into()),
            None => Ok(table),
        }
    }

    /// True if `mount` was made after `than`; both must be open. Reads the mount table.
    ///
    /// # Errors
    /// If the kernel does not report it.
    pub(crate) fn is_newer(
        &self,
        mount: &MountEntry,
        than: &MountEntry,
    ) -> Result<bool, MountError> {
        let is_newer = self.table()?.is_listed_after(mount.id, than.id);
        is_newer.ok_or(MountError::NotListed(mount.id))
    }

    /// True if anything is mounted below a directory, hidden mounts included. Reads the mount
    /// table.
    ///
    /// # Errors
    /// If the table cannot be read.
    pub fn any_below(&self, directory: &Path) -> Result<bool, MountError> {
        let table = self.table()?;
        let is_below = |point: &Path| point != directory && point.starts_with(directory);
        if table.entries().iter().any(|it| is_below(&it.mount_point)) {
            return Ok(true);
        }
        self.complete_table().map(|_| false)
    }

    /// `None` if statmount(2) does not report it. Then the mount table does, or fails with a
    /// reason.
    fn by_statmount(&self, handle: &Handle) -> Option<MountOf> {
        let unique_id = handle.unique_mount_id()?;
        let is_mount_point = handle.is_mount_root().ok()?;
        let known_point = handle.path_as_written().filter(|_| is_mount_point);
        let (entry, unique_parent) = self.statmount(unique_id, known_point).ok()?;
        let parent = match is_namespace_root(&entry) {
            true => None,
            false => match self.statmount(unique_parent, None) {
                Ok((parent, _)) => Some(parent),
                // A process may have a root below the namespace's root: then the kernel does not
                // name its parent.
                Err(error) if error.kind() == io::ErrorKind::NotFound => None,
                Err(_) => return None,
            },
        };
        Some(MountOf {
            entry,
            parent,
            is_mount_point,
        })
    }

    fn statmount(&self, unique_id: u64, mount_point: Option<&Path>) -> io::Result<Cached> {
        if let Some(cached) = self.cached.borrow().get(&unique_id) {
            return Ok(cached.clone());
        }
        let found = statmount(unique_id, mount_point)?;
        let cached = (Rc::new(found.entry), found.unique_parent);
        self.cached.borrow_mut().insert(unique_id, cached.clone());
        Ok(cached)
    }

    fn by_table(&self, handle: &Handle) -> Result<MountOf, MountError> {
        let table = self.table()?;
        let id = handle.mount_id()?;
        let Some(entry) = table.mount(id) else {
            self.complete_table()?;
            return Err(MountError::NotListed(id));
        };
        let mut parent = None;
        if !is_namespace_root(entry) {
            parent = table.mount(entry.parent);
            if parent.is_none() {
                // The parent may be in a skipped line.
                self.complete_table()?;
            }
        }
        let is_mount_point = if entry.fs_type.queries_server_for_attributes() {
            handle.is_at(&entry.mount_point)
        } else {
            handle.is_mount_root()?
        };
        let shared = |entry: &MountEntry| Rc::new(entry.clone());
        Ok(MountOf {
            entry: shared(entry),
            parent: parent.map(shared),
            is_mount_point,
        })
    }
}

/// True if mountinfo has more: the FUSE subtype, and the part of an NFS export that is mounted.
/// statmount(2) reports these since Linux 6.13, but only for a larger request.
fn is_incomplete(fs_type: &FsType) -> bool {
    fs_type.0 == "fuse" || fs_type.has_root_in_source()
}

/// True for the root of the namespace. Only some kernels show the mount below it, and no path
/// reaches that mount.
fn is_namespace_root(entry: &MountEntry) -> bool {
    is_root(&entry.mount_point)
}

// Reading mount tables, as a stream within limits.

/// Why a stream was no mount table.
#[derive(Debug, thiserror::Error)]
pub enum ReadTableError {
    /// It could not be read.
    #[error(transparent)]
    Read(#[from] io::Error),
    /// Its content was not accepted, for example because it is too large.
    #[error(transparent)]
    Table(#[from] TableError),
}

/// The kernel returns at most a page of mountinfo for each read(2). The size is for pipes.
const PIECE: usize = 16 << 10;

const OWN_TABLE: &str = "/proc/thread-self/mountinfo";

/// Reads `/proc/thread-self/mountinfo`: the thread's own namespace, which may differ from the
/// process's.
///
/// # Errors
/// If it cannot be read, or contains a line that is not a mount.
pub fn read_mount_table() -> Result<MountTable, Failure> {
    read_mount_table_in_part()?.complete().map_err(not_parsed)
}

/// As [`read_mount_table`], for readers that conclude nothing from a mount which is not listed. The
/// table names a line that is not a mount.
///
/// # Errors
/// If it cannot be read.
pub fn read_mount_table_in_part() -> Result<MountTable, Failure> {
    let file = File::open(OWN_TABLE).map_err(failed("read", OWN_TABLE.as_ref()))?;
    read_host_table_in_part(file).map_err(|error| match error {
        ReadTableError::Read(source) => failed("read", OWN_TABLE.as_ref())(source),
        ReadTableError::Table(source) => not_parsed(source),
    })
}

fn not_parsed(error: impl Into<TableError>) -> Failure {
    let source = io::Error::new(io::ErrorKind::InvalidData, error.into());
    failed("parse", OWN_TABLE.as_ref())(source)
}

/// Reads the mount table of the host, to which no container adds a line. The table names a line
/// that is not a mount.
///
/// # Errors
/// If it cannot be read, exceeds [`TableLimits::HOST`], or ends in the middle of a line.
pub fn read_host_table_in_part(text: impl Read) -> Result<MountTable, ReadTableError> {
    read_table(text, TableLimits::HOST)
}

/// Reads the mount table of a container or of any other foreign process: a `/proc/PID/mountinfo`,
/// or a descriptor over which its text arrives. The sources of the mounts are left out.
///
/// # Errors
/// If it cannot be read, exceeds [`TableLimits::CONTAINER`], ends in the middle of a line, or
/// contains a line that is not a mount.
pub fn read_container_table(text: impl Read) -> Result<MountTable, ReadTableError> {
    let table = read_table(text, TableLimits::CONTAINER)?;
    table
        .complete()
        .map_err(|error| TableError::from(error).into())
}

fn read_table(mut text: impl Read, limits: TableLimits) -> Result<MountTable, ReadTableError> {
    let mut parser = TableParser::new(limits);
    let mut piece = vec![0; PIECE];
    loop {
        match text.read(&mut piece) {
            Ok(0) => return Ok(parser.finish()?),
            Ok(length) => parser.push(&piece[..length])?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
}

// Waits for new mounts in the mount namespace of the calling thread.
//
// poll(2) of an open mountinfo returns `POLLPRI` after every change of the namespace, see
// proc_pid_mountinfo(5), but names no mount. So the mounts are listed again and compared with the
// list before: by their unique ids, which the kernel never reuses, or before Linux 6.8 by the
// whole table. The greatest id alone does not suffice: a mount gets an id before the attach.
//
// A mount that is moved keeps its id, and does not count as new.

/// The number of ids in a call.
const IDS: usize = 2048;

/// A watch of the namespace. Poll its descriptor for `POLLPRI`.
#[derive(Debug)]
pub struct MountWatch {
    table: File,
    known: Known,
}

/// The mounts at the last call.
#[derive(Debug)]
enum Known {
    /// Their unique ids, sorted.
    Ids(Vec<u64>),
    /// The part of a line that distinguishes mounts.
    Lines(HashSet<Line>),
}

/// The kernel gives the id of an unmounted mount to the next mount, and reuses device numbers, too.
type Line = (MountId, Device, PathBuf, PathBuf);

impl MountWatch {
    /// Watches from now on.
    ///
    /// # Errors
    /// If the mounts cannot be read.
    pub fn open() -> Result<Self, Failure> {
        Self::over(unique_ids)
    }

    /// As [`MountWatch::open`] on a kernel without listmount(2).
    ///
    /// # Errors
    /// As there.
    pub fn open_without_ids() -> Result<Self, Failure> {
        Self::over(|| Ok(None))
    }

    fn over(ids: fn() -> Result<Option<Vec<u64>>, Failure>) -> Result<Self, Failure> {
        // Before the list: a mount that is made meanwhile wakes the next poll.
        let table = File::open(OWN_TABLE).map_err(failed("open", OWN_TABLE.as_ref()))?;
        let known = match ids()? {
            Some(ids) => Known::Ids(ids),
            None => Known::Lines(read_mount_table()?.entries().iter().map(line).collect()),
        };
        Ok(Self { table, known })
    }

    /// The mount points of the mounts that are new since the last call. Changes before this call do
    /// not wake the next poll.
    ///
    /// # Errors
    /// If the mounts cannot be listed, or none of the new mounts can be read. The next call returns
    /// the mounts that this call could not read.
    pub fn appeared(&mut self) -> Result<Vec<PathBuf>, Failure> {
        self.forget_events()?;
        match &mut self.known {
            Known::Ids(known) => {
                let denied = || failed("list the mounts", Path::new(""))(Errno::PERM);
                let now = unique_ids()?.ok_or_else(denied)?;
                let (mut places, mut read, mut unread) = (Vec::new(), Vec::new(), None);
                for id in now {
                    if known.binary_search(&id).is_err() {
                        match mount_point(id) {
                            Ok(place) => places.extend(place),
                            // The mount is new at the next call again.
                            Err(error) => {
                                unread = Some(error);
                                continue;
                            }
                        }
                    }
                    read.push(id);
                }
                *known = read;
                match unread {
                    Some(error) if places.is_empty() => Err(error),
                    _ => Ok(places),
                }
            }
            Known::Lines(known) => {
                let table = read_mount_table()?;
                let is_new = |entry: &&MountEntry| !known.contains(&line(entry));
                let new = table.entries().iter().filter(is_new);
                let places = new.map(|entry| entry.mount_point.clone()).collect();
                *known = table.entries().iter().map(line).collect();
                Ok(places)
            }
        }
    }

    /// poll(2) returns `POLLPRI` if the namespace changed since the poll before.
    fn forget_events(&self) -> Result<(), Failure> {
        let now = Timespec::default();
        match poll(&mut [PollFd::new(&self.table, PollFlags::PRI)], Some(&now)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(failed("poll the mount table", Path::new(""))(errno)),
        }
    }
}

impl AsFd for MountWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.table.as_fd()
    }
}

fn line(entry: &MountEntry) -> Line {
    let (root, place) = (entry.root.path.clone(), entry.mount_point.clone());
    (entry.id, entry.device, root, place)
}

/// The unique ids of all mounts, sorted; `None` if the kernel or a seccomp filter does not know the
/// call.
fn unique_ids() -> Result<Option<Vec<u64>>, Failure> {
    let (mut all, mut ids) = (Vec::new(), [0; IDS]);
    loop {
        let count = match listmount(None, all.last().copied().unwrap_or(0), &mut ids) {
            Ok(count) => count,
            Err(error) => match Errno::from_io_error(&error) {
                Some(Errno::NOSYS | Errno::PERM) if all.is_empty() => return Ok(None),
                _ => return Err(failed("list the mounts", Path::new(""))(error)),
            },
        };
        all.extend_from_slice(&ids[..count]);
        if count < IDS {
            return Ok(Some(all));
        }
    }
}

/// `None` if the mount is gone since it was listed.
fn mount_point(id: u64) -> Result<Option<PathBuf>, Failure> {
    match statmount(id, None) {
        Ok(mount) => Ok(Some(mount.entry.mount_point)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed("read a mount", Path::new(""))(error)),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::*;

    /// The kernel's table, and a line that is no mount instead of those with `hidden`.
    fn mounts_without(hidden: impl Fn(&MountEntry) -> bool) -> Mounts {
        let mut text = Vec::new();
        for entry in read_mount_table().unwrap().entries() {
            if hidden(entry) {
                text.extend(b"no mount")
            } else {
                text.extend(entry.to_line())
            }
            text.push(b'\n');
        }
        let table = OnceCell::from(Ok(MountTable::from_mountinfo_in_part(&text)));
        Mounts {
            only_table: true,
            table,
            ..Mounts::default()
        }
    }

    /// `/proc` is a mount of each machine, and `/proc/self` is below it.
    #[test]
    fn a_skipped_line_leaves_the_other_mounts_known_and_proves_nothing_absent() {
        let proc = Path::new("/proc");
        let handle = Handle::of(proc).unwrap();
        let is_proc = |entry: &MountEntry| entry.mount_point == proc;

        let mounts = mounts_without(|_| false);
        assert!(mounts.mount_of(&handle).unwrap().is_mount_point);
        assert!(!mounts.any_below(Path::new("/nowhere")).unwrap());

        let mounts = mounts_without(|entry| entry.mount_point.starts_with("/sys"));
        assert!(mounts.mount_of(&handle).unwrap().is_mount_point);
        assert!(mounts.any_below(Path::new("/")).unwrap());
        for unknown in [
            mounts.any_below(Path::new("/nowhere")).unwrap_err(),
            mounts_without(is_proc).mount_of(&handle).unwrap_err(),
            // Something may be below its mount.
            mounts_without(|entry| is_root(&entry.mount_point))
                .mount_of(&handle)
                .unwrap_err(),
        ] {
            let why = bindguard_core::error_chain(&unknown);
            assert!(why.contains("of mountinfo, `no mount`: "), "{why}");
        }
    }
}
