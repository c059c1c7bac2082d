//! The child in a container's mount namespace: it executes requests until the socket closes, and
//! nothing else.
//!
//! It walks in the container only to open the mount points; that walk may wait for a server or a
//! daemon of the container, which is why it is a process of its own. Everything after it works on
//! open descriptors.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::PathBuf;

use bindguard_core::mount_table::MountAttributes;
use rustix::fs::{
    AtFlags, CWD, FileType, OFlags, ResolveFlags, StatxFlags, Timespec, Timestamps, UTIME_NOW,
};
use rustix::io::Errno;
use rustix::mount::{MountPropagationFlags, MoveMountFlags, UnmountFlags};
use serde::{Deserialize, Serialize};

use crate::enter::Replacement;
use crate::handle::{open_folder, open_name, statx_of, type_in};
use crate::kernel::{adding, mount_setattr};
use crate::own_process::{end_with_parent, receive, send};
use crate::replace::{
    FolderCopy, NewMount, ReplaceError, Step, at, attach_as_root, attach_beneath, copy_of,
    detach_link, enter_mounts, enter_private_mounts, propagation_type,
};
use crate::target::open_without_links;

/// The result of a step of a child.
pub(super) type Done = Result<(), ReplaceError>;

/// The work of a child with one of the replacements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Action {
    /// Opens the mount point, if the stale mount is there.
    Open,
    /// Attaches the new mount beneath the stale one: `MOVE_MOUNT_BENEATH`, Linux 6.5 and newer.
    AttachBeneath,
    /// Attaches the new mount beneath the stale one through propagation. The call can succeed
    /// although the mount did not arrive: check the table. The propagation of the parent mount is
    /// restored in any case.
    Tuck,
    /// Detaches the stale mount. It is no error if that mount was detached already.
    Detach,
    /// Gives a tucked mount the propagation of the mount that it replaced, after that one was
    /// detached.
    SetPropagation,
    /// Sets the times of the file beneath the mount, so that programs that watch its folder get an
    /// event. Fails if the folder is on a read-only filesystem, or is no longer the parent of the
    /// mount point.
    Touch,
    /// Gives an open mount itself the propagation of its line in the replacement.
    Restore,
    /// Makes the stale mount, and the mounts below, private: the detach of these mounts then reaches
    /// no other namespace.
    MakePrivate,
    /// Unmounts the mount, unless it is in use: `EBUSY`.
    Unmount,
}

/// A replacement as its child receives it; the new mount comes as a descriptor.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Job {
    /// A path may have any bytes, which serde passes in an `OsString` alone.
    mount_point: OsString,
    stale: u32,
    propagation: u32,
    parent: Option<Parent>,
}

/// The parent of the stale mount, and the folder of the mount point there.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Parent {
    id: u32,
    mount_point: OsString,
    folder: OsString,
    name: OsString,
    /// Its propagation as it is and shall be again.
    propagation: u32,
}

impl Job {
    pub(super) fn of(replacement: &Replacement<'_>) -> Self {
        let stale = replacement.stale;
        let place = &stale.mount_point;
        let parent = replacement.parent.and_then(|parent| {
            (parent.mount_point != *place).then_some(())?;
            Some(Parent {
                id: parent.id.0,
                mount_point: parent.mount_point.clone().into(),
                folder: place.parent()?.into(),
                name: place.file_name()?.to_owned(),
                propagation: propagation_type(&parent.propagation).bits(),
            })
        });
        Self {
            mount_point: place.clone().into(),
            stale: stale.id.0,
            propagation: propagation_type(&stale.propagation).bits(),
            parent,
        }
    }
}

/// A job, and its descriptors in the container.
struct Place {
    job: Job,
    new: Option<NewMount>,
    stale: Option<OwnedFd>,
    folder: Option<OwnedFd>,
    parent: Option<OwnedFd>,
}

/// Receives this number of jobs, enters the namespace, reports that, and serves requests.
///
/// # Errors
/// If the agent closes its end or dies.
pub(super) fn serve_container(
    socket: &OwnedFd,
    namespace: &OwnedFd,
    jobs: usize,
) -> io::Result<()> {
    let mut places = Vec::new();
    for _ in 0..jobs {
        let (job, mut descriptors) = receive(socket)?;
        places.push(Place {
            job,
            new: descriptors.pop().map(|mount| NewMount { mount }),
            stale: None,
            folder: None,
            parent: None,
        });
    }
    let entered = enter(namespace);
    send(socket, &entered, &[])?;
    if entered.is_err() {
        return Ok(());
    }
    loop {
        let ((action, index), _): ((Action, usize), _) = receive(socket)?;
        let done = match places.get_mut(index) {
            Some(place) => place.act(action, namespace),
            None => Err(ReplaceError::Failed(Step::OpenMountPoint, Errno::INVAL)),
        };
        send(socket, &done, &[])?;
    }
}

