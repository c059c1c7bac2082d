//! What the kernel says of the mount that a held file is on.
//!
//! statx(2) and statmount(2) tell it in microseconds, however many mounts a node has. Before Linux 6.8, and where the call
//! is denied, the mount table is read, once, when it is first asked for: that is after everything of interest is held, so
//! mount ids still name the mounts that they named.

use std::cell::{OnceCell, RefCell};
use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::rc::Rc;

use bindguard_core::mount_table::{FsType, MountEntry, MountTable, StatmountEntry};
use bindguard_core::paths::is_root;

use crate::handle::Handle;
use crate::mountinfo::{MountinfoError, read_mount_table};
use crate::statmount::statmount;

/// The mounts of the calling thread's namespace. Hold what is to be looked at before making one.
#[derive(Debug, Default)]
pub struct Mounts {
    only_table: bool,
    /// What statmount told, by unique id: most sources of a node share a few mounts.
    told: Rc<RefCell<HashMap<u64, Told>>>,
    table: OnceCell<Result<MountTable, MountinfoError>>,
}

/// A mount, and the unique id of its parent.
#[derive(Debug, Clone)]
struct Told {
    entry: Rc<MountEntry>,
    unique_parent: u64,
}

/// The mount that something is on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountOf {
    /// The mount itself.
    pub entry: Rc<MountEntry>,
    /// The mount that it is mounted on; `None` for the root of the namespace.
    pub parent: Option<Rc<MountEntry>>,
    /// The thing is the very root of its mount: its path is a mount point.
    pub is_mount_point: bool,
}

impl MountOf {
    /// Another mount lies directly below this one at the same mount point. So it looks when a swap was cut off between
    /// attaching the new mount beneath the stale one and detaching the stale one.
    pub fn covers_its_equal(&self) -> bool {
        self.parent.as_ref().is_some_and(|parent| parent.mount_point == self.entry.mount_point)
    }
}

impl Mounts {
    /// Looks into the mount table only, as on a kernel without statmount.
    pub fn from_mountinfo() -> Self {
        Self { only_table: true, ..Self::default() }
    }

    /// The same look at what is held by now: what statmount told is kept, by ids that are never given again, and a table that was
    /// read is read anew.
    pub fn for_what_is_held(&self) -> Self {
        Self { only_table: self.only_table, told: Rc::clone(&self.told), table: OnceCell::new() }
    }

    /// Looks at the mount that a handle is on.
    ///
    /// # Errors
    /// What keeps it from being told, in one line.
    pub fn mount_of(&self, handle: &Handle) -> Result<MountOf, String> {
        // statmount is told the mount by statx, and that is the filesystem's to answer.
        if handle.is_wary() {
            return self.by_table(handle);
        }
        match self.by_statmount(handle).filter(|_| !self.only_table) {
            Some(mount) if !is_half_told(&mount.entry.fs_type) => Ok(mount),
            _ => self.by_table(handle),
        }
    }

    /// Whether a call on what is held cannot wait for somebody else. What cannot be told is not.
    pub fn is_local(&self, handle: &Handle) -> bool {
        self.mount_of(handle).is_ok_and(|mount| mount.entry.fs_type.is_local())
    }

    /// Whether what is held may have to wait for a server or a daemon, as far as statmount tells: nobody reads a mount table
    /// for this.
    pub(crate) fn is_on_a_server(&self, handle: &Handle) -> bool {
        self.by_statmount(handle).is_some_and(|mount| !mount.entry.fs_type.is_local())
    }

    /// The mount table, as it was when it was first asked for.
    pub(crate) fn table(&self) -> Result<&MountTable, String> {
        self.table.get_or_init(read_mount_table).as_ref().map_err(|error| error.in_full())
    }

    /// Whether a mount was made after another one, both being held. Reads the mount table.
    ///
    /// # Errors
    /// What keeps that from being told, in one line.
    pub(crate) fn is_newer(&self, mount: &MountEntry, than: &MountEntry) -> Result<bool, String> {
        let is_newer = self.table()?.is_listed_after(mount.id, than.id);
        is_newer.ok_or_else(|| format!("mount {} or {} is not in the mount table", mount.id.0, than.id.0))
    }

    /// Whether anything is mounted below a directory, hidden mounts included. Reads the mount table.
    ///
    /// # Errors
    /// What keeps the table from being read, in one line.
    pub fn any_below(&self, directory: &Path) -> Result<bool, String> {
        let table = self.table()?;
        let is_below = |point: &Path| point != directory && point.starts_with(directory);
        Ok(table.entries().iter().any(|entry| is_below(&entry.mount_point)))
    }

    /// `None`: statmount cannot tell. Then the mount table can, or can say why not.
    fn by_statmount(&self, handle: &Handle) -> Option<MountOf> {
        let unique_id = handle.unique_mount_id().ok()??;
        let is_mount_point = handle.is_mount_root().ok()?;
        let known_point = handle.path_as_written().filter(|_| is_mount_point);
        let Told { entry, unique_parent } = self.statmount(unique_id, known_point).ok()?;
        let parent = match is_namespace_root(&entry) {
            true => None,
            false => match self.statmount(unique_parent, None) {
                Ok(parent) => Some(parent.entry),
                // A process's own root may be less than the namespace's: what it is mounted on cannot be named.
                Err(error) if error.kind() == io::ErrorKind::NotFound => None,
                Err(_) => return None,
            },
        };
        Some(MountOf { entry, parent, is_mount_point })
    }

    fn statmount(&self, unique_id: u64, mount_point: Option<&Path>) -> io::Result<Told> {
        if let Some(told) = self.told.borrow().get(&unique_id) {
            return Ok(told.clone());
        }
        let StatmountEntry { entry, unique_parent } = statmount(unique_id, mount_point)?;
        let told = Told { entry: Rc::new(entry), unique_parent };
        self.told.borrow_mut().insert(unique_id, told.clone());
        Ok(told)
    }

    fn by_table(&self, handle: &Handle) -> Result<MountOf, String> {
        let table = self.table()?;
        let id = handle.mount_id().map_err(|error| error.in_full())?;
        let entry = table.mount(id).ok_or_else(|| format!("mount {} is not in the mount table", id.0))?;
        let parent = table.mount(entry.parent).filter(|_| !is_namespace_root(entry));
        let is_mount_point = match entry.fs_type.asks_for_attributes() {
            true => handle.is_at(&entry.mount_point),
            false => handle.is_mount_root().map_err(|error| error.in_full())?,
        };
        let shared = |entry: &MountEntry| Rc::new(entry.clone());
        Ok(MountOf { entry: shared(entry), parent: parent.map(shared), is_mount_point })
    }
}

/// mountinfo knows which FUSE it is, and what of an NFS is shown. statmount does since Linux 6.13, to whom that is worth a
/// longer question.
fn is_half_told(fs_type: &FsType) -> bool {
    fs_type.0 == "fuse" || fs_type.has_root_in_source()
}

/// The namespace's root is mounted on a mount that some kernels show and some do not, and that nobody can reach.
fn is_namespace_root(entry: &MountEntry) -> bool {
    is_root(&entry.mount_point)
}
