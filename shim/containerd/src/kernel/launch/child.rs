//! The child's part: its actions between its creation and execve(2), in the memory of its parent.

use std::{
    ffi::{c_char, c_int, c_void},
    io,
    mem::MaybeUninit,
    os::fd::{FromRawFd, OwnedFd, RawFd},
    ptr::{null, null_mut},
};

use nix::libc;

use super::Launched;
use crate::kernel::signals::{OF_THE_C_LIBRARY, set_by_the_kernel};

/// The child makes some dozens of system calls and needs little stack.
const STACK: usize = 16 * 1024;
/// The exit status of a child that did not become the program; only its parent sees it.
const FAILED: c_int = 127;

/// Everything that the child needs, and the place for its result: it must not allocate.
pub(super) struct Orders<'a> {
    pub(super) program: *const c_char,
    /// These two end with a null pointer.
    pub(super) arguments: *const *const c_char,
    pub(super) environment: *const *const c_char,
    pub(super) directory: *const c_char,
    /// Above 2.
    pub(super) streams: [RawFd; 3],
    pub(super) kept: Option<RawFd>,
    pub(super) leads_group: bool,
    /// The parent to die with, if requested.
    pub(super) parent: Option<libc::pid_t>,
    /// The signal mask with which the program begins.
    pub(super) mask: libc::sigset_t,
    /// Stays 0 when the program runs.
    pub(super) errno: &'a mut c_int,
}

/// Runs `work` while this thread takes no signals: a handler would also run in the child, and so in the parent's memory.
pub(super) fn without_signals<T>(work: impl FnOnce(libc::sigset_t) -> T) -> T {
    let mut all = MaybeUninit::uninit();
    let mut before = MaybeUninit::uninit();
    // SAFETY: sigfillset(3) initializes `all`; pthread_sigmask(3), which fails only for an unknown verb, initializes `before`.
    let before = unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
        before.assume_init()
    };
    let done = work(before);
    // SAFETY: the set is the one that the same call returned.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, null_mut()) };
    done
}

/// Returns when the child has become the program, or has failed.
pub(super) fn clone(orders: &mut Orders<'_>) -> io::Result<Launched> {
    let mut stack = MaybeUninit::<[u8; STACK]>::uninit();
    let mut pidfd: RawFd = -1;
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD | libc::SIGCHLD;
    // SAFETY: the child has its own stack, aligned as the C ABI requires, and reads and writes `orders`; this thread touches
    // neither until CLONE_VFORK lets it continue. CLONE_PIDFD makes the kernel write a descriptor to the last argument.
    let pid = unsafe {
        let end = stack.as_mut_ptr().cast::<u8>().add(STACK);
        let top = end.sub(end.addr() % 64);
        libc::clone(child, top.cast(), flags, (&raw mut *orders).cast(), &raw mut pidfd)
    };
    match u32::try_from(pid) {
        // SAFETY: the kernel has just made this descriptor, and it has no other owner.
        Ok(pid) => Ok(Launched { pid, pidfd: unsafe { OwnedFd::from_raw_fd(pidfd) } }),
        Err(_) => Err(io::Error::last_os_error()),
    }
}

extern "C" fn child(orders: *mut c_void) -> c_int {
    // SAFETY: it is the address that `clone` passed, and no other code uses the memory there until this process has ended or
    // has become the program.
    let orders = unsafe { &mut *orders.cast::<Orders<'_>>() };
    if let Err(errno) = follow(orders) {
        *orders.errno = errno;
    }
    // SAFETY: _exit(2) skips the clean-up of a normal exit, which belongs to the parent.
    unsafe { libc::_exit(FAILED) }
}

/// Becomes the program; returns if that fails. Nothing here allocates or takes a lock: another thread of the parent may hold
/// it.
fn follow(orders: &Orders<'_>) -> Result<(), c_int> {
    // SAFETY: the arguments are numbers, a mask, or pointers of the orders. Those are strings and lists of strings that live as
    // long as the parent waits.
    unsafe {
        if let Some(parent) = orders.parent {
            done(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL))?;
            if libc::getppid() != parent {
                // The parent died before prctl(2) took effect.
                return Err(libc::ESRCH);
            }
        }
        if orders.leads_group {
            done(libc::setpgid(0, 0))?;
        }
        for (place, source) in (0..).zip(orders.streams) {
            done(libc::dup2(source, place))?;
        }
        if let Some(kept) = orders.kept {
            done(libc::fcntl(kept, libc::F_SETFD, 0))?;
        }
        done(libc::chdir(orders.directory))?;
        forget_handlers();
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const orders.mask, null_mut());
        done(libc::execve(orders.program, orders.arguments, orders.environment))
    }
}

fn done(result: c_int) -> Result<(), c_int> {
    // SAFETY: the address of this thread's errno; the parent's thread shares it, and waits.
    if result >= 0 { Ok(()) } else { Err(unsafe { *libc::__errno_location() }) }
}

/// Resets all signals to the actions of a program without handlers, also SIGPIPE, which Rust's runtime ignores. The handler of
/// real-time signals does nothing here either, and execve(2) removes it.
fn forget_handlers() {
    OF_THE_C_LIBRARY.iter().for_each(|signal| set_by_the_kernel(*signal, libc::SIG_DFL));
    for signal in 1..=libc::SIGSYS {
        // SAFETY: sigaction(2) reads and writes a struct of its own type, in which all zeros mean SIG_DFL.
        unsafe {
            let mut action: libc::sigaction = MaybeUninit::zeroed().assume_init();
            libc::sigaction(signal, null(), &raw mut action);
            if signal == libc::SIGPIPE || !matches!(action.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN) {
                let default: libc::sigaction = MaybeUninit::zeroed().assume_init();
                libc::sigaction(signal, &raw const default, null_mut());
            }
        }
    }
}
