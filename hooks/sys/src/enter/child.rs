//! The child in a container's mount namespace: it executes requests until the socket closes, and
//! nothing else.
//!
//! It is a fork of a process with threads, so it uses neither the heap nor a lock: every path and
//! descriptor was prepared before. It walks in the container only to open the mount points; that
//! walk may wait for a server or a daemon of the container, which is why it is a process of its
//! own. Everything after it works on open descriptors.

use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use bindguard_core::mount_table::MountId;
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, StatxFlags, Timespec, Timestamps, UTIME_NOW,
};
use rustix::io::Errno;
use rustix::mount::{MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags};
use rustix::thread::LinkNameSpaceType;

use super::clone::NewMount;
use super::fork::{end_with_parent, unshare_mounts};
use super::helper::Helper;
use super::job::{Job, Parent};
use super::message::{EnterStep, Failure, Reply, Request, at};

/// The child's view of its work.
pub(super) struct Child<'a> {
    pub(super) socket: BorrowedFd<'a>,
    pub(super) namespace: BorrowedFd<'a>,
    pub(super) jobs: &'a [Job],
    /// One place for each job, empty at first.
    pub(super) opened: &'a mut [Opened],
}

/// The descriptors of one job in the container.
#[derive(Debug, Default)]
pub(super) struct Opened {
    stale: Option<OwnedFd>,
    folder: Option<OwnedFd>,
    parent: Option<OwnedFd>,
}

type Done = Result<Reply, Failure>;

