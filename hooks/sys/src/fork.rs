//! Forks children that never return to the caller's code, and passes messages with descriptors
//! between the two halves: unix(7), `SCM_RIGHTS`.
//!
//! Both halves are the same program, so serde writes and reads each message. A child may use the
//! heap: glibc keeps the heap usable across fork(2).
#![allow(unsafe_code)]

use std::fs;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread;
use std::time::{Duration, Instant};

use nix::libc;
use nix::unistd::{ForkResult, fork};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use rustix::process::{
    DumpableBehavior, Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, getpid, getppid, pidfd_open,
    pidfd_send_signal, set_dumpable_behavior, set_parent_process_death_signal, waitid,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::errno_of;

/// Limit of the wait for a child that was killed, or whose socket is closed. After it, a thread
/// waits.
const END_TIMEOUT: Duration = Duration::from_millis(100);

/// Bytes of the stack of a thread that waits for the end of a child.
const REAPER_STACK: usize = 64 * 1024;

/// Runs `work` in a child, which ends with it. `work` must not use a lock that another thread of
/// the caller may hold.
pub(crate) fn fork_child(work: impl FnOnce()) -> io::Result<i32> {
    // SAFETY: the child runs `work` and ends: nothing of the caller is dropped or flushed twice.
    match unsafe { fork() }? {
        ForkResult::Parent { child } => Ok(child.as_raw()),
        ForkResult::Child => {
            // A panic must not unwind from here: the caller would go on twice.
            let _ = catch_unwind(AssertUnwindSafe(work));
            // SAFETY: ends the process without the exit handlers that its parent registered.
            unsafe { libc::_exit(0) }
        }
    }
}

/// A child process. It is reaped when it ends, at the latest some time after the end of this value.
#[derive(Debug)]
pub(crate) struct ChildProcess {
    /// For files below `/proc`.
    pub(crate) pid: i32,
    /// Can be read when the child ended.
    pub(crate) pidfd: OwnedFd,
}

impl ChildProcess {
    /// Runs `work` in a child that has only these descriptors of the caller, which are sorted. The
    /// child ends with the thread that started it.
    pub(crate) fn start(kept: &[RawFd], work: impl FnOnce()) -> io::Result<Self> {
        let parent = getpid();
        let pid = fork_child(|| {
            // Nothing of a container may look into this copy of the agent.
            let _ = set_dumpable_behavior(DumpableBehavior::NotDumpable);
            end_with_parent(true);
            // The child must not keep a pipe open while it hangs. And the parent may have ended
            // before the kernel knew that the child ends with it.
            if close_all_but(kept).is_ok() && getppid() == Some(parent) {
                work();
            }
        })?;
        let process = Pid::from_raw(pid).ok_or(io::ErrorKind::NotFound)?;
        // A child that was not waited for keeps its pid.
        let pidfd = pidfd_open(process, PidfdFlags::empty())?;
        Ok(Self { pid, pidfd })
    }

    /// Kills the child, if the child runs.
    pub(crate) fn kill(&self) {
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
    }

    pub(crate) fn has_ended(&self) -> bool {
        is_readable(&self.pidfd, Duration::ZERO)
    }
}

fn reap(pidfd: &OwnedFd) {
    let _ = waitid(WaitId::PidFd(pidfd.as_fd()), WaitIdOptions::EXITED);
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        if is_readable(&self.pidfd, END_TIMEOUT) {
            return reap(&self.pidfd);
        }
        // Without a thread the child is reaped when this process ends.
        if let Ok(pidfd) = self.pidfd.try_clone() {
            let reaper = thread::Builder::new().name("reap-child".to_owned());
            let _ = reaper.stack_size(REAPER_STACK).spawn(move || reap(&pidfd));
        }
    }
}

/// Runs `work` in a thread, and waits for it.
///
/// # Errors
/// If no thread can be started.
pub(crate) fn in_thread<T: Send>(name: &str, work: impl FnOnce() -> T + Send) -> io::Result<T> {
    thread::scope(|scope| {
        let builder = thread::Builder::new().name(name.to_owned());
        let ended = builder.spawn_scoped(scope, work)?.join();
        Ok(ended.unwrap_or_else(|panic| resume_unwind(panic)))
    })
}

