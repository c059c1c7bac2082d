//! The child in a new user namespace, which lives until the agent has opened that namespace.

use std::os::fd::{AsFd, OwnedFd};

use nix::sched::{CloneFlags, unshare};

use super::descriptor_message::send_message;

/// Moves into a new user namespace, reports that, and waits until the socket closes.
pub(super) fn serve_user_namespace(socket: &OwnedFd) {
    let errno = match unshare(CloneFlags::CLONE_NEWUSER) {
        Ok(()) => 0,
        Err(errno) => errno as i32,
    };
    let _ = send_message(socket.as_fd(), &errno.to_le_bytes(), &[]);
    // Until the other end closes.
    let _ = rustix::io::read(socket, &mut [0; 1]);
}