impl Child<'_> {
    /// Enters the namespace, reports that, and serves requests until the agent closes its end or
    /// dies.
    pub(super) fn serve(&mut self) {
        let own_descriptors = match self.enter() {
            Ok(own_descriptors) => own_descriptors,
            Err((step, errno)) => return self.reply(Reply::Failed(step, errno)),
        };
        self.reply(Reply::Done);
        let mut bytes = [0; Request::SIZE];
        while let Ok(Request::SIZE) = rustix::io::read(self.socket, &mut bytes) {
            let done = Request::from_bytes(bytes)
                .map(|request| self.act(request, own_descriptors.as_fd()));
            self.reply(match done {
                Some(Ok(reply)) => reply,
                Some(Err((step, errno))) => Reply::Failed(step, errno),
                None => return,
            });
        }
    }

    fn reply(&self, reply: Reply) {
        // If the agent is gone, the next read ends the child.
        let _ = rustix::io::write(self.socket, &reply.to_bytes());
    }

    /// Returns the host's `/proc/self/fd`: the container may have no `/proc`, or one of its own
    /// making.
    fn enter(&self) -> Result<OwnedFd, Failure> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let own = rustix::fs::open(c"/proc/self/fd", flags, Mode::empty())
            .map_err(at(EnterStep::OpenProc))?;
        self.set_namespace().map_err(at(EnterStep::Enter))?;
        Ok(own)
    }

    fn set_namespace(&self) -> Result<(), Errno> {
        rustix::thread::move_into_link_name_space(self.namespace, Some(LinkNameSpaceType::Mount))
    }

    fn act(&mut self, request: Request, own: BorrowedFd<'_>) -> Done {
        match request {
            Request::Open(index) => self.open(index),
            Request::AttachBeneath(index) => self.attach_beneath(index),
            Request::Tuck(index) => self.tuck(index, own),
            Request::Detach(index) => self.detach(index, own),
            Request::SetPropagation(index) => self.set_propagation(index, own),
            Request::Touch(index) => self.touch(index),
            Request::Restore(index) => self.restore_open(index, own),
        }
    }

    fn job(&self, index: u16) -> Result<(&Job, &Opened), Failure> {
        let index = usize::from(index);
        self.jobs
            .get(index)
            .zip(self.opened.get(index))
            .ok_or((EnterStep::OpenMountPoint, Errno::INVAL))
    }

    /// Opens the mount point that the mount table names, and the mount that contains it. The
    /// container may have changed either since the table was read: then another mount is there, and
    /// nothing is done.
    fn open(&mut self, index: u16) -> Done {
        let (job, _) = self.job(index)?;
        let stale = walk(&job.mount_point).map_err(at(EnterStep::OpenMountPoint))?;
        if !is_on(&stale, job.stale) {
            return Ok(Reply::OtherMount);
        }
        if let Some(new) = &job.new
            && type_of(&new.0).map_err(at(EnterStep::CompareTypes))?
                != type_of(&stale).map_err(at(EnterStep::CompareTypes))?
        {
            return Ok(Reply::OtherType);
        }
        let mut opened = Opened {
            stale: Some(stale),
            ..Opened::default()
        };
        if let Some(parent) = &job.parent {
            let folder = walk(&parent.folder).map_err(at(EnterStep::OpenFolder))?;
            let root = walk(&parent.mount_point).map_err(at(EnterStep::OpenParent))?;
            if is_on(&folder, parent.id) && is_on(&root, parent.id) {
                (opened.folder, opened.parent) = (Some(folder), Some(root));
            }
        }
        if let Some(place) = self.opened.get_mut(usize::from(index)) {
            *place = opened;
        }
        Ok(Reply::Done)
    }

    fn attach_beneath(&self, index: u16) -> Done {
        const STEP: EnterStep = EnterStep::AttachBeneath;
        let (job, opened) = self.job(index)?;
        let (new, stale) = job
            .new
            .as_ref()
            .zip(opened.stale.as_ref())
            .ok_or((STEP, Errno::BADF))?;
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH
            | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH
            | MoveMountFlags::MOVE_MOUNT_BENEATH;
        rustix::mount::move_mount(&new.0, c"", stale, c"", flags).map_err(at(STEP))?;
        Ok(Reply::Done)
    }

    /// The way for kernels before 6.5: the new mount is attached to a copy of the parent mount, and
    /// propagation puts it beneath the stale one. The parent mount is shared for as long as that
    /// takes.
    fn tuck(&self, index: u16, own: BorrowedFd<'_>) -> Done {
        let (job, opened) = self.job(index)?;
        let Some(parent) = &job.parent else {
            return Err((EnterStep::OpenFolder, Errno::OPNOTSUPP));
        };
        let (folder, root) = opened
            .folder
            .as_ref()
            .zip(opened.parent.as_ref())
            .ok_or((EnterStep::OpenFolder, Errno::OPNOTSUPP))?;
        let new = job
            .new
            .as_ref()
            .ok_or((EnterStep::AttachNew, Errno::BADF))?;
        // An agent that is killed now must not leave the parent mount shared.
        end_with_parent(false);
        let done = self.tuck_through_shared(parent, folder, root, new, own);
        end_with_parent(true);
        done.map(|()| Reply::Done)
    }

    fn tuck_through_shared(
        &self,
        parent: &Parent,
        folder: &OwnedFd,
        root: &OwnedFd,
        new: &NewMount,
        own: BorrowedFd<'_>,
    ) -> Result<(), Failure> {
        if !parent.is_shared {
            change(own, root.as_raw_fd(), MountPropagationFlags::SHARED)
                .map_err(at(EnterStep::ShareParent))?;
        }
        let tucked = self.tuck_through_copy(folder, &parent.name, new);
        let restored = match parent.is_shared {
            true => Ok(()),
            false => self.restore(parent, root, own),
        };
        tucked.and(restored)
    }

    fn tuck_through_copy(
        &self,
        folder: &OwnedFd,
        name: &CStr,
        new: &NewMount,
    ) -> Result<(), Failure> {
        let helper = Helper::of(folder, name, new)?;
        unshare_mounts().map_err(at(EnterStep::Unshare))?;
        let attached = helper.attach();
        // The helper namespace ends here, and its mounts with it: that umount does not propagate.
        drop(helper);
        self.set_namespace().map_err(at(EnterStep::Return))?;
        attached
    }

    /// The copy was the parent's peer: it is gone by now, so a slave keeps the master that it had.
    fn restore(&self, parent: &Parent, root: &OwnedFd, own: BorrowedFd<'_>) -> Result<(), Failure> {
        change(own, root.as_raw_fd(), parent.propagation).map_err(at(EnterStep::RestoreParent))
    }

    fn detach(&self, index: u16, own: BorrowedFd<'_>) -> Done {
        const STEP: EnterStep = EnterStep::Detach;
        let (_, opened) = self.job(index)?;
        let stale = opened.stale.as_ref().ok_or((STEP, Errno::BADF))?;
        rustix::process::fchdir(own).map_err(at(STEP))?;
        match rustix::mount::unmount(
            Number::of(stale.as_raw_fd()).as_c_str(),
            UnmountFlags::DETACH,
        ) {
            // EINVAL: the kubelet removed the file beneath, and the kernel detached the mount for
            // that.
            Ok(()) | Err(Errno::INVAL) => Ok(Reply::Done),
            Err(errno) => Err((STEP, errno)),
        }
    }

    fn touch(&self, index: u16) -> Done {
        let (job, opened) = self.job(index)?;
        let (parent, folder) = job
            .parent
            .as_ref()
            .zip(opened.folder.as_ref())
            .ok_or((EnterStep::CopyForTouch, Errno::BADF))?;
        touch_beneath(folder, &parent.name).map(|()| Reply::Done)
    }

    /// The mount itself that was opened gets the propagation that its job names.
    fn restore_open(&self, index: u16, own: BorrowedFd<'_>) -> Done {
        const STEP: EnterStep = EnterStep::SetPropagation;
        let (job, opened) = self.job(index)?;
        let mount = opened.stale.as_ref().ok_or((STEP, Errno::BADF))?;
        change(own, mount.as_raw_fd(), job.propagation).map_err(at(STEP))?;
        Ok(Reply::Done)
    }

    /// A tucked mount arrives as a shared one; it gets the propagation of the mount that it
    /// replaced.
    fn set_propagation(&self, index: u16, own: BorrowedFd<'_>) -> Done {
        const STEP: EnterStep = EnterStep::SetPropagation;
        let (job, opened) = self.job(index)?;
        let (parent, folder) = job
            .parent
            .as_ref()
            .zip(opened.folder.as_ref())
            .ok_or((STEP, Errno::BADF))?;
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let new = rustix::fs::openat(folder, parent.name.as_c_str(), flags, Mode::empty())
            .map_err(at(STEP))?;
        change(own, new.as_raw_fd(), job.propagation).map_err(at(STEP))?;
        Ok(Reply::Done)
    }
}

