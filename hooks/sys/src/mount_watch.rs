//! Waits for new mounts in the mount namespace of the calling thread.
//!
//! poll(2) of an open mountinfo returns `POLLPRI` after every change of the namespace, see
//! proc_pid_mountinfo(5), but names no mount. So the mounts are listed again and compared with the
//! list before: by their unique ids, which the kernel never reuses, or before Linux 6.8 by the
//! whole table. The greatest id alone does not suffice: a mount gets an id before the attach.
//!
//! A mount that is moved keeps its id, and does not count as new.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};

use bindguard_core::mount_table::{Device, MountEntry, MountId};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::failure::{Failure, failed};
use crate::mounts::{OWN_TABLE, read_mount_table};
use crate::statmount::{listmount, statmount};

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
        let table = File::open(OWN_TABLE).map_err(failed("open", OWN_TABLE.as_ref()))?;
        Self::over(table, unique_ids()?)
    }

    /// As [`MountWatch::open`] on a kernel without listmount(2).
    ///
    /// # Errors
    /// As there.
    pub fn open_without_ids() -> Result<Self, Failure> {
        let table = File::open(OWN_TABLE).map_err(failed("open", OWN_TABLE.as_ref()))?;
        Self::over(table, None)
    }

    fn over(table: File, ids: Option<Vec<u64>>) -> Result<Self, Failure> {
        let known = match ids {
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