/// Then works in the host's `/proc/self/fd`: the container may have no `/proc`, or a fake `/proc`.
fn enter(namespace: &OwnedFd) -> Done {
    let own = open_folder(c"/proc/self/fd").map_err(at(Step::OpenProc))?;
    enter_mounts(namespace).map_err(at(Step::Enter))?;
    rustix::process::fchdir(own).map_err(at(Step::OpenProc))
}

impl Place {
    fn act(&mut self, action: Action, namespace: &OwnedFd) -> Done {
        match action {
            Action::Open => self.open(),
            Action::AttachBeneath => match (&self.new, &self.stale) {
                (Some(new), Some(stale)) => attach_beneath(new, stale),
                _ => Err(not_open(Step::AttachBeneath)),
            },
            Action::Tuck => {
                // An agent that is killed now must not leave the parent mount shared.
                end_with_parent(false);
                let done = self.tuck(namespace);
                end_with_parent(true);
                done
            }
            Action::Detach => detach_link(&link(self.stale(Step::Detach)?)),
            Action::SetPropagation => {
                // A mount below a shared mount arrives shared. The child gives the new mount the
                // propagation of the stale mount.
                let (parent, folder) = self.folder(Step::SetPropagation)?;
                open_name(folder, &parent.name, OFlags::empty())
                    .and_then(|new| change(&new, self.propagation()))
                    .map_err(at(Step::SetPropagation))
            }
            Action::Touch => {
                let (parent, folder) = self.folder(Step::CopyForTouch)?;
                touch_beneath(folder, &parent.name)
            }
            Action::Restore => change(self.stale(Step::SetPropagation)?, self.propagation())
                .map_err(at(Step::SetPropagation)),
            Action::MakePrivate => {
                let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
                change(self.stale(Step::MakeStalePrivate)?, private)
                    .map_err(at(Step::MakeStalePrivate))
            }
            Action::Unmount => self.unmount(),
        }
    }

    fn propagation(&self) -> MountPropagationFlags {
        MountPropagationFlags::from_bits_retain(self.job.propagation)
    }

    fn stale(&self, step: Step) -> Result<&OwnedFd, ReplaceError> {
        self.stale.as_ref().ok_or(not_open(step))
    }

    fn folder(&self, step: Step) -> Result<(&Parent, &OwnedFd), ReplaceError> {
        let opened = self.job.parent.as_ref().zip(self.folder.as_ref());
        opened.ok_or(not_open(step))
    }

    /// Opens the mount point that the mount table names, and the mount that contains it. The
    /// container may have changed the mounts since the table was read: then another mount is there,
    /// and the child does nothing.
    fn open(&mut self) -> Done {
        let stale = walk(&self.job.mount_point).map_err(at(Step::OpenMountPoint))?;
        if !is_on(&stale, self.job.stale) {
            return Err(ReplaceError::OtherMount);
        }
        if let Some(new) = &self.new {
            require_same_type(&new.mount, &stale)?;
        }
        (self.folder, self.parent) = (None, None);
        if let Some(parent) = &self.job.parent {
            let folder = walk(&parent.folder).map_err(at(Step::OpenFolder))?;
            let root = walk(&parent.mount_point).map_err(at(Step::OpenParent))?;
            if is_on(&folder, parent.id) && is_on(&root, parent.id) {
                (self.folder, self.parent) = (Some(folder), Some(root));
            }
        }
        self.stale = Some(stale);
        Ok(())
    }

