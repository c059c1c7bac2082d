//! This process and its children: its caller's signals and descriptors, its heap, the faults of a
//! test, forks, and the register of children that may hang.
//!
//! Before `main`, Rust's runtime ignores SIGPIPE and opens /dev/null for each closed standard
//! stream, and [`std::process::Command`] resets SIGPIPE to its default action. A runtime passes
//! signal actions on: if the caller of crun ignores SIGPIPE (as systemd's services do), the
//! containers ignore SIGPIPE, too. So the original state is recorded, and restored right before
//! execve(2).
#![allow(unsafe_code)]

use std::env;
use std::fs::{self, DirBuilder, File};
use std::io::{self, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use std::{ptr, thread};

use bindguard_core::handover::FAULT_VARIABLE;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use nix::sys::signal::{SIGPIPE, SigHandler, signal};
use nix::unistd::{ForkResult, fork};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, CWD, FlockOperation, Mode, OFlags, flock, linkat};
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use rustix::process::{
    DumpableBehavior, Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, geteuid, getpid, getppid,
    kill_process, pidfd_open, pidfd_send_signal, set_dumpable_behavior,
    set_parent_process_death_signal, waitid,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use strum::{IntoStaticStr, VariantArray};

use crate::handle::Handle;
use crate::kernel::close_all_but;

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
        let _ = unsafe { signal(SIGPIPE, SigHandler::SigDfl) };
    }
    let (stdin, stdout, stderr) = (io::stdin(), io::stdout(), io::stderr());
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

// Fault points: places where a test can kill or stop the guard, and switches that disable newer
// kernel features.
//
// Only a build with the feature `fault-points` has them. `BINDGUARD_FAULT` then names the faults,
// separated by commas:
// * `PLACE` kills the process there, as an out-of-memory kill would
// * `stop:PLACE` stops it there, as a hung server would
// * `panic:PLACE` panics there
// * `no-beneath` disables `MOVE_MOUNT_BENEATH`, as before Linux 6.5
// * `list` prints every place and exits
//
// There is a place for each state that a killed guard can leave behind. After each step that
// changes something, a test can inspect the change.

// In the order in which an admission reaches the places.
/// A place at which a test can end the guard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "kebab-case", const_into_str)]
pub enum FaultPoint {
    /// Nothing is read yet.
    Start,
    /// The spec is read and understood.
    SpecRead,
    /// Every bind is judged, nothing is done yet.
    Judged,
    /// The subpath and its volume are open and judged again.
    Held,
    /// The current target is open.
    TargetOpened,
    /// A bind of the target exists, attached nowhere.
    Cloned,
    /// Older kernels: a thread is in a mount namespace of its own.
    NamespaceUnshared,
    /// Older kernels: a copy of the parent mount lies in that namespace.
    CopyAttached,
    /// Older kernels: the new mount lies in the copy, and by propagation under the stale mount.
    Tucked,
    /// The new mount is attached, the stale mount is not yet detached.
    AfterAttach,
    /// The stale mount is detached; the result is not checked yet.
    Detached,
    /// The result is checked and current.
    Verified,
    /// The payload that a swap stranded in the volume is removed.
    Cleared,
    /// The file for the edited spec is made beside the old spec, and empty.
    SpecBegun,
    /// The edited spec is written beside the old spec.
    SpecWritten,
    /// The edited spec is in its place, the runtime not yet started.
    AfterEdit,
    /// The journal's line is written.
    Journaled,
    /// The journal is full, locked and about to be moved away.
    Rotating,
    /// The full journal is moved away, and there is no new journal yet.
    Rotated,
}

/// The compiler leaves the faults out of every other build.
const HAS_FAULTS: bool = cfg!(feature = "fault-points");

static IS_WITHOUT_FAULTS: AtomicBool = AtomicBool::new(false);

impl FaultPoint {
    /// Kills or stops the process, or panics, if `BINDGUARD_FAULT` names this place.
    pub fn reach(self) {
        if !HAS_FAULTS {
            return;
        }
        if asks_for("list") {
            for point in Self::VARIANTS {
                println!("{}", point.into_str());
            }
            std::process::exit(0);
        }
        let signal = match self.into_str() {
            name if asks_for(name) => Signal::KILL,
            name if asks_for(&format!("stop:{name}")) => Signal::STOP,
            name if asks_for(&format!("panic:{name}")) => panic!("requested at {name}"),
            _ => return,
        };
        // A signal to the own process cannot fail.
        let _ = kill_process(getpid(), signal);
    }
}

/// True if a test disables `MOVE_MOUNT_BENEATH`.
pub fn denies_beneath() -> bool {
    asks_for("no-beneath")
}

/// No place is reached in this process from now on: a test ends the guard or the agent, not a
/// process of theirs.
pub(crate) fn disable_faults() {
    IS_WITHOUT_FAULTS.store(true, Ordering::Relaxed);
}

