//! The child as a process: its start, its end, and the calls that Rust cannot check.
//!
//! The child shares the agent's memory, as after vfork(2), but both go on. A copy of the memory would cost more than everything that
//! the child does: the kernel copies the page tables, and all threads of the agent fault on the pages that they write next
//! (docs/decisions/0035). So the child writes to nothing but its stack, uses neither the heap nor a lock, and never returns to
//! the caller's code. It has its own descriptors.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::fmt;
use std::io;
use std::mem::{self, ManuallyDrop, MaybeUninit};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

use nix::libc;
use nix::sys::signal::{SigSet, SigmaskHow};
use rustix::io::Errno;
use rustix::process::{Signal, pidfd_send_signal};
use rustix::thread::UnshareFlags;

use super::is_readable;

/// Limit of the wait for a child that was killed, or whose socket is closed.
const PATIENCE: Duration = Duration::from_secs(1);

/// Bytes of the child's stack: ten times what it uses.
const STACK: usize = 64 * 1024;

/// A child process. It is reaped when this value ends, if it ends soon; otherwise when the agent ends.
#[derive(Debug)]
pub(super) struct ChildProcess {
    pidfd: OwnedFd,
    /// Never dropped before the child ended.
    memory: ManuallyDrop<Box<Memory>>,
}

/// The part of this process's memory that the child uses: its stack, and the input of its work.
struct Memory {
    /// Aligned to 16 bytes, as the kernels of both architectures want it.
    stack: Box<[MaybeUninit<u128>]>,
    /// The descriptors that it keeps, sorted.
    kept: Vec<RawFd>,
    work: Box<dyn Fn() + Send + Sync>,
}

impl ChildProcess {
    /// Runs `work` in a child that keeps these descriptors, which are sorted. What `work` owns lives until the child has ended.
    pub(super) fn start(kept: Vec<RawFd>, work: impl Fn() + Send + Sync + 'static) -> io::Result<Self> {
        let stack = Box::new_uninit_slice(STACK / size_of::<u128>());
        let mut memory = ManuallyDrop::new(Box::new(Memory { stack, kept, work: Box::new(work) }));
        match clone(&mut memory) {
            Ok(pidfd) => Ok(Self { pidfd, memory }),
            Err(error) => {
                drop(ManuallyDrop::into_inner(memory));
                Err(error)
            }
        }
    }

    /// Kills it, if it has not ended.
    pub(super) fn kill(&self) {
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
    }

    /// True until it ends.
    pub(super) fn is_alive(&self) -> bool {
        !is_readable(self.as_fd(), Duration::ZERO)
    }

    fn reap(&self) {
        // SAFETY: the kernel fills the structure, which nothing reads. `__WALL`: a child without SIGCHLD is not waited for otherwise.
        unsafe {
            let mut info: libc::siginfo_t = mem::zeroed();
            let pidfd = self.pidfd.as_raw_fd().unsigned_abs();
            libc::waitid(libc::P_PIDFD, pidfd, &raw mut info, libc::WEXITED | libc::WNOHANG | libc::__WALL);
        }
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        if is_readable(self.as_fd(), PATIENCE) {
            self.reap();
            // SAFETY: once, and the child has ended: a pidfd is readable after the process has left its memory. Otherwise the
            // memory stays for as long as this process lives: one abandoned child for each container at most.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
        }
    }
}

impl AsFd for ChildProcess {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

/// A descriptor of the child, whether or not the agent closed its own of this number since.
#[derive(Debug, Clone, Copy)]
pub(super) struct InChild(RawFd);

impl InChild {
    /// The child's copy of this descriptor.
    pub(super) fn of(descriptor: &impl AsFd) -> Self {
        Self(descriptor.as_fd().as_raw_fd())
    }
}

impl AsFd for InChild {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: used by the child alone, which never closes the descriptors that it keeps.
        unsafe { BorrowedFd::borrow_raw(self.0) }
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory").field("kept", &self.kept).finish_non_exhaustive()
    }
}

/// Starts the child. All signals but SIGKILL stay blocked in it: their handlers belong to the agent.
fn clone(memory: &mut Memory) -> io::Result<OwnedFd> {
    let mut pidfd: RawFd = -1;
    let flags = libc::CLONE_VM | libc::CLONE_PIDFD;
    let mask = SigSet::all().thread_swap_mask(SigmaskHow::SIG_SETMASK)?;
    // SAFETY: the stack is the child's alone, and lives as long as the child, as everything does that `run` uses. The kernel
    // writes the pidfd before it returns.
    let cloned = unsafe {
        // Nothing of the container may look into the child, and so not into this process.
        libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
        let top = memory.stack.as_mut_ptr_range().end.cast();
        libc::clone(run, top, flags, (&raw mut *memory).cast(), &raw mut pidfd)
    };
    let cloned = if cloned < 0 { Err(io::Error::last_os_error()) } else { Ok(()) };
    // No mask is invalid.
    let _ = mask.thread_set_mask();
    // SAFETY: the descriptor is new, and no other value owns it.
    cloned.map(|()| unsafe { OwnedFd::from_raw_fd(pidfd) })
}

extern "C" fn run(memory: *mut c_void) -> c_int {
    // SAFETY: `clone` gave it this pointer; the agent writes to none of these fields while the child lives.
    let (kept, work) = unsafe {
        let memory = memory.cast::<Memory>();
        (&(*memory).kept, &(*memory).work)
    };
    close_others(kept);
    work();
    // SAFETY: ends the process without running what the agent has registered for its end.
    unsafe { libc::_exit(0) }
}

/// Closes every descriptor that is not `kept`: the child must not keep a pipe of anyone open while it hangs.
fn close_others(kept: &[RawFd]) {
    let mut next = 0;
    for descriptor in kept.iter().map(|descriptor| descriptor.unsigned_abs()) {
        if descriptor > next {
            close_range(next, descriptor - 1);
        }
        next = descriptor + 1;
    }
    close_range(next, libc::c_uint::MAX);
}

fn close_range(first: libc::c_uint, last: libc::c_uint) {
    // SAFETY: the child uses none of these descriptors, and the agent has a table of its own.
    unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
}

/// Moves the child into a copy of its mount namespace.
pub(super) fn unshare_mounts() -> Result<(), Errno> {
    // SAFETY: of the flags, only `FILES` makes descriptors of other threads unusable; it is not among these.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }
}
