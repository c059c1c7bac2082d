//! The helper process: it forks the children that work in containers and complete trees of new
//! mounts.
//!
//! ```text
//!   agent ── kind of work, socket, namespace or tree ──► helper process ── fork ──► child
//!     ◄──────────── pid and pidfd ───────────────────────────┘                       │
//!     ◄──────────── the socket ──────────────────────────────────────────────────────┘
//! ```
//!
//! The agent has threads and many pages: a fork of the agent copies page tables, makes all threads
//! fault on their next writes, and gives the child locks that no thread releases. So the agent
//! forks the helper process once, at the start of `main`. The helper process has one thread and
//! holds nothing. It receives the checked namespace or the tree as a descriptor, never a pid. It
//! reaps its children, and ends when the agent ends.
//!
//! A child of a container is in the [register](crate::separate_process), so a child that hangs
//! counts for its pod also after the end of the agent. Only memory limits the children of all pods:
//! a limit of their number could be reached by some pods, and would stop the refreshes of all.

use std::cell::Cell;
use std::ffi::{OsStr, OsString};
use std::io;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bindguard_core::mount_table::{MountEntry, MountId};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::mount::MountPropagationFlags;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use rustix::process::{Signal, pidfd_send_signal};

use crate::enter::child::serve_container;
use crate::enter::tree::serve_tree;
use crate::fault;
use crate::fork::ChildProcess;
use crate::fork::is_readable;
use crate::replace::{NewMount, ReplaceError, Step, propagation_type};
use crate::separate_process::{Registered, hanging};

/// Limit of children that hang in one pod.
const MAX_HANGING_IN_POD: usize = 4;

/// Limit of the wait for the end of a child that was killed.
const END_TIMEOUT: Duration = Duration::from_millis(100);

/// The message for which a child waits: so the answer of the helper process is the first on the
/// socket.
const START: &[u8] = b"start";

/// The work of a child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    /// In the mount namespace of a container, with this number of replacements.
    Container(u16),
    /// In a new mount namespace, with this number of changes to a tree of new mounts.
    Tree(u16),
}

impl Work {
    const SIZE: usize = 3;

    fn to_bytes(self) -> [u8; Self::SIZE] {
        let (kind, count) = match self {
            Self::Container(jobs) => (0, jobs),
            Self::Tree(parts) => (1, parts),
        };
        let [low, high] = count.to_le_bytes();
        [kind, low, high]
    }

    fn from_bytes([kind, low, high]: [u8; Self::SIZE]) -> Option<Self> {
        match kind {
            0 => Some(Self::Container(u16::from_le_bytes([low, high]))),
            1 => Some(Self::Tree(u16::from_le_bytes([low, high]))),
            _ => None,
        }
    }
}

/// The helper process of this process. It ends with this value.
#[derive(Debug)]
pub struct HelperProcess {
    /// Closed before the process is waited for.
    socket: OwnedFd,
    process: ChildProcess,
}

impl HelperProcess {
    /// Forks it. Call it while the program has one thread and no socket. Its thread must stay until
    /// the program ends.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn start() -> io::Result<Self> {
        let (socket, theirs) = sockets()?;
        let kept = [theirs.as_raw_fd()];
        let process = ChildProcess::start(&kept, || serve(&theirs))?;
        Ok(Self { socket, process })
    }

    /// Waits until it ended. Then no container can be refreshed.
    pub fn wait(&self) {
        self.process.wait();
    }

    pub fn pid(&self) -> i32 {
        self.process.pid()
    }

    /// Starts a child. `subject` is the mount namespace to enter, or the tree to complete, with the
    /// pod that may let the child hang. The helper process answers at once, unless it waits for a
    /// processor.
    ///
    /// # Errors
    /// If the helper process ended, gives no answer until this time, or starts no child.
    pub(super) fn start_child(
        &self,
        work: Work,
        (subject, pod): (BorrowedFd<'_>, String),
        until: Instant,
    ) -> io::Result<RemoteChild> {
        let pod = format!("pod {pod}");
        if hanging().iter().filter(|known| **known == pod).count() >= MAX_HANGING_IN_POD {
            return Err(io::Error::other(TooManyInPod));
        }
        // Without room in /run the child is not counted: a full disk stops no refresh.
        let mut registered = Registered::new(&pod).ok();
        let (socket, theirs) = sockets()?;
        let mut descriptors = vec![theirs.as_fd(), subject];
        descriptors.extend(registered.as_ref().and_then(Registered::file));
        send_message(self.socket.as_fd(), &work.to_bytes(), &descriptors)
            .map_err(|_| io::Error::other(HelperEnded))?;
        drop(theirs);
        if let Some(registered) = &mut registered {
            registered.start();
        }
        if !is_readable(
            socket.as_fd(),
            until.saturating_duration_since(Instant::now()),
        ) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let mut number = [0; 4];
        let (size, mut descriptors) = receive_message(socket.as_fd(), &mut number)?;
        match (i32::from_le_bytes(number), descriptors.pop()) {
            _ if size != number.len() => Err(io::Error::other(HelperEnded)),
            (pid, Some(pidfd)) => {
                send_message(socket.as_fd(), START, &[])?;
                Ok(RemoteChild {
                    socket,
                    pid,
                    pidfd,
                    has_to_finish: Cell::new(false),
                    _registered: registered,
                })
            }
            (errno, None) => Err(io::Error::from_raw_os_error(-errno)),
        }
    }
}