fn asks_for(fault: &str) -> bool {
    HAS_FAULTS
        && !IS_WITHOUT_FAULTS.load(Ordering::Relaxed)
        && env::var(FAULT_VARIABLE).is_ok_and(|faults| faults.split(',').any(|word| word == fault))
}

// Children, which never return to the caller's code, and messages with descriptors between the two
// halves: unix(7), `SCM_RIGHTS`.
//
// Both halves are the same program, so serde writes and reads each message. A child may use the
// heap: glibc keeps the heap usable across fork(2).

/// Limit of the wait for a child that was killed, or whose socket is closed. After it, a thread
/// waits.
const END_TIMEOUT: Duration = Duration::from_millis(100);

/// Bytes of the stack of a thread that waits for the end of a child.
const REAPER_STACK: usize = 64 * 1024;

/// Runs `work` in a child, which ends with it. `work` must not use a lock that another thread of
/// the caller may hold.
pub(crate) fn fork_child(work: impl FnOnce()) -> io::Result<i32> {
    // SAFETY: the child runs `work` and ends: nothing of the caller is dropped or flushed twice.
    match unsafe { fork() }? {
        ForkResult::Parent { child } => Ok(child.as_raw()),
        ForkResult::Child => {
            // A panic must not unwind from here: the caller would go on twice.
            let _ = catch_unwind(AssertUnwindSafe(work));
            // SAFETY: ends the process without the exit handlers that its parent registered.
            unsafe { libc::_exit(0) }
        }
    }
}

/// A child process. It is reaped when it ends, at the latest some time after the end of this value.
#[derive(Debug)]
pub(crate) struct ChildProcess {
    /// For files below `/proc`.
    pub(crate) pid: i32,
    /// Can be read when the child ended.
    pub(crate) pidfd: OwnedFd,
}

impl ChildProcess {
    /// Runs `work` in a child that has only these descriptors of the caller, which are sorted. The
    /// child ends with the thread that started it.
    pub(crate) fn start(kept: &[RawFd], work: impl FnOnce()) -> io::Result<Self> {
        let parent = getpid();
        let pid = fork_child(|| {
            // Nothing of a container may look into this copy of the agent.
            let _ = set_dumpable_behavior(DumpableBehavior::NotDumpable);
            end_with_parent(true);
            // The child must not keep a pipe open while it hangs. And the parent may have ended
            // before the kernel knew that the child ends with it.
            if close_all_but(kept).is_ok() && getppid() == Some(parent) {
                work();
            }
        })?;
        let process = Pid::from_raw(pid).ok_or(io::ErrorKind::NotFound)?;
        // A child that was not waited for keeps its pid.
        let pidfd = pidfd_open(process, PidfdFlags::empty())?;
        Ok(Self { pid, pidfd })
    }

    /// Kills the child, if the child runs.
    pub(crate) fn kill(&self) {
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
    }

    pub(crate) fn has_ended(&self) -> bool {
        is_readable(&self.pidfd, Duration::ZERO)
    }
}

fn reap(pidfd: &OwnedFd) {
    let _ = waitid(WaitId::PidFd(pidfd.as_fd()), WaitIdOptions::EXITED);
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        if is_readable(&self.pidfd, END_TIMEOUT) {
            return reap(&self.pidfd);
        }
        // Without a thread the child is reaped when this process ends.
        if let Ok(pidfd) = self.pidfd.try_clone() {
            let reaper = thread::Builder::new().name("reap-child".to_owned());
            let _ = reaper.stack_size(REAPER_STACK).spawn(move || reap(&pidfd));
        }
    }
}

/// Runs `work` in a thread, and waits for it.
///
/// # Errors
/// If no thread can be started.
pub(crate) fn in_thread<T: Send>(name: &str, work: impl FnOnce() -> T + Send) -> io::Result<T> {
    thread::scope(|scope| {
        let builder = thread::Builder::new().name(name.to_owned());
        let ended = builder.spawn_scoped(scope, work)?.join();
        Ok(ended.unwrap_or_else(|panic| resume_unwind(panic)))
    })
}

/// Lets the kernel kill the calling process when the thread that forked it ends, or not.
pub(crate) fn end_with_parent(ends: bool) {
    let _ = set_parent_process_death_signal(ends.then_some(Signal::KILL));
}

/// Polls until something can be read; ignores signals of this process.
pub(crate) fn is_readable(descriptor: impl AsFd, timeout: Duration) -> bool {
    let until = Instant::now() + timeout;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let mut polled = [PollFd::new(&descriptor, PollFlags::IN)];
        match poll(&mut polled, Timespec::try_from(left).ok().as_ref()) {
            Err(Errno::INTR) => {}
            ready => return ready.is_ok_and(|ready| ready > 0),
        }
    }
}

