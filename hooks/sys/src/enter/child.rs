//! The child in a container's mount namespace: it executes requests until the socket closes, and
//! nothing else.
//!
//! It walks in the container only to open the mount points; that walk may wait for a server or a
//! daemon of the container, which is why it is a process of its own. Everything after it works on
//! open descriptors.

use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use bindguard_core::mount_table::MountId;
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, StatxFlags, Timespec, Timestamps, UTIME_NOW,
};
use rustix::io::Errno;
use rustix::mount::{MountPropagationFlags, UnmountFlags};
use rustix::thread::LinkNameSpaceType;

use crate::enter::helper_process::{Action, Job, Parent, Reply, Request};
use crate::fork::end_with_parent;
use crate::replace::{
    FolderCopy, NewMount, ReplaceError, Step, at, attach_beneath, copy_of, detach_link,
    enter_private_mounts,
};
use crate::target::open_without_links;

/// The child's view of its work.
struct Child<'a> {
    namespace: &'a OwnedFd,
    places: Vec<Place>,
}

/// A job, and its descriptors in the container.
struct Place {
    job: Job,
    stale: Option<OwnedFd>,
    folder: Option<OwnedFd>,
    parent: Option<OwnedFd>,
}

type Done = Result<(), ReplaceError>;

/// Receives this number of jobs, enters the namespace, reports that, and serves requests until the
/// agent closes its end or dies.
pub(super) fn serve_container(socket: &OwnedFd, namespace: &OwnedFd, jobs: u16) {
    let received = (0..jobs).map(|_| Job::receive(socket.as_fd()).map(Place::of));
    let Some(places) = received.collect() else {
        return;
    };
    // If the agent is gone, the next read ends the child.
    let reply = |done| _ = rustix::io::write(socket, &Reply(done).to_bytes());
    let mut child = Child { namespace, places };
    let entered = child.enter();
    reply(entered);
    if entered.is_err() {
        return;
    }
    let mut bytes = [0; Request::SIZE];
    while let Ok(Request::SIZE) = rustix::io::read(socket, &mut bytes) {
        match Request::from_bytes(bytes) {
            Some(request) => reply(child.act(request)),
            None => return,
        }
    }
}

impl Place {
    fn of(job: Job) -> Self {
        Self {
            job,
            stale: None,
            folder: None,
            parent: None,
        }
    }
}