/// Why no child was started for a container of this pod.
#[derive(Debug, thiserror::Error)]
#[error("{MAX_HANGING_IN_POD} children hang in the containers of its pod already")]
struct TooManyInPod;

/// Why no child can be started any more.
#[derive(Debug, thiserror::Error)]
#[error("the helper process ended")]
struct HelperEnded;

/// A child of the helper process, and the socket to the child. Dropping this value kills the child,
/// unless the child has to finish its work.
#[derive(Debug)]
pub(super) struct RemoteChild {
    pub(super) socket: OwnedFd,
    pub(super) pid: i32,
    pub(super) pidfd: OwnedFd,
    /// The child ends by itself when the socket closes.
    pub(super) has_to_finish: Cell<bool>,
    /// Dropped last: a child that lives on hangs.
    _registered: Option<Registered>,
}

impl Drop for RemoteChild {
    /// A killed child that waits for a server of the container ends when the server answers.
    fn drop(&mut self) {
        if !self.has_to_finish.get() {
            let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
            is_readable(self.pidfd.as_fd(), END_TIMEOUT);
        }
    }
}

/// Starts children until the other end of the socket closes.
fn serve(socket: &OwnedFd) {
    fault::disable();
    let mut children: Vec<ChildProcess> = Vec::new();
    while let Ok(has_message) = wait(socket, &children) {
        // Those that ended are reaped.
        children.retain(|child| !child.has_ended());
        if !has_message {
            continue;
        }
        let mut bytes = [0; Work::SIZE];
        let Ok((Work::SIZE, descriptors)) = receive_message(socket.as_fd(), &mut bytes) else {
            break;
        };
        if let Some(work) = Work::from_bytes(bytes) {
            children.extend(started(work, descriptors));
        }
    }
    // The kernel ends them with this process, but for a child that has to finish its work.
    children.into_iter().for_each(std::mem::forget);
}