/// Lets the kernel kill the calling process when the thread that forked it ends, or not.
pub(crate) fn end_with_parent(ends: bool) {
    let _ = set_parent_process_death_signal(ends.then_some(Signal::KILL));
}

/// Closes all descriptors of this process except `kept`, a sorted list. Uses neither the heap nor
/// a lock.
///
/// # Errors
/// If some descriptors may still be open.
pub(crate) fn close_all_but(kept: &[RawFd]) -> Result<(), Errno> {
    let mut next = 0;
    for descriptor in kept {
        let descriptor = descriptor.unsigned_abs();
        if descriptor > next {
            close_range(next, descriptor - 1)?;
        }
        next = descriptor + 1;
    }
    close_range(next, libc::c_uint::MAX)
}

/// Closes no descriptor: none has this number.
///
/// # Errors
/// From a kernel, or a seccomp filter, without close_range(2).
pub(crate) fn probe_close_range() -> Result<(), Errno> {
    close_range(libc::c_uint::MAX, libc::c_uint::MAX)
}

fn close_range(first: libc::c_uint, last: libc::c_uint) -> Result<(), Errno> {
    // SAFETY: the forked process no longer uses these descriptors.
    match unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) } {
        0 => Ok(()),
        _ => Err(errno_of(&io::Error::last_os_error())),
    }
}

/// Polls until something can be read; ignores signals of this process.
pub(crate) fn is_readable(descriptor: impl AsFd, timeout: Duration) -> bool {
    let until = Instant::now() + timeout;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let mut polled = [PollFd::new(&descriptor, PollFlags::IN)];
        match poll(&mut polled, Timespec::try_from(left).ok().as_ref()) {
            Err(Errno::INTR) => {}
            ready => return ready.is_ok_and(|ready| ready > 0),
        }
    }
}

/// Polls until the child has answered. A child that waits for a processor is late, not silent: it
/// has until this time.
pub(crate) fn is_answered(socket: &OwnedFd, child: i32, timeout: Duration, until: Instant) -> bool {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if is_readable(socket, timeout.min(left)) {
            return true;
        }
        if timeout >= left || !is_runnable(child) {
            return false;
        }
    }
}

/// True if a process waits for a processor, or was stopped: the process is late, but not blocked.
/// proc_pid_status(5) takes no lock.
pub(crate) fn is_runnable(pid: i32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let mut states = status
        .lines()
        .filter_map(|line| line.strip_prefix("State:\t"));
    states.any(|state| state.starts_with(['R', 'T', 't']))
}

/// Limit of descriptors of a message. The kernel's is 253.
const MAX_DESCRIPTORS: usize = 3;

/// Limit of a message: a byte of a path takes up to four, and a message has two paths of 4096.
const MAX_MESSAGE: usize = 64 << 10;

/// Two connected sockets, which keep the bounds of messages.
pub(crate) fn sockets() -> io::Result<(OwnedFd, OwnedFd)> {
    let (family, flags) = (AddressFamily::UNIX, SocketFlags::CLOEXEC);
    Ok(socketpair(family, SocketType::SEQPACKET, flags, None)?)
}

/// Sends a message.
///
/// # Errors
/// If the receiver is gone, or the message is too long.
pub(crate) fn send(
    socket: &OwnedFd,
    message: &impl Serialize,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Errno::TOOBIG.into());
    }
    let bytes = [IoSlice::new(&bytes)];
    loop {
        match sendmsg(socket, &bytes, &mut ancillary, SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            sent => return Ok(sent.map(drop)?),
        }
    }
}

/// Receives a message and its descriptors.
///
/// # Errors
/// `UnexpectedEof` if the sender is gone, and the kernel's.
pub(crate) fn receive<T: DeserializeOwned>(socket: &OwnedFd) -> io::Result<(T, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = vec![0; MAX_MESSAGE];
    let received = loop {
        let mut buffer = [IoSliceMut::new(&mut bytes)];
        match recvmsg(socket, &mut buffer, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
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
    let message = serde_json::from_slice(&bytes[..received.bytes])?;
    Ok((message, descriptors))
}