/// Polls until the child has answered. A child that waits for a processor is late, not silent: it
/// has until this time.
pub(crate) fn is_answered(socket: &OwnedFd, child: i32, timeout: Duration, until: Instant) -> bool {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if is_readable(socket, timeout.min(left)) {
            return true;
        }
        if timeout >= left || !is_runnable(child) {
            return false;
        }
    }
}

/// True if a process waits for a processor, or was stopped: the process is late, but not blocked.
/// proc_pid_status(5) takes no lock.
pub(crate) fn is_runnable(pid: i32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let mut states = status
        .lines()
        .filter_map(|line| line.strip_prefix("State:\t"));
    states.any(|state| state.starts_with(['R', 'T', 't']))
}

/// Limit of descriptors of a message. The kernel's is 253.
const MAX_DESCRIPTORS: usize = 3;

/// Limit of a message: a byte of a path takes up to four, and a message has two paths of 4096.
const MAX_MESSAGE: usize = 64 << 10;

/// Two connected sockets, which keep the bounds of messages.
pub(crate) fn sockets() -> io::Result<(OwnedFd, OwnedFd)> {
    let (family, flags) = (AddressFamily::UNIX, SocketFlags::CLOEXEC);
    Ok(socketpair(family, SocketType::SEQPACKET, flags, None)?)
}

/// Sends a message.
///
/// # Errors
/// If the receiver is gone, or the message is too long.
pub(crate) fn send(
    socket: &OwnedFd,
    message: &impl Serialize,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Errno::TOOBIG.into());
    }
    let bytes = [IoSlice::new(&bytes)];
    loop {
        match sendmsg(socket, &bytes, &mut ancillary, SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            sent => return Ok(sent.map(drop)?),
        }
    }
}

/// Receives a message and its descriptors.
///
/// # Errors
/// `UnexpectedEof` if the sender is gone, and the kernel's.
pub(crate) fn receive<T: DeserializeOwned>(socket: &OwnedFd) -> io::Result<(T, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = vec![0; MAX_MESSAGE];
    let received = loop {
        let mut buffer = [IoSliceMut::new(&mut bytes)];
        match recvmsg(socket, &mut buffer, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            received => break received?,
        }
    };
    let mut descriptors = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(some) = message {
            descriptors.extend(some);
        }
    }
    let message = serde_json::from_slice(&bytes[..received.bytes])?;
    Ok((message, descriptors))
}

// The register of processes that may hang: children in containers, and probes of filesystems.
//
// A process whose request a FUSE daemon or a file server took ends only with the answer, whatever
// becomes of its starter. Without a register, each restart of the agent and each create would add
// such processes. All programs share the register, a folder with a file for each process:
//
// | lock of the file | holder | meaning |
// |---|---|---|
// | flock(2) | the process | the process is alive |
// | `F_OFD_SETLK` of fcntl(2) | its starter | the starter still waits for the process |
//
// The kernel frees each lock at the end of its holder, also after SIGKILL. So a live process
// without a starter hangs.

const MAX_SUBJECT: u64 = 4096;

/// A process that is about to start, or was started. Its file is removed with this value, unless the
/// process hangs.
#[derive(Debug)]
pub(crate) struct Registered {
    /// `None` while the file has no name: the process is not listed.
    path: Option<PathBuf>,
    /// The descriptor for the process, until the process is started.
    file: Option<OwnedFd>,
    starter: File,
}

impl Registered {
    /// Registers a process with its subject: what may let the process hang.
    ///
    /// # Errors
    /// If the register cannot be written.
    pub(crate) fn new(subject: &str) -> io::Result<Self> {
        let mut registered = Self::unlisted()?;
        registered.list(subject)?;
        Ok(registered)
    }

    /// A process that has no subject yet.
    ///
    /// # Errors
    /// If the register cannot be written.
    pub(crate) fn unlisted() -> io::Result<Self> {
        let folder = folder();
        let mut directory = DirBuilder::new();
        directory.recursive(true).mode(0o755);
        if let Some(parent) = folder.parent() {
            directory.create(parent)?;
        }
        directory.mode(0o700).create(&folder)?;
        // Without a name until both locks are held: a reader removes a file without a lock.
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let file = rustix::fs::open(&folder, flags, Mode::from(0o600))?;
        let link = Handle::link_of(&file);
        let starter = File::options().read(true).write(true).open(link)?;
        flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        fcntl(&starter, FcntlArg::F_OFD_SETLK(&whole_file()))?;
        Ok(Self {
            path: None,
            file: Some(file),
            starter,
        })
    }

