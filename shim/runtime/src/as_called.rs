//! The process as its caller made it, for the real runtime to find.
//!
//! Before `main`, Rust's runtime ignores SIGPIPE and opens /dev/null where a standard stream is closed, and
//! [`std::process::Command`] makes SIGPIPE's action the default one. A runtime hands on what it finds: under crun, a caller that
//! ignores SIGPIPE (as services of systemd's do) has containers that ignore it. So it is noted how the process was, and
//! made so again right before execve(2).
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

/// What stands in this section is called by the C library before `main`, and Rust's runtime begins in `main`.
#[used]
// SAFETY: the section is for functions; this one makes system calls and needs nothing that is set up later.
#[unsafe(link_section = ".init_array")]
static NOTE: extern "C" fn() = note;

extern "C" fn note() {
    let mut action = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: it changes nothing, and fills `action` when it answers 0.
    let ignored = unsafe {
        libc::sigaction(libc::SIGPIPE, ptr::null(), action.as_mut_ptr()) == 0
            && action.assume_init().sa_sigaction == libc::SIG_IGN
    };
    IGNORED_SIGPIPE.store(ignored, Ordering::Relaxed);
    for (number, closed) in (0..).zip(&CLOSED) {
        // SAFETY: it changes nothing. Whether there is such a descriptor is the question.
        let flags = unsafe { libc::fcntl(number, libc::F_GETFD) };
        closed.store(flags == -1, Ordering::Relaxed);
    }
}

/// Takes back what Rust's runtime changed. From here on a write to a closed pipe ends the process.
pub fn restore() {
    if !IGNORED_SIGPIPE.load(Ordering::Relaxed) {
        // SAFETY: the default action is no handler. It fails for no signal that exists.
        let _ = unsafe { signal(Signal::SIGPIPE, SigHandler::SigDfl) };
    }
    let (stdin, stdout, stderr) = (stdin(), stdout(), stderr());
    for (stream, closed) in [stdin.as_fd(), stdout.as_fd(), stderr.as_fd()].into_iter().zip(&CLOSED) {
        if closed.load(Ordering::Relaxed) {
            // It closes when the runtime begins, and a complaint that it cannot begin has a place to go until then.
            let _ = fcntl_setfd(stream, FdFlags::CLOEXEC);
        }
    }
}
