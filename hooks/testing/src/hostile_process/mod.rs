//! A container's init that does the steps of a test in turn, also in namespaces of its own.

pub mod slow_fuse;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use bindguard_guard::refresh::HeldProcess;
use nix::libc;
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, Pid, fork, getppid, pipe};

use crate::live::{Inside, enter_root, make_places};

/// A step of the process. The number that it returns is 0 or an errno.
pub type Step = fn() -> i32;

/// The process. It ends with this value.
pub struct HostileProcess {
    pid: Pid,
    steps: File,
    results: File,
    pub process: HeldProcess,
}

impl HostileProcess {
    /// Starts the process with `binds` below its own root, in a user namespace with `ids` if given.
    pub fn start(root: &Path, binds: &[Inside], ids: Option<&str>, steps: &[Step]) -> Self {
        make_places(root, binds);
        let (steps_read, steps_write) = pipe().unwrap();
        let (results_read, results_write) = pipe().unwrap();
        // SAFETY: the child uses the heap, which glibc keeps usable across fork, and ends without
        // returning.
        match unsafe { fork() }.unwrap() {
            ForkResult::Parent { child } => {
                drop((steps_read, results_write));
                let mut results = File::from(results_read);
                results
                    .read_exact(&mut [0; 4])
                    .expect("the process did not start");
                let process = HeldProcess::open(child.as_raw() as u32).unwrap();
                Self {
                    pid: child,
                    steps: File::from(steps_write),
                    results,
                    process,
                }
            }
            ForkResult::Child => {
                drop((steps_write, results_read));
                let work = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                    keep_proc();
                    ids.into_iter().for_each(enter_user_namespace);
                    enter_root(root, binds);
                    serve(steps_read, results_write, steps);
                }));
                // SAFETY: ends the process without the exit handlers that it has from its parent.
                unsafe { libc::_exit(i32::from(work.is_err())) }
            }
        }
    }

    /// Lets the process do a step. Returns the errno; 0 for success.
    pub fn does(&mut self, step: usize) -> i32 {
        self.begins(step);
        let mut result = [0; 4];
        self.results.read_exact(&mut result).unwrap();
        i32::from_ne_bytes(result)
    }

    /// Lets it begin a step, without a wait for the result.
    pub fn begins(&mut self, step: usize) {
        self.steps.write_all(&[step as u8]).unwrap();
    }
}

impl Drop for HostileProcess {
    fn drop(&mut self) {
        let _ = kill(self.pid, Signal::SIGKILL);
        let _ = waitpid(self.pid, None);
    }
}

fn serve(steps_read: OwnedFd, results_write: OwnedFd, steps: &[Step]) {
    let (mut input, mut output) = (File::from(steps_read), File::from(results_write));
    output.write_all(&0_i32.to_ne_bytes()).unwrap();
    let mut number = [0];
    while input.read_exact(&mut number).is_ok() {
        output
            .write_all(&steps[usize::from(number[0])]().to_ne_bytes())
            .unwrap();
    }
}

/// A user namespace in which these ids are mapped, by a process that stays outside. The caller is
/// root there.
fn enter_user_namespace(ids: &str) {
    let (wait, go) = pipe().unwrap();
    // SAFETY: the child uses the heap, which glibc keeps usable across fork, and ends without
    // returning.
    match unsafe { fork() }.unwrap() {
        ForkResult::Parent { child } => {
            drop(wait);
            unshare(CloneFlags::CLONE_NEWUSER).unwrap();
            drop(go);
            waitpid(child, None).unwrap();
            nix::unistd::setresgid(0.into(), 0.into(), 0.into()).unwrap();
            nix::unistd::setresuid(0.into(), 0.into(), 0.into()).unwrap();
        }
        ForkResult::Child => {
            drop(go);
            let _ = File::from(wait).read(&mut [0]);
            for map in ["gid_map", "uid_map"] {
                fs::write(format!("/proc/{}/{map}", getppid()), ids).unwrap();
            }
            // SAFETY: ends the process without the exit handlers that it has from its parent.
            unsafe { libc::_exit(0) }
        }
    }
}

/// The descriptor of the host's `/proc`: the process itself has none.
const PROC: i32 = 600;

fn keep_proc() {
    let proc = File::open("/proc").unwrap();
    // SAFETY: no value owns this number. The copy stays open until the process ends.
    assert_eq!(unsafe { libc::dup2(proc.as_raw_fd(), PROC) }, PROC);
}

/// Keeps a file below `/proc` open, as this descriptor.
pub fn keep(file: &str, number: i32) {
    // SAFETY: the descriptor stays open until the process ends.
    let proc = unsafe { BorrowedFd::borrow_raw(PROC) };
    let mode = nix::sys::stat::Mode::empty();
    let file = nix::fcntl::openat(proc, file, nix::fcntl::OFlag::O_RDONLY, mode).unwrap();
    // SAFETY: no value owns this number.
    assert_eq!(unsafe { libc::dup2(file.as_raw_fd(), number) }, number);
}

/// Maps this user and the group of the same number to root of the user namespace that the process
/// has just made.
pub fn map_to_root(id: u32) -> i32 {
    let map = format!("0 {id} 1");
    write_to("self/setgroups", "deny")
        | write_to("self/uid_map", &map)
        | write_to("self/gid_map", &map)
}

fn write_to(file: &str, text: &str) -> i32 {
    // SAFETY: the descriptor stays open until the process ends.
    let proc = unsafe { BorrowedFd::borrow_raw(PROC) };
    let open = nix::fcntl::openat(
        proc,
        file,
        nix::fcntl::OFlag::O_WRONLY,
        nix::sys::stat::Mode::empty(),
    );
    errno(open.and_then(|file| nix::unistd::write(&file, text.as_bytes())))
}

/// The errno of a result.
pub fn errno<T>(result: nix::Result<T>) -> i32 {
    result.err().map_or(0, |errno| errno as i32)
}