    /// Lists the process, which may run already.
    ///
    /// # Errors
    /// If the register cannot be written.
    pub(crate) fn list(&mut self, subject: &str) -> io::Result<()> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        self.starter.write_all_at(subject.as_bytes(), 0)?;
        let link = Handle::link_of(&self.starter);
        loop {
            let number = NUMBER.fetch_add(1, Ordering::Relaxed);
            let path = folder().join(format!("{}-{number}", std::process::id()));
            match linkat(CWD, &link, CWD, &path, AtFlags::SYMLINK_FOLLOW) {
                Err(Errno::EXIST) => {}
                Err(errno) => return Err(errno.into()),
                Ok(()) => {
                    self.path = Some(path);
                    return Ok(());
                }
            }
        }
    }

    /// The descriptor that the process must keep open.
    pub(crate) fn file(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(AsFd::as_fd)
    }

    /// Leaves the descriptor to the process, which was started.
    pub(crate) fn start(&mut self) {
        self.file = None;
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.file = None;
        // The process may end at any time: the reader removes the file then.
        if let Some(path) = &self.path
            && File::open(path).is_ok_and(|file| !is_alive(&file))
        {
            let _ = fs::remove_file(path);
        }
    }
}

/// The subjects of all processes that hang. Removes the files of those that ended.
pub(crate) fn hanging() -> Vec<String> {
    let mut hanging = Vec::new();
    for entry in fs::read_dir(folder()).into_iter().flatten().flatten() {
        let path = entry.path();
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let Ok(file) = File::options().read(true).custom_flags(flags).open(&path) else {
            continue;
        };
        if !is_alive(&file) {
            let _ = fs::remove_file(&path);
            continue;
        }
        let mut lock = whole_file();
        let found = fcntl(&file, FcntlArg::F_OFD_GETLK(&mut lock));
        if found.is_ok() && lock.l_type == libc::F_UNLCK as libc::c_short {
            let read = io::read_to_string(file.take(MAX_SUBJECT));
            hanging.extend(read.ok());
        }
    }
    hanging
}

/// The lock is shared: two readers at once would otherwise take each other for the process.
fn is_alive(file: &File) -> bool {
    flock(file, FlockOperation::NonBlockingLockShared).is_err()
}

fn whole_file() -> libc::flock {
    libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    }
}

/// On a tmpfs: no process lives on after a boot.
fn folder() -> PathBuf {
    match geteuid() {
        uid if uid.is_root() => "/run/bindguard/hanging".into(),
        uid => Path::new("/run/user")
            .join(uid.as_raw().to_string())
            .join("bindguard/hanging"),
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

#[cfg(test)]
mod hanging_processes_tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::process::{Child, Command, Stdio};
    use std::thread::yield_now;
    use std::time::{Duration, Instant};

    use super::*;

    /// A process that ends with this value.
    struct Process(Child);

    impl Process {
        fn with(registered: &mut Registered) -> Self {
            // The descriptor is the child's standard input.
            let file = registered.file().unwrap().try_clone_to_owned().unwrap();
            let mut command = Command::new("sleep");
            let command = command.arg("1000").stdin(file).stdout(Stdio::null());
            let child = command.stderr(Stdio::null()).spawn().unwrap();
            registered.start();
            Self(child)
        }
    }

    impl Drop for Process {
        fn drop(&mut self) {
            self.0.kill().unwrap();
            self.0.wait().unwrap();
        }
    }

    fn count(subject: &str) -> usize {
        hanging().iter().filter(|known| *known == subject).count()
    }

    /// A process that another test forks has copies of all descriptors for a moment.
    fn wait_until(is_done: impl Fn() -> bool) {
        let start = Instant::now();
        while !is_done() {
            assert!(start.elapsed() < Duration::from_secs(60));
            yield_now();
        }
    }

    #[test]
    fn a_live_process_without_a_starter_hangs() {
        let subject = format!("test {}", std::process::id());
        let mut registered = Registered::new(&subject).unwrap();
        let process = Process::with(&mut registered);
        let path = registered.path.clone().unwrap();
        assert_eq!(count(&subject), 0, "its starter waits for it");
        drop(registered);
        wait_until(|| count(&subject) == 1);
        drop(process);
        wait_until(|| count(&subject) == 0 && !fs::exists(&path).unwrap());
    }

    #[test]
    fn a_process_that_ended_in_time_leaves_no_file() {
        let mut registered = Registered::new("in time").unwrap();
        drop(Process::with(&mut registered));
        let path = registered.path.clone().unwrap();
        drop(registered);
        wait_until(|| count("in time") == 0 && !fs::exists(&path).unwrap());
    }

    #[test]
    fn readers_at_once_do_not_take_each_other_for_the_process() {
        let subject = format!("readers {}", std::process::id());
        let mut registered = Registered::new(&subject).unwrap();
        let process = Process::with(&mut registered);
        let reader = File::open(registered.path.as_ref().unwrap()).unwrap();
        drop(registered);
        drop(process);
        wait_until(|| !is_alive(&reader));
        assert_eq!(count(&subject), 0);
    }
}