impl Child<'_> {
    /// Then works in the host's `/proc/self/fd`: the container may have no `/proc`, or a fake
    /// `/proc`.
    fn enter(&self) -> Done {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let own =
            rustix::fs::open(c"/proc/self/fd", flags, Mode::empty()).map_err(at(Step::OpenProc))?;
        self.set_namespace().map_err(at(Step::Enter))?;
        rustix::process::fchdir(own).map_err(at(Step::OpenProc))
    }

    fn set_namespace(&self) -> Result<(), Errno> {
        rustix::thread::move_into_link_name_space(
            self.namespace.as_fd(),
            Some(LinkNameSpaceType::Mount),
        )
    }

    fn act(&mut self, Request { action, index }: Request) -> Done {
        match action {
            Action::Open => self.open(index),
            Action::AttachBeneath => self.attach_beneath(index),
            Action::Tuck => self.tuck(index),
            Action::Detach => self.detach(index),
            Action::SetPropagation => self.set_propagation(index),
            Action::Touch => self.touch(index),
            Action::Restore => self.restore_open(index),
            Action::MakePrivate => self.make_private(index),
            Action::Unmount => self.unmount(index),
        }
    }

    fn place(&self, index: u16) -> Result<&Place, ReplaceError> {
        let place = self.places.get(usize::from(index));
        place.ok_or(ReplaceError::Failed(Step::OpenMountPoint, Errno::INVAL))
    }

    /// Opens the mount point that the mount table names, and the mount that contains it. The
    /// container may have changed the mounts since the table was read: then another mount is there,
    /// and the child does nothing.
    fn open(&mut self, index: u16) -> Done {
        let job = &self.place(index)?.job;
        let stale = walk(&job.mount_point).map_err(at(Step::OpenMountPoint))?;
        if !is_on(&stale, job.stale) {
            return Err(ReplaceError::OtherMount);
        }
        if let Some(new) = &job.new
            && type_of(&new.mount).map_err(at(Step::CompareTypes))?
                != type_of(&stale).map_err(at(Step::CompareTypes))?
        {
            return Err(ReplaceError::OtherType);
        }
        let (mut folder, mut root) = (None, None);
        if let Some(parent) = &job.parent {
            let opened_folder = walk(&parent.folder).map_err(at(Step::OpenFolder))?;
            let opened_root = walk(&parent.mount_point).map_err(at(Step::OpenParent))?;
            if is_on(&opened_folder, parent.id) && is_on(&opened_root, parent.id) {
                (folder, root) = (Some(opened_folder), Some(opened_root));
            }
        }
        if let Some(place) = self.places.get_mut(usize::from(index)) {
            (place.stale, place.folder, place.parent) = (Some(stale), folder, root);
        }
        Ok(())
    }

    fn attach_beneath(&self, index: u16) -> Done {
        let place = self.place(index)?;
        let opened = place.job.new.as_ref().zip(place.stale.as_ref());
        let (new, stale) = opened.ok_or_else(not_open(Step::AttachBeneath))?;
        attach_beneath(new, stale)
    }

    /// The way for kernels before 6.5. The new mount is attached to a copy of the parent mount, and
    /// propagation puts the new mount beneath the stale mount. Meanwhile the parent mount is
    /// shared.
    fn tuck(&self, index: u16) -> Done {
        let place = self.place(index)?;
        let no_parent = || ReplaceError::Failed(Step::OpenFolder, Errno::OPNOTSUPP);
        let parent = place.job.parent.as_ref().ok_or_else(no_parent)?;
        let opened = place.folder.as_ref().zip(place.parent.as_ref());
        let (folder, root) = opened.ok_or_else(no_parent)?;
        let new = place.job.new.as_ref();
        let new = new.ok_or_else(not_open(Step::AttachNew))?;
        // A mount that was shared has its peer group by now, and would lose the group's other mounts.
        let is_slave = !parent.is_shared && place.job.propagation != MountPropagationFlags::SHARED;
        // An agent that is killed now must not leave the parent mount shared.
        end_with_parent(false);
        let done = self.tuck_through_shared(parent, folder, root, new, is_slave);
        end_with_parent(true);
        done
    }

    /// With `is_slave`, the parent becomes a slave of its copy. Then the new mounts arrive as slaves
    /// of those in the copy, not as their peers. When the copy's namespace ends, the kernel gives
    /// slaves the masters of their masters: the new mounts and the parent have the propagation of
    /// before the attach, also if this child is killed.
    fn tuck_through_shared(
        &self,
        parent: &Parent,
        folder: &OwnedFd,
        root: &OwnedFd,
        new: &NewMount,
        is_slave: bool,
    ) -> Done {
        if !parent.is_shared {
            change(root, MountPropagationFlags::SHARED).map_err(at(Step::ShareParent))?;
        }
        let mut tucked = FolderCopy::of(folder);
        if is_slave && tucked.is_ok() {
            let changed = change(root, MountPropagationFlags::DOWNSTREAM);
            tucked = changed.map_err(at(Step::ShareParent)).and(tucked);
        }
        let tucked = tucked.and_then(|copy| self.tuck_through_copy(copy, &parent.name, new));
        let restored = match parent.is_shared {
            true => Ok(()),
            false => change(root, parent.propagation).map_err(at(Step::RestoreParent)),
        };
        tucked.and(restored)
    }

    /// The namespace of the copy ends before this returns, unlike that of a thread.
    fn tuck_through_copy(&self, copy: FolderCopy, name: &OsStr, new: &NewMount) -> Done {
        let own = rustix::fs::open(c".", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
            .map_err(at(Step::OpenProc))?;
        let attached = enter_private_mounts()
            .and_then(|()| copy.attach())
            .and_then(|()| copy.attach_new(new, name));
        drop(copy);
        self.set_namespace().map_err(at(Step::Return))?;
        rustix::process::fchdir(own).map_err(at(Step::Return))?;
        attached
    }

    /// Unmounts the mount by its name in the folder of its parent. No descriptor of the child may
    /// be on the mount: the mount would be busy. So the name is compared again before.
    fn unmount(&mut self, index: u16) -> Done {
        let opened = self.places.get_mut(usize::from(index));
        let opened = opened.and_then(|place| {
            drop((place.stale.take(), place.parent.take()));
            let name = place.job.parent.as_ref()?.name.clone();
            Some((place.job.stale, place.folder.take()?, name))
        });
        let (mount, folder, name) = opened.ok_or_else(not_open(Step::OpenFolder))?;
        let own = rustix::fs::open(c".", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
            .map_err(at(Step::OpenProc))?;
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let named = rustix::fs::openat(&folder, &name, flags, Mode::empty())
            .map_err(at(Step::OpenMountPoint))?;
        if !is_on(&named, mount) {
            return Err(ReplaceError::OtherMount);
        }
        drop(named);
        rustix::process::fchdir(&folder).map_err(at(Step::OpenFolder))?;
        let unmounted = rustix::mount::unmount(&name, UnmountFlags::NOFOLLOW);
        rustix::process::fchdir(own).map_err(at(Step::OpenProc))?;
        unmounted.map_err(at(Step::Unmount))
    }

    fn detach(&self, index: u16) -> Done {
        let stale = self.place(index)?.stale.as_ref();
        detach_link(&link(stale.ok_or_else(not_open(Step::Detach))?))
    }

    fn touch(&self, index: u16) -> Done {
        let place = self.place(index)?;
        let opened = place.job.parent.as_ref().zip(place.folder.as_ref());
        let (parent, folder) = opened.ok_or_else(not_open(Step::CopyForTouch))?;
        touch_beneath(folder, &parent.name)
    }

    /// Gives the opened mount the propagation of the job.
    fn restore_open(&self, index: u16) -> Done {
        let place = self.place(index)?;
        let mount = place.stale.as_ref();
        let mount = mount.ok_or_else(not_open(Step::SetPropagation))?;
        change(mount, place.job.propagation).map_err(at(Step::SetPropagation))
    }

    /// Makes the mounts below private, too, so that a detach reaches no other namespace.
    fn make_private(&self, index: u16) -> Done {
        let stale = self.place(index)?.stale.as_ref();
        let stale = stale.ok_or_else(not_open(Step::MakeStalePrivate))?;
        let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
        change(stale, private).map_err(at(Step::MakeStalePrivate))
    }

    /// A mount below a shared mount arrives shared. The child gives the new mount the propagation of
    /// the stale mount.
    fn set_propagation(&self, index: u16) -> Done {
        let place = self.place(index)?;
        let opened = place.job.parent.as_ref().zip(place.folder.as_ref());
        let (parent, folder) = opened.ok_or_else(not_open(Step::SetPropagation))?;
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let new = rustix::fs::openat(folder, &parent.name, flags, Mode::empty())
            .map_err(at(Step::SetPropagation))?;
        change(&new, place.job.propagation).map_err(at(Step::SetPropagation))
    }
}

/// The error of a request for a place that was not opened.
fn not_open(step: Step) -> impl FnOnce() -> ReplaceError {
    move || ReplaceError::Failed(step, Errno::BADF)
}

/// The mount point's file on its own mount, without the mount above it: the times of that file
/// change, and nothing else. Programs that watch the folder get an event of its name. The copy is
/// as read-only as the mount that the container sees.
fn touch_beneath(folder: &OwnedFd, name: &OsStr) -> Done {
    let copy = copy_of(folder).map_err(at(Step::CopyForTouch))?;
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
fn walk(path: &Path) -> Result<OwnedFd, Errno> {
    open_without_links(CWD, path, OFlags::empty(), ResolveFlags::empty())
}

fn is_on(file: &OwnedFd, mount: MountId) -> bool {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let stat = rustix::fs::statx(file, c"", flags, StatxFlags::MNT_ID);
    stat.is_ok_and(|stat| stat.stx_mnt_id == u64::from(mount.0))
}

/// A directory, a file, a socket and so on: the kernel itself distinguishes only directories when
/// it mounts.
pub(super) fn type_of(file: &OwnedFd) -> Result<FileType, Errno> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let stat = rustix::fs::statx(file, c"", flags, StatxFlags::TYPE)?;
    Ok(FileType::from_raw_mode(stat.stx_mode.into()))
}

/// Sets the propagation of the mount whose root a descriptor refers to.
fn change(mount: &OwnedFd, to: MountPropagationFlags) -> Result<(), Errno> {
    rustix::mount::mount_change(link(mount), to)
}

/// The link of a descriptor in the host's `/proc/self/fd`, where the child works.
fn link(descriptor: &OwnedFd) -> PathBuf {
    descriptor.as_raw_fd().to_string().into()
}
