//! Restores the state in which the caller started the process, for the real runtime.
//!
//! Before `main`, Rust's runtime ignores SIGPIPE and opens /dev/null for each closed standard
//! stream, and [`std::process::Command`] resets SIGPIPE to its default action. A runtime passes on
//! what it inherits: under crun, a caller that ignores SIGPIPE (as systemd's services do) has
//! containers that ignore it. So the original state is recorded, and restored right before
//! execve(2).
#![allow(unsafe_code)]

use std::io::{stderr, stdin, stdout};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
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
// SAFETY: the section is for functions; this one makes system calls and needs nothing that is
// initialized later.
#[unsafe(link_section = ".init_array")]
static RECORD: extern "C" fn() = record;

extern "C" fn record() {
    let mut action = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: the call changes nothing, and fills `action` when it returns 0.
    let ignored = unsafe {
        libc::sigaction(libc::SIGPIPE, ptr::null(), action.as_mut_ptr()) == 0
            && action.assume_init().sa_sigaction == libc::SIG_IGN
    };
    IGNORED_SIGPIPE.store(ignored, Ordering::Relaxed);
    for (number, closed) in (0..).zip(&CLOSED) {
        // SAFETY: the call changes nothing, and fails if the descriptor is closed.
        let flags = unsafe { libc::fcntl(number, libc::F_GETFD) };
        closed.store(flags == -1, Ordering::Relaxed);
    }
}

/// Reverts the changes of Rust's runtime. From here on a write to a closed pipe ends the process.
pub fn restore() {
    if !IGNORED_SIGPIPE.load(Ordering::Relaxed) {
        // SAFETY: the default action is no handler. The call fails for no existing signal.
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