/// The mount point's file on its own mount, without the mount above it: the times of that file
/// change, and nothing else. Programs that watch the folder get an event of its name. The copy is
/// as read-only as the mount that the container sees.
fn touch_beneath(folder: &OwnedFd, name: &CStr) -> Result<(), Failure> {
    let clone = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH;
    let copy = rustix::mount::open_tree(folder, c"", clone).map_err(at(EnterStep::CopyForTouch))?;
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: UTIME_NOW,
    };
    let times = Timestamps {
        last_access: now,
        last_modification: now,
    };
    rustix::fs::utimensat(&copy, name, &times, AtFlags::SYMLINK_NOFOLLOW)
        .map_err(at(EnterStep::Touch))
}

/// Opens what the mount table names. The kernel prints paths without symlinks: a symlink on the way
/// was put there since.
fn walk(path: &CStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    loop {
        match rustix::fs::openat2(CWD, path, flags, Mode::empty(), resolve) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            other => return other,
        }
    }
}

fn is_on(file: &OwnedFd, mount: MountId) -> bool {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let stat = rustix::fs::statx(file, c"", flags, StatxFlags::MNT_ID);
    stat.is_ok_and(|stat| stat.stx_mnt_id == u64::from(mount.0))
}

/// A directory, a file, a socket and so on: the kernel itself distinguishes only directories when
/// it mounts.
fn type_of(file: &OwnedFd) -> Result<FileType, Errno> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let stat = rustix::fs::statx(file, c"", flags, StatxFlags::TYPE)?;
    Ok(FileType::from_raw_mode(stat.stx_mode.into()))
}

/// Sets the propagation of the mount whose root a descriptor refers to.
fn change(own: BorrowedFd<'_>, mount: RawFd, to: MountPropagationFlags) -> Result<(), Errno> {
    rustix::process::fchdir(own)?;
    rustix::mount::mount_change(Number::of(mount).as_c_str(), to)
}

/// A descriptor's number as a path below `/proc/self/fd`.
struct Number {
    digits: [u8; 12],
    begin: usize,
}

impl Number {
    fn of(descriptor: RawFd) -> Self {
        let (mut digits, mut begin, mut rest) = ([0; 12], 11, descriptor.unsigned_abs());
        loop {
            begin -= 1;
            digits[begin] = b'0' + (rest % 10) as u8;
            rest /= 10;
            if rest == 0 {
                return Self { digits, begin };
            }
        }
    }

    fn as_c_str(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.digits[self.begin..]).unwrap_or(c"")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_is_named_by_its_number() {
        for (number, name) in [
            (0, c"0"),
            (7, c"7"),
            (1_048_576, c"1048576"),
            (RawFd::MAX, c"2147483647"),
        ] {
            assert_eq!(Number::of(number).as_c_str(), name);
        }
    }
}