/// Waits for a message or the end of a child. True if there is a message, or none can come.
fn wait(socket: &OwnedFd, children: &[ChildProcess]) -> Result<bool, Errno> {
    let of_children = children.iter().filter_map(ChildProcess::pidfd);
    let mut ready: Vec<_> = [socket.as_fd()]
        .into_iter()
        .chain(of_children)
        .map(|descriptor| PollFd::from_borrowed_fd(descriptor, PollFlags::IN))
        .collect();
    match poll(&mut ready, None) {
        Ok(_) => Ok(!ready[0].revents().is_empty()),
        Err(Errno::INTR) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// Starts a child, and passes its pid and its pidfd, or the error, to its socket.
fn started(work: Work, descriptors: Vec<OwnedFd>) -> Option<ChildProcess> {
    let mut kept: Vec<RawFd> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
    kept.sort_unstable();
    let (socket, subject) = (descriptors.first()?, descriptors.get(1)?);
    let child = start(work, &kept, socket, subject);
    let answer = match &child {
        Ok(child) => child.pid(),
        Err(error) => -error.raw_os_error().unwrap_or(Errno::IO.raw_os_error()),
    };
    let pidfd = child.as_ref().ok().and_then(ChildProcess::pidfd);
    // If the reader is gone, the child ends.
    let _ = send_message(socket.as_fd(), &answer.to_le_bytes(), pidfd.as_slice());
    child.ok()
}

fn start(
    work: Work,
    kept: &[RawFd],
    socket: &OwnedFd,
    subject: &OwnedFd,
) -> io::Result<ChildProcess> {
    ChildProcess::start(kept, || {
        if rustix::io::read(socket, &mut [0; START.len()]) != Ok(START.len()) {
            return;
        }
        match work {
            Work::Container(jobs) => serve_container(socket, subject, jobs),
            Work::Tree(parts) => serve_tree(socket, subject, parts),
        }
    })
}

// The messages between the agent and the child in a container's mount namespace: fixed sizes.

/// The work of a child with one of the replacements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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

impl Action {
    /// All actions, in the order of their numbers.
    const ALL: [Self; 9] = [
        Self::Open,
        Self::AttachBeneath,
        Self::Tuck,
        Self::Detach,
        Self::SetPropagation,
        Self::Touch,
        Self::Restore,
        Self::MakePrivate,
        Self::Unmount,
    ];
}

/// A request: an action, and the index of the replacement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) action: Action,
    pub(super) index: u16,
}

impl Request {
    pub(super) const SIZE: usize = 3;

    pub(super) fn to_bytes(self) -> [u8; Self::SIZE] {
        let [low, high] = self.index.to_le_bytes();
        [self.action as u8, low, high]
    }

    pub(super) fn from_bytes([action, low, high]: [u8; Self::SIZE]) -> Option<Self> {
        Some(Self {
            action: *Action::ALL.get(usize::from(action))?,
            index: u16::from_le_bytes([low, high]),
        })
    }
}

/// The child's answer to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Reply(pub(super) Result<(), ReplaceError>);

impl Reply {
    pub(super) const SIZE: usize = 6;

    pub(super) fn to_bytes(self) -> [u8; Self::SIZE] {
        let (code, step, errno) = match self.0 {
            Ok(()) => (0, 0, 0),
            Err(ReplaceError::OtherMount) => (1, 0, 0),
            Err(ReplaceError::Failed(step, errno)) => (2, step as u8, errno.raw_os_error()),
            Err(ReplaceError::OtherType) => (3, 0, 0),
            Err(ReplaceError::Overtaken) => (4, 0, 0),
        };
        let [a, b, c, d] = errno.to_le_bytes();
        [code, step, a, b, c, d]
    }

    pub(super) fn from_bytes([code, step, a, b, c, d]: [u8; Self::SIZE]) -> Option<Self> {
        Some(Self(match code {
            0 => Ok(()),
            1 => Err(ReplaceError::OtherMount),
            2 => {
                let number = i32::from_le_bytes([a, b, c, d]);
                let errno = (1..4096)
                    .contains(&number)
                    .then(|| Errno::from_raw_os_error(number))?;
                let step = *Step::ALL.get(usize::from(step))?;
                Err(ReplaceError::Failed(step, errno))
            }
            3 => Err(ReplaceError::OtherType),
            4 => Err(ReplaceError::Overtaken),
            _ => return None,
        }))
    }
}

// A replacement, and the message that passes the replacement to the child.

/// A stale mount of a container, by the lines of its mount table, and the mount to put in its
/// place.
#[derive(Debug)]
pub struct Replacement<'a> {
    pub stale: &'a MountEntry,
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

// Messages with descriptors: unix(7), `SCM_RIGHTS`.

/// Limit of descriptors of a message. The kernel's is 253.
const MAX_DESCRIPTORS: usize = 3;

/// Two connected sockets, which keep the bounds of messages.
pub(super) fn sockets() -> Result<(OwnedFd, OwnedFd), Errno> {
    let flags = SocketFlags::CLOEXEC;
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

/// Sends a message.
///
/// # Errors
/// If the receiver is gone.
pub(super) fn send_message(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Errno::TOOBIG);
    }
    let bytes = [IoSlice::new(bytes)];
    loop {
        match sendmsg(socket, &bytes, &mut ancillary, SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            sent => return sent.map(drop),
        }
    }
}

/// Receives a message: the number of its bytes, 0 if the sender is gone, and its descriptors.
///
/// # Errors
/// The kernel's.
pub(super) fn receive_message(
    socket: BorrowedFd<'_>,
    bytes: &mut [u8],
) -> Result<(usize, Vec<OwnedFd>), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [IoSliceMut::new(bytes)];
    let received = loop {
        match recvmsg(socket, &mut bytes, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            received => break received?,
        }
    };
    let mut descriptors = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(some) = message {
            descriptors.extend(some);
        }
    }
    Ok((received.bytes, descriptors))
}

#[cfg(test)]
mod message_tests {
    use super::*;

    #[test]
    fn every_message_arrives_as_it_was_sent() {
        for action in Action::ALL {
            let request = Request { action, index: 513 };
            assert_eq!(Request::from_bytes(request.to_bytes()), Some(request));
        }
        let failed = Step::ALL
            .iter()
            .map(|step| Err(ReplaceError::Failed(*step, Errno::INVAL)));
        let others = [
            Ok(()),
            Err(ReplaceError::OtherMount),
            Err(ReplaceError::OtherType),
            Err(ReplaceError::Overtaken),
        ];
        for reply in failed.chain(others).map(Reply) {
            assert_eq!(Reply::from_bytes(reply.to_bytes()), Some(reply));
        }
        assert_eq!(Reply::from_bytes([2, 200, 0, 0, 0, 0]), None);
    }
}

#[cfg(test)]
mod job_tests {
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
