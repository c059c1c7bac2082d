//! The state of this process: what its caller left, the signal of a write beyond a limit, the heap.
//!
//! Before `main`, Rust's runtime ignores SIGPIPE and opens /dev/null for each closed standard
//! stream, and [`std::process::Command`] resets SIGPIPE to its default action. A runtime passes
//! signal actions on: if the caller of crun ignores SIGPIPE (as systemd's services do), the
//! containers ignore SIGPIPE, too. So the original state is recorded, and restored right before
//! execve(2).
#![allow(unsafe_code)]

use std::fs::{self, File};
use std::io::{self, stderr, stdin, stdout};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::libc;
use nix::sys::signal::{SigHandler, SigSet, SigmaskHow, Signal, raise, signal};
use rustix::io::{Errno, FdFlags, fcntl_setfd};

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

// A write beyond RLIMIT_FSIZE returns EFBIG, and a write to a nearly full filesystem ENOSPC.
//
// The kernel sends SIGXFSZ to the writing thread first, which ends a process that does not ignore
// it (setrlimit(2)). Guards inherit a service manager's `LimitFSIZE` from containerd. An ignored
// signal belongs to the whole process: another thread may restore its action in the middle of a
// write, and a runtime or a child would inherit it by exec. So the thread blocks the signal for
// the time of the write.

/// A runtime needs some 30 KiB for the state of a container, and a multiple of a long spec.
const ROOM_OF_A_RUNTIME: u64 = 128 << 10;

/// Runs `work`, in which a write of the calling thread beyond the limit is an error.
///
/// # Errors
/// Those of the work.
pub fn with_size_errors<T>(work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let signal = SigSet::from(Signal::SIGXFSZ);
    let former = signal
        .thread_swap_mask(SigmaskHow::SIG_BLOCK)
        .map(FormerMask);
    let result = work();
    // A thread has the same signal pending only once. The second signal makes sure that there is one
    // to take, so the wait ends at once.
    if result.is_err() && former.is_ok() && raise(Signal::SIGXFSZ).is_ok() {
        let _ = signal.wait();
    }
    result
}

/// Checks that a file's filesystem keeps room for a runtime: the caller's write is worth less than a
/// create.
///
/// # Errors
/// ENOSPC if the filesystem is nearly full.
pub fn leave_room(file: &File) -> io::Result<()> {
    let found = rustix::fs::fstatvfs(file)?;
    // a filesystem without a limit has no blocks
    if found.f_blocks > 0 && found.f_bavail * found.f_frsize < ROOM_OF_A_RUNTIME {
        Err(Errno::NOSPC.into())
    } else {
        Ok(())
    }
}

/// The former signal mask of the thread.
struct FormerMask(SigSet);

impl Drop for FormerMask {
    fn drop(&mut self) {
        let _ = self.0.thread_set_mask();
    }
}

/// Returns the unused pages of the heap to the kernel, including unused pages between used pages.
///
/// glibc shrinks its heap only from the end: a small block in use at the end keeps all memory
/// before the block.
pub fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: malloc_trim(3) takes a number, and locks the heap itself.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The number of pages in memory, mincore(2), of those that lie whole in these blocks' range.
    fn resident(from: usize, to: usize) -> usize {
        const PAGE: usize = 4096;
        let (from, to) = (from.next_multiple_of(PAGE), to / PAGE * PAGE);
        let mut pages = vec![0_u8; (to - from) / PAGE];
        // SAFETY: mincore(2) writes a byte for each page of the range, which the blocks keep mapped.
        let failed =
            unsafe { libc::mincore(from as *mut libc::c_void, to - from, pages.as_mut_ptr()) };
        assert_eq!(failed, 0, "{}", io::Error::last_os_error());
        pages.iter().filter(|page| **page & 1 == 1).count()
    }

    /// Counts the pages of its own blocks: tests beside this one use memory, too.
    #[test]
    fn free_pages_between_used_ones_are_returned() {
        // Every hundredth block stays: the heap cannot shrink, but most of its pages are unused.
        let mut blocks = Vec::new();
        for number in 0..100_000 {
            blocks.push(Some(Box::new([number; 60])));
        }
        for (number, block) in blocks.iter_mut().enumerate() {
            if number % 100 != 0 {
                *block = None;
            }
        }
        let mut kept: Vec<usize> = Vec::new();
        for block in blocks.iter().flatten() {
            kept.push(ptr::from_ref(&**block).addr());
        }
        kept.sort_unstable();
        let pages = || {
            let mut pages = 0;
            for pair in kept.windows(2) {
                // Blocks of an arena lie beside each other; between two arenas nothing is mapped.
                if pair[1] - pair[0] < 1 << 20 {
                    pages += resident(pair[0], pair[1]);
                }
            }
            pages
        };
        let before = pages();
        trim_heap();
        let after = pages();
        assert!(
            after + 3000 < before,
            "{before} pages before, {after} after"
        );
        drop(blocks);
    }
}
