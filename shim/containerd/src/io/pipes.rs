//! Pipes between shim and process, and descriptors for the event loop.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Gid, OFlags, Uid, fchown, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::IoError;
use crate::step::failed;

/// The step of a descriptor that the event loop rejects.
pub(super) const WATCH: &str = "watch the process's streams";

/// The owner of the pipes: the container's user, so that the container can reopen /dev/stdout.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct StreamOwner {
    /// User id.
    pub(crate) uid: u32,
    /// Group id.
    pub(crate) gid: u32,
}

/// A pipe: the read end, the write end.
pub(super) fn owned_pipe(
    stream: &'static str,
    owner: StreamOwner,
) -> Result<(OwnedFd, OwnedFd), IoError> {
    let make = || {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
        if owner.uid != 0 || owner.gid != 0 {
            fchown(
                &write,
                Some(Uid::from_raw(owner.uid)),
                Some(Gid::from_raw(owner.gid)),
            )?;
        }
        Ok((read, write))
    };
    Ok(make().map_err(failed::<Errno>(format!("make the pipe for {stream}")))?)
}

/// Makes calls on it fail instead of wait. All users of the end share this flag, so never set it on
/// an end that a process gets.
pub(super) fn nonblocking(fd: &OwnedFd) -> io::Result<()> {
    Ok(fcntl_setfl(fd, fcntl_getfl(fd)? | OFlags::NONBLOCK)?)
}

/// Reads the current content of a pipe, whether its end blocks or not. A pipe holds a mebibyte at
/// most (pipe(7)), and the read stops there even if a writer continues.
pub(super) fn unread(pipe: &OwnedFd) -> Vec<u8> {
    const STEP: usize = 16 * 1024;
    const MAX_BYTES: usize = 1 << 20;
    let (mut bytes, mut buffer) = (Vec::new(), [0; STEP]);
    while bytes.len() < MAX_BYTES && has_bytes(pipe) {
        match rustix::io::read(pipe, &mut buffer) {
            Ok(0) | Err(_) => break,
            Ok(count) => bytes.extend_from_slice(&buffer[..count]),
        }
    }
    bytes
}

fn has_bytes(pipe: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(pipe, PollFlags::IN)];
    matches!(poll(&mut fds, Some(&Timespec::default())), Ok(1..))
        && fds[0].revents().contains(PollFlags::IN)
}

/// Registers a descriptor in the event loop.
pub(super) fn watched(fd: OwnedFd, interest: Interest) -> Result<Arc<AsyncFd<OwnedFd>>, IoError> {
    let watched = crate::kernel::watch(fd, interest).map_err(failed(WATCH))?;
    Ok(Arc::new(watched))
}
