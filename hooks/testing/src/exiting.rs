//! A process that exits: the main thread has ended, and the process has no namespaces any more. The
//! process ends some time later, with the last thread. The init of a container that waits for the
//! end of its children is in the same state.

use std::fs;
use std::thread;
use std::time::Duration;

use nix::libc;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, Pid, fork};

/// The process. It ends with this value.
pub struct Exiting(Pid);

impl Exiting {
    /// Starts it. It calls `before` first, exits, and ends after this time.
    pub fn start_after(before: impl FnOnce(), time: Duration) -> Self {
        // SAFETY: the child uses the heap and makes a thread, which glibc allows after a fork, and
        // ends without returning.
        match unsafe { fork() }.unwrap() {
            ForkResult::Parent { child } => {
                let process = Self(child);
                while !process.has_exited() {
                    thread::sleep(Duration::from_millis(1));
                }
                process
            }
            ForkResult::Child => {
                before();
                let milliseconds = time.as_millis() as usize;
                // SAFETY: the thread uses its argument as a number. Neither thread returns.
                unsafe {
                    let mut thread = std::mem::zeroed();
                    libc::pthread_create(
                        &raw mut thread,
                        std::ptr::null(),
                        last,
                        std::ptr::without_provenance_mut(milliseconds),
                    );
                    libc::syscall(libc::SYS_exit, 0);
                    libc::_exit(1)
                }
            }
        }
    }

    pub fn pid(&self) -> u32 {
        self.0.as_raw() as u32
    }

    fn has_exited(&self) -> bool {
        let status = fs::read_to_string(format!("/proc/{}/status", self.0)).unwrap_or_default();
        status.lines().any(|line| line.starts_with("State:\tZ"))
    }
}

impl Drop for Exiting {
    fn drop(&mut self) {
        let _ = kill(self.0, Signal::SIGKILL);
        let _ = waitpid(self.0, None);
    }
}

extern "C" fn last(milliseconds: *mut libc::c_void) -> *mut libc::c_void {
    // SAFETY: plain syscalls. The second call ends all threads.
    unsafe {
        libc::usleep(1000 * milliseconds.addr() as u32);
        libc::_exit(0)
    }
}