    /// The way for kernels before 6.5. The new mount is attached to a copy of the parent mount, and
    /// propagation puts the new mount beneath the stale mount. Meanwhile the parent mount is
    /// shared.
    fn tuck(&self, namespace: &OwnedFd) -> Done {
        let (Some(parent), Some(folder), Some(root)) =
            (&self.job.parent, &self.folder, &self.parent)
        else {
            return Err(ReplaceError::Failed(Step::OpenFolder, Errno::OPNOTSUPP));
        };
        let new = self.new.as_ref().ok_or(not_open(Step::AttachNew))?;
        let propagation = MountPropagationFlags::from_bits_retain(parent.propagation);
        let is_shared = propagation == MountPropagationFlags::SHARED;
        if !is_shared {
            change(root, MountPropagationFlags::SHARED).map_err(at(Step::ShareParent))?;
        }
        let mut tucked = FolderCopy::of(folder);
        // A mount that was shared has its peer group by now, and would lose the group's other
        // mounts. Else the parent becomes a slave of its copy. Then the new mounts arrive as slaves
        // of those in the copy, not as their peers. When the copy's namespace ends, the kernel
        // gives slaves the masters of their masters: the new mounts and the parent have the
        // propagation of before the attach, also if this child is killed.
        let is_slave = !is_shared && self.propagation() != MountPropagationFlags::SHARED;
        if is_slave && tucked.is_ok() {
            let changed = change(root, MountPropagationFlags::DOWNSTREAM);
            tucked = changed.map_err(at(Step::ShareParent)).and(tucked);
        }
        let tucked = tucked.and_then(|copy| {
            // The namespace of the copy ends before this returns, unlike that of a thread.
            let own = open_folder(c".").map_err(at(Step::OpenProc))?;
            let attached = enter_private_mounts()
                .and_then(|()| copy.attach())
                .and_then(|()| copy.attach_new(new, &parent.name));
            drop(copy);
            enter_mounts(namespace)
                .and_then(|()| rustix::process::fchdir(own))
                .map_err(at(Step::Return))?;
            attached
        });
        if is_shared {
            return tucked;
        }
        tucked.and(change(root, propagation).map_err(at(Step::RestoreParent)))
    }

    /// Unmounts the mount by its name in the folder of its parent. No descriptor of the child may
    /// be on the mount: the mount would be busy. So the name is compared again before.
    fn unmount(&mut self) -> Done {
        drop((self.stale.take(), self.parent.take()));
        let folder = self.folder.take();
        let (Some(parent), Some(folder)) = (&self.job.parent, folder) else {
            return Err(not_open(Step::OpenFolder));
        };
        let own = open_folder(c".").map_err(at(Step::OpenProc))?;
        let named =
            open_name(&folder, &parent.name, OFlags::empty()).map_err(at(Step::OpenMountPoint))?;
        if !is_on(&named, self.job.stale) {
            return Err(ReplaceError::OtherMount);
        }
        drop(named);
        rustix::process::fchdir(&folder).map_err(at(Step::OpenFolder))?;
        let unmounted = rustix::mount::unmount(&parent.name, UnmountFlags::NOFOLLOW);
        rustix::process::fchdir(own).map_err(at(Step::OpenProc))?;
        unmounted.map_err(at(Step::Unmount))
    }
}

/// The error of a request for a place that was not opened.
fn not_open(step: Step) -> ReplaceError {
    ReplaceError::Failed(step, Errno::BADF)
}

/// The mount point's file on its own mount, without the mount above it: the times of that file
/// change, and nothing else. Programs that watch the folder get an event of its name. The copy is
/// as read-only as the mount that the container sees.
fn touch_beneath(folder: &OwnedFd, name: &OsString) -> Done {
    let copy = copy_of(folder, false).map_err(at(Step::CopyForTouch))?;
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: UTIME_NOW,
    };
    let times = Timestamps {
        last_access: now,
        last_modification: now,
    };
    rustix::fs::utimensat(&copy, name, &times, AtFlags::SYMLINK_NOFOLLOW).map_err(at(Step::Touch))
}

/// Opens what the mount table names. The kernel prints paths without symlinks: a symlink on the way
/// was put there since.
fn walk(path: &OsString) -> Result<OwnedFd, Errno> {
    open_without_links(CWD, path.as_ref(), OFlags::empty(), ResolveFlags::empty())
}

fn is_on(file: &OwnedFd, mount: u32) -> bool {
    statx_of(file, StatxFlags::MNT_ID).is_ok_and(|stat| stat.stx_mnt_id == u64::from(mount))
}

/// Compares the types of two files: a directory, a file, a socket and so on. The kernel itself
/// distinguishes only directories when it mounts.
fn require_same_type(one: &OwnedFd, other: &OwnedFd) -> Done {
    let kind = |file: &OwnedFd| -> Result<FileType, ReplaceError> {
        let stat = statx_of(file, StatxFlags::TYPE).map_err(at(Step::CompareTypes))?;
        Ok(type_in(&stat))
    };
    if kind(one)? == kind(other)? {
        Ok(())
    } else {
        Err(ReplaceError::OtherType)
    }
}

/// Sets the propagation of the mount whose root a descriptor refers to.
fn change(mount: &OwnedFd, to: MountPropagationFlags) -> Result<(), Errno> {
    rustix::mount::mount_change(link(mount), to)
}

