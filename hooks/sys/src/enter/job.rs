//! A replacement, and the message that passes the replacement to the child.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use bindguard_core::mount_table::{MountEntry, MountId};
use rustix::io::Errno;
use rustix::mount::MountPropagationFlags;

use super::descriptor_message::{receive_message, send_message};
use crate::replace::{NewMount, propagation_type};

/// A stale mount of a container, by the lines of its mount table, and the mount to put in its
/// place.
#[derive(Debug)]
pub struct Replacement<'a> {
    /// The stale mount.
    pub stale: &'a MountEntry,
    /// The parent mount.
    pub parent: Option<&'a MountEntry>,
    /// The new mount, attached nowhere; `None` if the new mount already lies beneath the stale
    /// mount.
    pub new: Option<NewMount>,
}

/// The replacement in the child.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) mount_point: PathBuf,
    pub(super) stale: MountId,
    pub(super) new: Option<NewMount>,
    pub(super) propagation: MountPropagationFlags,
    pub(super) parent: Option<Parent>,
}

/// The parent of the stale mount, and the folder of the mount point there.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Parent {
    pub(super) id: MountId,
    pub(super) mount_point: PathBuf,
    pub(super) folder: PathBuf,
    pub(super) name: OsString,
    pub(super) is_shared: bool,
    /// Its propagation as it is and shall be again.
    pub(super) propagation: MountPropagationFlags,
}

/// The longest path of the kernel, twice, and the numbers.
const MAX_SIZE: usize = 2 * 4096 + HEAD;

/// Bytes before the paths: four numbers, the length of the first path, and 1 if it is shared.
const HEAD: usize = 4 * 4 + 2 + 1;

impl Job {
    pub(super) fn of(replacement: Replacement<'_>) -> Self {
        let Replacement { stale, parent, new } = replacement;
        let on_another = parent.filter(|parent| parent.mount_point != stale.mount_point);
        Self {
            mount_point: stale.mount_point.clone(),
            stale: stale.id,
            new,
            propagation: propagation_type(&stale.propagation),
            parent: on_another.and_then(|parent| {
                let is_shared = parent.propagation.peer_group.is_some();
                let propagation = propagation_type(&parent.propagation);
                let (id, its_place) = (parent.id, &parent.mount_point);
                Parent::of(id, its_place, is_shared, propagation, &stale.mount_point)
            }),
        }
    }

    /// Sends it with the descriptor of its new mount.
    ///
    /// # Errors
    /// If the child is gone.
    pub(super) fn send(&self, socket: BorrowedFd<'_>) -> Result<(), Errno> {
        let new = self.new.as_ref().map(|new| new.mount.as_fd());
        send_message(socket, &self.to_bytes(), new.as_slice())
    }

    /// Receives a job; `None` if the agent is gone.
    pub(super) fn receive(socket: BorrowedFd<'_>) -> Option<Self> {
        let mut bytes = [0; MAX_SIZE];
        let (size, mut descriptors) = receive_message(socket, &mut bytes).ok()?;
        Self::from_bytes(bytes.get(..size)?, descriptors.pop())
    }

    fn to_bytes(&self) -> Vec<u8> {
        let place = self.mount_point.as_os_str().as_bytes();
        let none = (0, 0, false, OsStr::new(""));
        let (parent, propagation, is_shared, parent_place) =
            self.parent.as_ref().map_or(none, |parent| {
                let place = parent.mount_point.as_os_str();
                let propagation = parent.propagation.bits();
                (parent.id.0, propagation, parent.is_shared, place)
            });
        let numbers = [self.stale.0, self.propagation.bits(), parent, propagation];
        let mut bytes: Vec<u8> = numbers.into_iter().flat_map(u32::to_le_bytes).collect();
        bytes.extend((place.len() as u16).to_le_bytes());
        bytes.push(is_shared.into());
        bytes.extend_from_slice(place);
        bytes.extend_from_slice(parent_place.as_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8], new: Option<OwnedFd>) -> Option<Self> {
        let (head, paths) = bytes.split_at_checked(HEAD)?;
        let number = |at: usize| Some(u32::from_le_bytes(*head.get(at * 4..)?.first_chunk()?));
        let length = u16::from_le_bytes(*head.get(16..)?.first_chunk()?);
        let is_shared = *head.last()? != 0;
        let (place, parent_place) = paths.split_at_checked(length.into())?;
        let path = |bytes| Path::new(OsStr::from_bytes(bytes));
        let propagation = |at| Some(MountPropagationFlags::from_bits_retain(number(at)?));
        let parent = match parent_place.is_empty() {
            true => None,
            false => Parent::of(
                MountId(number(2)?),
                path(parent_place),
                is_shared,
                propagation(3)?,
                path(place),
            ),
        };
        Some(Self {
            mount_point: path(place).to_owned(),
            stale: MountId(number(0)?),
            new: new.map(|mount| NewMount { mount }),
            propagation: propagation(1)?,
            parent,
        })
    }
}

impl Parent {
    fn of(
        id: MountId,
        its_place: &Path,
        is_shared: bool,
        propagation: MountPropagationFlags,
        mount_point: &Path,
    ) -> Option<Self> {
        Some(Self {
            id,
            mount_point: its_place.to_owned(),
            folder: mount_point.parent()?.to_owned(),
            name: mount_point.file_name()?.to_owned(),
            is_shared,
            propagation,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_arrives_as_it_was_sent() {
        let parent = Parent::of(
            MountId(7),
            Path::new("/"),
            true,
            MountPropagationFlags::SHARED,
            Path::new("/etc/a b"),
        );
        for parent in [parent, None] {
            let job = Job {
                mount_point: "/etc/a b".into(),
                stale: MountId(u32::MAX),
                new: None,
                propagation: MountPropagationFlags::DOWNSTREAM,
                parent,
            };
            let bytes = job.to_bytes();
            let received = Job::from_bytes(&bytes, None).unwrap();
            assert_eq!(format!("{received:?}"), format!("{job:?}"));
            assert!(Job::from_bytes(&bytes[..HEAD - 1], None).is_none());
        }
    }
}
