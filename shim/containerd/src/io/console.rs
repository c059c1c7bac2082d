//! Pipes between shim and process, and the socket over which the runtime sends the terminal's
//! master.

use std::fs::{self, DirBuilder, Permissions};
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Gid, OFlags, Uid, fchown, fcntl_getfl, fcntl_setfl};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use rustix::pipe::{PipeFlags, pipe_with};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::step::{StepError, failed};

/// A socket's path may have 107 bytes and a bundle's path is longer, so sockets are in a short
/// directory of our own.
const DIRECTORY: &str = "/run/containerd/s";
static COUNTER: AtomicU64 = AtomicU64::new(0);

/// The step of a descriptor that the event loop rejects.
pub const WATCH: &str = "watch the process's streams";

/// A console socket for the runtime. A drop removes the socket's path.
///
/// The protocol is that of the OCI runtime's `--console-socket`: a stream socket gets a message
/// with a descriptor (SCM_RIGHTS). The runtime connects and sends before `create` returns, and
/// waits for no answer. So the shim needs no task: once the runtime has succeeded, the message is
/// in the socket's queue. Each try of a create makes a connection, and the last connection is the
/// container's.
pub struct ConsoleSocket {
    listener: UnixListener,
    /// For the runtime's `--console-socket`.
    pub path: PathBuf,
}

impl ConsoleSocket {
    /// Binds a new socket.
    pub fn bind() -> io::Result<Self> {
        Self::bind_in(Path::new(DIRECTORY))
    }

    fn bind_in(directory: &Path) -> io::Result<Self> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)?;
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let path = directory.join(format!("bindguard-pty-{}-{number}", std::process::id()));
        // Left by a dead shim that had our pid.
        let _ = fs::remove_file(&path);
        let listener = UnixListener::bind(&path)?;
        fs::set_permissions(&path, Permissions::from_mode(0o600))?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener, path })
    }

    /// The master that the runtime sent, non-blocking. Call it after the runtime has succeeded.
    pub fn take_master(&self) -> io::Result<OwnedFd> {
        let mut master = None;
        loop {
            match self.listener.accept() {
                Ok((stream, _)) => master = receive(&stream)?.or(master),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        let Some(master) = master else {
            let why = "the runtime sent no terminal";
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, why));
        };
        nonblocking(&master)?;
        Ok(master)
    }
}

fn receive(stream: impl AsFd) -> io::Result<Option<OwnedFd>> {
    let mut name = [0; 4096];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let mut buffers = [IoSliceMut::new(&mut name)];
    recvmsg(stream, &mut buffers, &mut ancillary, flags)?;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(mut fds) = message {
            return Ok(fds.next());
        }
    }
    Ok(None)
}

impl Drop for ConsoleSocket {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// The owner of the pipes: the container's user, so that the container can reopen /dev/stdout.
#[derive(Debug, Clone, Copy, Default)]
pub struct StreamOwner {
    pub uid: u32,
    pub gid: u32,
}

/// A pipe: the read end, the write end.
pub fn owned_pipe(stream: &str, owner: StreamOwner) -> Result<(OwnedFd, OwnedFd), StepError> {
    let made = pipe_with(PipeFlags::CLOEXEC).and_then(|(read, write)| {
        if owner.uid != 0 || owner.gid != 0 {
            let (uid, gid) = (Uid::from_raw(owner.uid), Gid::from_raw(owner.gid));
            fchown(&write, Some(uid), Some(gid))?;
        }
        Ok((read, write))
    });
    made.map_err(failed(format!("make the pipe for {stream}")))
}

/// Makes calls on it fail instead of wait. All users of the end share this flag, so never set it on
/// an end that a process gets.
pub fn nonblocking(fd: &OwnedFd) -> io::Result<()> {
    Ok(fcntl_setfl(fd, fcntl_getfl(fd)? | OFlags::NONBLOCK)?)
}

/// Reads the current content of a pipe, whether its end blocks or not. A pipe holds a mebibyte at
/// most (pipe(7)), and the read stops there even if a writer continues.
pub fn unread(pipe: &OwnedFd) -> Vec<u8> {
    const STEP: usize = 16 * 1024;
    const MAX_BYTES: usize = 1 << 20;
    let (mut bytes, mut buffer) = (Vec::new(), [0; STEP]);
    while bytes.len() < MAX_BYTES {
        let mut fds = [PollFd::new(pipe, PollFlags::IN)];
        let polled = poll(&mut fds, Some(&Timespec::default()));
        if !matches!(polled, Ok(1..)) || !fds[0].revents().contains(PollFlags::IN) {
            break;
        }
        match rustix::io::read(pipe, &mut buffer) {
            Ok(0) | Err(_) => break,
            Ok(count) => bytes.extend_from_slice(&buffer[..count]),
        }
    }
    bytes
}

/// Registers a descriptor in the event loop.
pub fn watched(fd: OwnedFd, interest: Interest) -> Result<Arc<AsyncFd<OwnedFd>>, StepError> {
    let watched = crate::kernel::watch(fd, interest).map_err(failed(WATCH))?;
    Ok(Arc::new(watched))
}

#[cfg(test)]
mod tests {
    use std::io::IoSlice;
    use std::os::unix::net::UnixStream;

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

    use super::*;

    fn send(path: &Path, fd: impl AsFd) {
        let stream = UnixStream::connect(path).unwrap();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let fds = [fd.as_fd()];
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&fds)));
        sendmsg(
            &stream,
            &[IoSlice::new(b"/dev/ptmx")],
            &mut ancillary,
            SendFlags::empty(),
        )
        .unwrap();
    }

    #[test]
    fn the_last_try_counts() {
        let dir = tempfile::tempdir().unwrap();
        let socket = ConsoleSocket::bind_in(dir.path()).unwrap();
        let (first, second) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        send(&socket.path, &first);
        send(&socket.path, &second);
        let got = rustix::fs::fstat(socket.take_master().unwrap()).unwrap();
        assert_eq!(got.st_ino, rustix::fs::fstat(&second).unwrap().st_ino);
    }

    #[test]
    fn a_missing_terminal_is_an_error_and_the_socket_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let socket = ConsoleSocket::bind_in(dir.path()).unwrap();
        let path = socket.path.clone();
        assert!(socket.take_master().is_err());
        drop(socket);
        assert!(!path.try_exists().unwrap());
    }
}
