//! A process that holds its own mmap_lock for as long as a test wants.
//!
//! The process maps a file of a FUSE mount, writes to the page, and maps something else over it.
//! The kernel then writes the page back under the mmap_lock, and the daemon, this test, never
//! answers. A page on a hung NFS server does the same.

#![allow(unsafe_code, reason = "a test forks and maps memory")]

use std::ffi::CStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use nix::libc;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, Pid, fork};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

const PAGE: usize = 4096;

/// The time after which a call counts as hanging: every limit of the product is shorter.
const HANG_TIMEOUT: Duration = Duration::from_secs(30);

/// A FUSE mount with one file, `f`, whose pages can be read and never be written back.
pub struct Unwritable {
    folder: tempfile::TempDir,
    device: Option<Arc<File>>,
    is_over: Arc<AtomicBool>,
    daemon: Option<JoinHandle<()>>,
    writes: Receiver<()>,
}

impl Unwritable {
    /// `None` where there is no FUSE, or no right to mount.
    pub fn mounted() -> Option<Self> {
        let Ok(device) = OpenOptions::new().read(true).write(true).open("/dev/fuse") else {
            let _ = writeln!(io::stderr(), "SKIPPED: no /dev/fuse here");
            return None;
        };
        let folder = tempfile::tempdir().unwrap();
        let options = format!(
            "fd={},rootmode=40000,user_id=0,group_id=0",
            device.as_raw_fd()
        );
        if mount(
            Some("unwritable"),
            folder.path(),
            Some("fuse"),
            MsFlags::empty(),
            Some(options.as_str()),
        )
        .is_err()
        {
            let _ = writeln!(io::stderr(), "SKIPPED: no right to mount");
            return None;
        }
        let (device, is_over) = (Arc::new(device), Arc::new(AtomicBool::new(false)));
        let (write, writes) = channel();
        let daemon = thread::spawn({
            let (device, is_over) = (Arc::clone(&device), Arc::clone(&is_over));
            move || {
                let now_and_then = Timespec {
                    tv_sec: 0,
                    tv_nsec: 10_000_000,
                };
                while !is_over.load(Ordering::Acquire) {
                    let ready = poll(
                        &mut [PollFd::new(&*device, PollFlags::IN)],
                        Some(&now_and_then),
                    )
                    .unwrap_or(0);
                    if ready > 0 && answer(&device).is_some_and(|opcode| opcode == WRITE) {
                        let _ = write.send(());
                    }
                }
            }
        });
        Some(Self {
            folder,
            device: Some(device),
            is_over,
            daemon: Some(daemon),
            writes,
        })
    }

    pub fn file(&self) -> PathBuf {
        self.folder.path().join("f")
    }

    /// Waits until a process holds its lock.
    pub fn wait_for_a_holder(&self) {
        self.writes.recv().unwrap();
    }

    /// From now on nothing is answered.
    pub fn stop_answering(&self) {
        self.is_over.store(true, Ordering::Release);
        while !self.daemon.as_ref().is_none_or(JoinHandle::is_finished) {
            thread::yield_now();
        }
    }
}

impl Drop for Unwritable {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Release);
        let _ = self.daemon.take().map(JoinHandle::join);
        // The last copy: the kernel ends all requests with an error.
        self.device = None;
        let _ = umount2(self.folder.path(), MntFlags::MNT_DETACH);
    }
}

/// A process of the test that holds its lock.
pub struct Holder {
    pid: Pid,
    files: Option<Unwritable>,
}

impl Holder {
    /// Starts a holder with this name; the holder calls `before` first.
    pub fn start(name: &CStr, before: impl FnOnce()) -> Option<Self> {
        let files = Unwritable::mounted()?;
        // SAFETY: the child uses the heap, which glibc keeps usable across fork, and ends without
        // returning.
        match unsafe { fork() }.unwrap() {
            ForkResult::Parent { child } => {
                files.wait_for_a_holder();
                Some(Self {
                    pid: child,
                    files: Some(files),
                })
            }
            ForkResult::Child => {
                // Copies of the devices of parallel tests would keep the daemons of those tests
                // alive, too. SAFETY: the child uses no descriptor of the test.
                unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, 0) };
                let work = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                    let file = OpenOptions::new()
                        .read(true)
                        .write(true)
                        .open(files.file())
                        .unwrap();
                    before();
                    // SAFETY: the call sets the name of this process.
                    unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
                    hold_memory(&file);
                }));
                // SAFETY: ends the process without the exit handlers that it has from its parent.
                unsafe { libc::_exit(if work.is_ok() { 0 } else { 1 }) }
            }
        }
    }

    pub fn pid(&self) -> u32 {
        self.pid.as_raw() as u32
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = kill(self.pid, Signal::SIGKILL);
        self.files = None;
        let _ = waitpid(self.pid, None);
    }
}

/// A process that hangs in execve(2): the kernel closes a file of the daemon and waits for an
/// answer. It holds the lock exec_update_lock of the process meanwhile.
pub struct Executing {
    pid: Pid,
    files: Option<Unwritable>,
}

impl Executing {
    /// Starts one.
    pub fn start() -> Option<Self> {
        Self::start_after(|| {})
    }

