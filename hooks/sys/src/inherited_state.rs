//! Restores the state in which the caller started the process, for the real runtime.
//!
//! Before `main`, Rust's runtime ignores SIGPIPE and opens /dev/null for each closed standard
//! stream, and [`std::process::Command`] resets SIGPIPE to its default action. A runtime passes
//! signal actions on: if the caller of crun ignores SIGPIPE (as systemd's services do), the
//! containers ignore SIGPIPE, too. So the original state is recorded, and restored right before
//! execve(2).
//!
//! The descriptor of a pipe that the caller passed by its number is taken over here as well.
#![allow(unsafe_code)]

use std::fs;
use std::io::{stderr, stdin, stdout};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::libc;
use nix::sys::signal::{SigHandler, Signal, signal};
use rustix::io::{FdFlags, fcntl_setfd};

static IGNORED_SIGPIPE: AtomicBool = AtomicBool::new(false);
static CLOSED: [AtomicBool; 3] = [const { AtomicBool::new(false) }; 3];

/// The C library calls the functions of this section before `main`, and Rust's runtime begins in
/// `main`.
#[used]
// SAFETY: the section is for functions; `record` makes system calls and needs no state that is
// initialized later.
#[unsafe(link_section = ".init_array")]
static RECORD: extern "C" fn() = record;

extern "C" fn record() {
    let mut action = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: the calls change nothing. sigaction(2) fills `action` when it returns 0, and fcntl(2)
    // fails if the descriptor is closed.
    let (is_ignored, are_closed) = unsafe {
        (
            libc::sigaction(libc::SIGPIPE, ptr::null(), action.as_mut_ptr()) == 0
                && action.assume_init().sa_sigaction == libc::SIG_IGN,
            [0, 1, 2].map(|number| libc::fcntl(number, libc::F_GETFD) == -1),
        )
    };
    IGNORED_SIGPIPE.store(is_ignored, Ordering::Relaxed);
    for (is_closed, closed) in are_closed.into_iter().zip(&CLOSED) {
        closed.store(is_closed, Ordering::Relaxed);
    }
}

/// Reverts the changes of Rust's runtime. From here on a write to a closed pipe ends the process.
pub fn restore_inherited_state() {
    if !IGNORED_SIGPIPE.load(Ordering::Relaxed) {
        // SAFETY: the action has no handler. The call cannot fail.
        let _ = unsafe { signal(Signal::SIGPIPE, SigHandler::SigDfl) };
    }
    let (stdin, stdout, stderr) = (stdin(), stdout(), stderr());
    for (stream, closed) in [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()]
        .into_iter()
        .zip(&CLOSED)
    {
        if closed.load(Ordering::Relaxed) {
            // It closes when the runtime begins; until then an error message has a place to go.
            let _ = fcntl_setfd(stream, FdFlags::CLOEXEC);
        }
    }
}

/// Takes over the pipe that the caller passed under this number, and closes it when the runtime
/// begins. `None` if the number belongs to no pipe. Call it once, before anything opens a
/// descriptor.
pub fn inherited_pipe(number: u32) -> Option<OwnedFd> {
    let link = fs::read_link(format!("/proc/self/fd/{number}")).ok()?;
    if number <= 2 || !link.as_os_str().as_encoded_bytes().starts_with(b"pipe:") {
        return None;
    }
    let raw = i32::try_from(number).ok()?;
    // SAFETY: the caller passed this open pipe for the process to own, and no value owns the pipe
    // yet.
    let pipe = unsafe { OwnedFd::from_raw_fd(raw) };
    fcntl_setfd(&pipe, FdFlags::CLOEXEC).ok()?;
    Some(pipe)
}