/// The link of a descriptor in the host's `/proc/self/fd`, where the child works.
fn link(descriptor: &OwnedFd) -> PathBuf {
    descriptor.as_raw_fd().to_string().into()
}

// The child that completes a tree of new mounts, which is attached nowhere.
//
// move_mount(2) before Linux 6.15 and mount_setattr(2) refuse a place below the top of such a tree.
// So the child attaches the tree in a mount namespace of its own, completes the tree there, and
// passes a copy back. The walk to a place in the tree may wait for a server or a daemon, which is
// why the child is a process.

/// A change at a place of a tree. A new mount comes as a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum TreeChange {
    /// Adds attributes to the mount at this place.
    Restrict(MountAttributes),
    Attach,
    /// Attaches a new mount, if the tree has a place of the same type.
    TryAttach,
}

/// Attaches the tree in a mount namespace of its own, makes this number of changes, and passes a
/// copy of the tree back. The namespace ends with the child.
///
/// # Errors
/// If the agent is gone.
pub(super) fn serve_tree(socket: &OwnedFd, tree: &OwnedFd, parts: usize) -> io::Result<()> {
    let mut done =
        enter_private_mounts().and_then(|()| attach_as_root(tree).map_err(at(Step::AttachTree)));
    for _ in 0..parts {
        if done.is_err() {
            break;
        }
        send(socket, &done, &[])?;
        let ((path, to), mut descriptors) = receive(socket)?;
        done = change_tree(tree, path, to, descriptors.pop());
    }
    // The result of the last part, and then of the copy.
    if done.is_ok() {
        send(socket, &done, &[])?;
    }
    let copy = done.and_then(|()| copy_of(tree, true).map_err(at(Step::CopyTree)));
    let mount = copy.as_ref().ok().map(AsFd::as_fd);
    send(socket, &copy.as_ref().map(drop), mount.as_slice())?;
    // The agent kills this child. If the agent is gone, the read ends.
    let _ = rustix::io::read(socket, &mut [0; 1]);
    Ok(())
}

fn change_tree(tree: &OwnedFd, path: OsString, change: TreeChange, mount: Option<OwnedFd>) -> Done {
    // No symlink is followed: a container may have written the volume.
    let place = open_without_links(tree, path.as_ref(), OFlags::empty(), ResolveFlags::BENEATH);
    let place = match place.map_err(at(Step::OpenMountPoint)) {
        Err(_) if change == TreeChange::TryAttach => return Ok(()),
        place => place?,
    };
    if let TreeChange::Restrict(attributes) = change {
        return mount_setattr(&place, 0, &adding(attributes)).map_err(at(Step::SetAttributes));
    }
    let mount = mount.ok_or(ReplaceError::Failed(Step::AttachNested, Errno::BADF))?;
    match require_same_type(&place, &mount) {
        Err(ReplaceError::OtherType) if change == TreeChange::TryAttach => return Ok(()),
        compared => compared?,
    }
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    rustix::mount::move_mount(&mount, c"", &place, c"", flags).map_err(at(Step::AttachNested))
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use strum::VariantArray;

    use super::*;
    use crate::own_process::sockets;

    #[test]
    fn every_message_arrives_as_it_was_sent() {
        let (ours, theirs) = sockets().unwrap();
        let failed = Step::VARIANTS
            .iter()
            .map(|step| Err(ReplaceError::Failed(*step, Errno::INVAL)));
        let others = [
            Ok(()),
            Err(ReplaceError::OtherMount),
            Err(ReplaceError::OtherType),
            Err(ReplaceError::Overtaken),
        ];
        for reply in failed.chain(others) {
            send(&ours, &reply, &[]).unwrap();
            assert_eq!(receive::<Done>(&theirs).unwrap().0, reply);
        }
        let longest = || OsString::from_vec(vec![0xff; 4096]);
        for parent in [None, Some(longest())] {
            let parent = parent.map(|mount_point| Parent {
                id: 7,
                mount_point,
                folder: longest(),
                name: OsString::from_vec(vec![0xff; 255]),
                propagation: MountPropagationFlags::SHARED.bits(),
            });
            let job = Job {
                mount_point: longest(),
                stale: u32::MAX,
                propagation: MountPropagationFlags::DOWNSTREAM.bits(),
                parent,
            };
            send(&ours, &job, &[]).unwrap();
            assert_eq!(receive::<Job>(&theirs).unwrap().0, job);
        }
        drop(ours);
        let ended = receive::<Job>(&theirs).unwrap_err();
        assert_eq!(ended.kind(), io::ErrorKind::UnexpectedEof);
    }
}