    /// Starts a hanging process, which calls `before` first.
    pub fn start_after(before: impl FnOnce()) -> Option<Self> {
        let files = Unwritable::mounted()?;
        // SAFETY: as in `Holder::start`.
        match unsafe { fork() }.unwrap() {
            ForkResult::Parent { child } => {
                files.wait_for_a_holder();
                let hangs = Self {
                    pid: child,
                    files: Some(files),
                };
                // The write began before the kernel took the lock.
                while !hangs.is_waiting() {
                    thread::yield_now();
                }
                Some(hangs)
            }
            ForkResult::Child => {
                // SAFETY: as in `Holder::start`.
                unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, 0) };
                let work = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                    let file = OpenOptions::new()
                        .read(true)
                        .write(true)
                        .open(files.file())
                        .unwrap();
                    before();
                    let (write, shared) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
                    // SAFETY: a new mapping without other users.
                    unsafe {
                        let page = libc::mmap(
                            std::ptr::null_mut(),
                            PAGE,
                            write,
                            shared,
                            file.as_raw_fd(),
                            0,
                        );
                        page.cast::<u8>().write_volatile(1);
                        libc::execl(
                            c"/bin/sleep".as_ptr(),
                            c"sleep".as_ptr(),
                            c"1000".as_ptr(),
                            std::ptr::null::<u8>(),
                        );
                    }
                }));
                // SAFETY: as in `Holder::start`.
                unsafe { libc::_exit(if work.is_ok() { 0 } else { 1 }) }
            }
        }
    }

    pub fn pid(&self) -> u32 {
        self.pid.as_raw() as u32
    }

    fn is_waiting(&self) -> bool {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid)).unwrap_or_default();
        status.lines().any(|line| line.starts_with("State:\tD"))
    }
}

impl Drop for Executing {
    fn drop(&mut self) {
        let _ = kill(self.pid, Signal::SIGKILL);
        self.files = None;
        let _ = waitpid(self.pid, None);
    }
}

/// The result of `work` in a thread, `None` if it hangs. A thread that waits for a lock of a process
/// goes on when the process of the test ends.
pub fn unless_it_hangs<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (send, received) = channel();
    thread::spawn(move || send.send(work()));
    received.recv_timeout(HANG_TIMEOUT).ok()
}

/// Holds the caller's mmap_lock until the daemon of the file is gone.
pub fn hold_memory(file: &File) {
    let (write, shared) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
    // SAFETY: a new mapping without other users, then a second mapping in its place.
    unsafe {
        let page = libc::mmap(
            std::ptr::null_mut(),
            PAGE,
            write,
            shared,
            file.as_raw_fd(),
            0,
        );
        assert_ne!(page, libc::MAP_FAILED);
        page.cast::<u8>().write_volatile(1);
        let over = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        libc::mmap(page, PAGE, write, over, -1, 0);
    }
}

/// The control of a test: a reader of the command line of this process hangs.
pub fn blocks_readers(pid: u32) -> bool {
    let mut reader = Command::new("cat")
        .arg(format!("/proc/{pid}/cmdline"))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let status = format!("/proc/{}/status", reader.id());
    let hangs = loop {
        if reader.try_wait().unwrap().is_some() {
            break false;
        }
        let text = fs::read_to_string(Path::new(&status)).unwrap_or_default();
        if text.starts_with("Name:\tcat\n") && text.contains("State:\tD") {
            break true;
        }
        thread::yield_now();
    };
    let _ = reader.kill();
    reader.wait().unwrap();
    hangs
}

/// Opcodes of fuse(4): `enum fuse_opcode`.
const LOOKUP: u32 = 1;
const GETATTR: u32 = 3;
const OPEN: u32 = 14;
const READ: u32 = 15;
const WRITE: u32 = 16;
const INIT: u32 = 26;

/// Answers a request of the kernel, unless the request is a write.
fn answer(mut device: &File) -> Option<u32> {
    let mut request = vec![0; 1 << 20];
    let length = device.read(&mut request).ok()?;
    let number = |at: usize| u32::from_ne_bytes(request[at..at + 4].try_into().unwrap());
    assert!(length >= 40);
    let (opcode, node) = (
        number(4),
        u64::from_ne_bytes(request[16..24].try_into().unwrap()),
    );
    let (error, body) = match opcode {
        INIT => (0, init()),
        LOOKUP => (
            0,
            [2u64, 0, 100, 100, 0]
                .iter()
                .flat_map(|n| n.to_ne_bytes())
                .chain(attributes(2))
                .collect(),
        ),
        GETATTR => (
            0,
            [100u64, 0]
                .iter()
                .flat_map(|n| n.to_ne_bytes())
                .chain(attributes(node))
                .collect(),
        ),
        OPEN => (0, [1u64, 0].iter().flat_map(|n| n.to_ne_bytes()).collect()),
        READ => (0, vec![0; PAGE]),
        WRITE => return Some(opcode),
        // FORGET has no answer; the others are not supported.
        2 | 42 => return Some(opcode),
        _ => (-libc::ENOSYS, Vec::new()),
    };
    let mut reply = (16 + body.len() as u32).to_ne_bytes().to_vec();
    reply.extend(error.to_ne_bytes());
    reply.extend(&request[8..16]);
    reply.extend(body);
    let _ = device.write(&reply);
    Some(opcode)
}

/// `struct fuse_init_out` of version 7.31.
fn init() -> Vec<u8> {
    let mut body = vec![0; 64];
    for (at, number) in [(0, 7u32), (4, 31), (8, 65536), (20, 4096), (24, 1)] {
        body[at..at + 4].copy_from_slice(&number.to_ne_bytes());
    }
    body
}

/// `struct fuse_attr`: the root directory, or the file.
fn attributes(node: u64) -> Vec<u8> {
    let mode: u32 = if node == 1 { 0o40777 } else { 0o100666 };
    let long = [node, PAGE as u64, 8, 0, 0, 0]
        .into_iter()
        .flat_map(u64::to_ne_bytes);
    long.chain(
        [0, 0, 0, mode, 1, 0, 0, 0, PAGE as u32, 0]
            .into_iter()
            .flat_map(u32::to_ne_bytes),
    )
    .collect()
}
