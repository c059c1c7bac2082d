//! The system calls for which the libraries have no safe form. All `unsafe` of the crate is in this
//! folder.
//!
//! Handlers exist for signals that the shim waits for, and for stray signals that would end the
//! shim and its containers. A forked child sets its death signal and its signal mask before
//! execve(2).
//!
//! A stray signal gets a handler that does nothing instead of SIG_IGN: execve(2) keeps ignored
//! signals ignored, and the runtime, hooks and containers must begin like any program. See
//! signal(7).
//!
//! tokio also has signals that a task can wait for, but the first signal allocates for all of the
//! kernel's sixty-four signals: 25 KiB, a third of an idle shim's heap. signal-hook-tokio takes
//! 20 KiB for the three waiters (docs/decisions/0014). Here a signal with a waiter sends a byte
//! through its socket. A pipe would also work, but containerd's tests, and people with lsof(8), take
//! a shim's pipes for leaked streams of a container.
//!
//! Memory is returned to the system when the shim is idle.
//! Each pod has a shim, which is nearly always idle. But the allocator keeps the pages of the
//! busiest moment, and the stack keeps the pages of the deepest call. All work that takes memory
//! for a while ends with the end of a child: a run of the runtime, a process of a container. When
//! no child has ended for a moment, unused memory is returned, once. No timer runs before the next
//! child ends.
//!
//! This has little effect as long as each page has some freed piece that glibc keeps for the next
//! request of its size, so a server runs without such lists. Only the environment in which a
//! program starts can disable them, see "Memory Allocation Tunables" in glibc's manual: `start`
//! puts the settings there, and the server removes them.

use std::ffi::{OsStr, OsString, c_int, c_void};
use std::fs::File;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixStream as Socket;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::{env, io};

use linux_raw_sys::loop_device::{
    LO_FLAGS_AUTOCLEAR, LO_FLAGS_DIRECT_IO, LO_FLAGS_READ_ONLY, LOOP_CLR_FD, LOOP_CONFIGURE,
    LOOP_CTL_GET_FREE, LOOP_SET_DIRECT_IO, LOOP_SET_FD, LOOP_SET_STATUS64, loop_config,
};
use nix::errno::Errno;
use nix::libc;
use nix::sched::{CloneFlags, clone};
use nix::unistd::pause;
use rustix::io::fcntl_dupfd_cloexec;
use rustix::net::{SendFlags, send};
use rustix::process::{Pid, Signal, getpid, set_parent_process_death_signal};
use signal_hook::low_level::register;
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncReadExt, Interest};
use tokio::net::UnixStream;

/// Sends any signal number, real-time ones included, through a pidfd: rustix's type names only the
/// classic signals.
pub fn send_signal(pidfd: impl AsFd, signal: i32) -> io::Result<()> {
    let fd = pidfd.as_fd().as_raw_fd();
    // SAFETY: pidfd_send_signal(2) reads a descriptor that outlives the call, two numbers and a
    // null siginfo, which means "as kill(2) would send it". The call writes no memory of this
    // process.
    let sent = unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            fd,
            signal,
            null::<libc::siginfo_t>(),
            0,
        )
    };
    Ok(Errno::result(sent).map(drop)?)
}

/// Registers a descriptor in the event loop.
pub fn watch(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the AsyncFd owns the descriptor, so a registered descriptor is open. No code in this
    // crate removes or replaces the descriptor in the AsyncFd.
    Ok(unsafe { AsyncFd::register_with_interest(fd, interest) }?)
}

/// The size of the stack below the caller that is returned to the system. The kernel gives the main
/// thread 128 KiB from the start (setup_arg_pages in fs/exec.c), and leaves a gap of a megabyte
/// below, so nothing else can be there.
const STACK: usize = 128 * 1024;
/// The stack to keep below the caller, for the frames of `release_stack`.
const MARGIN: usize = 1024;
const PAGE: usize = 4096;

/// Returns the pages that deeper calls left on the calling thread's stack to the system. The stack
/// must have 128 KiB below the caller, used or not: the event loop's stack has them, and those of
/// this crate's own threads.
#[inline(never)]
pub fn release_stack() {
    let here = 0_u8;
    let here = std::hint::black_box(&raw const here).addr();
    let end = (here - MARGIN) & !(PAGE - 1);
    // SAFETY: the range is on this thread's stack, or where nothing can be mapped, and below all
    // live frames: no code reads it before writing. An error means at most that a part of it was
    // never used.
    unsafe {
        libc::madvise(
            std::ptr::with_exposed_provenance_mut(end - STACK),
            STACK,
            libc::MADV_DONTNEED,
        );
    }
}

/// The signals that the kernel sends for a fault of the program itself, which must end it.
const FAULTS: [c_int; 6] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGILL,
    libc::SIGFPE,
    libc::SIGTRAP,
    libc::SIGSYS,
];
/// The faults after which the program would continue.
const RESUMABLE_FAULTS: [c_int; 2] = [libc::SIGTRAP, libc::SIGSYS];
/// Signals that the shim uses otherwise or that do nothing, and SIGPIPE, which Rust ignores.
/// SIGTERM and SIGINT request the end.
const UNCHANGED: [c_int; 8] = [
    libc::SIGKILL,
    libc::SIGSTOP,
    libc::SIGTERM,
    libc::SIGINT,
    libc::SIGCHLD,
    libc::SIGCONT,
    libc::SIGURG,
    libc::SIGWINCH,
];
/// The signals of the C library itself, which its sigaction(3) does not set.
const LIBC_SIGNALS: [c_int; 2] = [32, 33];

/// The former actions of the faults.
static FORMER_ACTIONS: OnceLock<[Option<libc::sigaction>; FAULTS.len()]> = OnceLock::new();

/// The signals of a waiter, for as long as the process lives.
pub struct Signals {
    bytes: UnixStream,
    arrived: Vec<(c_int, Arc<AtomicBool>)>,
}

impl Signals {
    /// From now on these signals arrive here, instead of their former actions.
    pub fn register(signals: &[c_int]) -> io::Result<Self> {
        let (here, there) = Socket::pair()?;
        here.set_nonblocking(true)?;
        // A single socket for all signals: people who search for leaks count a shim's descriptors.
        let there = Arc::new(there);
        let mut arrived = Vec::new();
        for signal in signals {
            let flag = Arc::new(AtomicBool::new(false));
            arrived.push((*signal, Arc::clone(&flag)));
            let there = Arc::clone(&there);
            // SAFETY: the action stores into an atomic and calls send(2), which signal-safety(7)
            // allows; rustix makes the system call itself and does not change errno.
            unsafe {
                register(*signal, move || {
                    flag.store(true, Ordering::Release);
                    // A full socket has enough bytes to wake its reader.
                    let _ = send(&*there, b"x", SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
                })
            }?;
        }
        Ok(Self {
            bytes: UnixStream::from_std(here)?,
            arrived,
        })
    }

    /// Waits until a signal has arrived since the last call. Dropping the future loses no signal.
    pub async fn next(&mut self) -> io::Result<()> {
        // Signals that arrived meanwhile are merged, as the kernel does.
        let mut bytes = [0; 64];
        match self.bytes.read(&mut bytes).await? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(()),
        }
    }

    /// True if the signal has arrived since the last call of `take`.
    pub fn take(&self, signal: c_int) -> bool {
        let mut flags = self.arrived.iter().filter(|(number, _)| *number == signal);
        flags.any(|(_, arrived)| arrived.swap(false, Ordering::AcqRel))
    }
}

/// Ignores all signals that processes may send, except requests to end. Call once.
pub fn ignore_stray_signals() {
    let _ = FORMER_ACTIONS.set(FAULTS.map(action_of));
    for signal in 1..=libc::SIGRTMAX() {
        if UNCHANGED.contains(&signal)
            || LIBC_SIGNALS.contains(&signal)
            // Ignored already: by Rust, or by the program that started containerd.
            || action_of(signal).is_none_or(|action| action.sa_sigaction == libc::SIG_IGN)
        {
            continue;
        }
        // SAFETY: all zeros are a valid sigaction, and the handler has the form that SA_SIGINFO
        // requires. The handler calls only functions that signal-safety(7) allows.
        let set = unsafe {
            let mut action: libc::sigaction = MaybeUninit::zeroed().assume_init();
            action.sa_sigaction =
                ignore_signal as extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART | libc::SA_ONSTACK;
            // The mask blocks nested signals: the frames of many pending signals would not fit into
            // the alternate stack.
            libc::sigfillset(&raw mut action.sa_mask);
            libc::sigaction(signal, &raw const action, null_mut())
        };
        if set != 0 {
            log::warn!(
                signal:%, error:% = io::Error::last_os_error();
                "this signal would end the shim"
            );
        }
    }
    for signal in LIBC_SIGNALS {
        set_disposition(signal, libc::SIG_IGN);
    }
}

/// Sets SIG_IGN or SIG_DFL, by the kernel's own call.
fn set_disposition(signal: c_int, disposition: libc::sighandler_t) {
    // The kernel's struct on 64-bit machines: the handler, flags, the restorer, a mask of 64
    // signals.
    let action = [disposition, 0, 0, 0];
    // SAFETY: rt_sigaction(2) reads the struct, whose mask has the size of the last argument, and
    // writes nothing.
    unsafe {
        libc::syscall(
            libc::SYS_rt_sigaction,
            signal,
            action.as_ptr(),
            null::<c_void>(),
            size_of::<u64>(),
        );
    }
}

fn action_of(signal: c_int) -> Option<libc::sigaction> {
    let mut action = MaybeUninit::uninit();
    // SAFETY: sigaction(2) writes the whole struct when it returns 0.
    unsafe {
        (libc::sigaction(signal, null(), action.as_mut_ptr()) == 0).then(|| action.assume_init())
    }
}

extern "C" fn ignore_signal(signal: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    let Some(fault) = FAULTS.iter().position(|fault| *fault == signal) else {
        return;
    };
    // SAFETY: with SA_SIGINFO the kernel passes a siginfo. The code of a signal that a process sent
    // is not positive.
    if unsafe { (*info).si_code } <= 0 {
        return;
    }
    if let Some(before) = FORMER_ACTIONS.get().and_then(|all| all[fault].as_ref()) {
        // The fault happens again, this time with the former action: Rust reports an exhausted
        // stack. SAFETY: the kernel returned the action; raise(3) takes a number.
        unsafe {
            libc::sigaction(signal, before, null_mut());
            if RESUMABLE_FAULTS.contains(&signal) {
                libc::raise(signal);
            }
        }
    }
}

// Settings that a child makes itself, between fork(2) and execve(2): `Command` has none of them.
// Only functions that signal-safety(7) allows may run there: any thread of the parent may hold the
// allocator's lock.

/// The kernel kills the child when the parent thread ends, see prctl(2). So the event loop's thread
/// must start the child.
pub fn die_with_this_thread(command: &mut Command) {
    let parent = getpid().as_raw_pid();
    // SAFETY: the closure makes two system calls that take numbers, and owns a number.
    unsafe {
        command.pre_exec(move || {
            done(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL))?;
            // The parent may have died before the call.
            if libc::getppid() == parent {
                Ok(())
            } else {
                Err(io::Error::from_raw_os_error(libc::ESRCH))
            }
        });
    }
}

/// The child begins without the ignored signals of the server. execve(2) resets handlers, and
/// `Command` SIGPIPE and the mask.
pub fn with_default_signals(command: &mut Command) {
    // SAFETY: the closure makes system calls that take numbers and a struct on its own stack.
    unsafe {
        command.pre_exec(|| {
            for signal in LIBC_SIGNALS {
                set_disposition(signal, libc::SIG_DFL);
            }
            Ok(())
        });
    }
}

/// The child inherits this descriptor under the same number.
pub fn inherit(command: &mut Command, fd: OwnedFd) {
    // SAFETY: the closure makes one system call, and owns the descriptor.
    unsafe {
        command.pre_exec(move || done(libc::fcntl(fd.as_raw_fd(), libc::F_SETFD, 0)));
    }
}

/// The child inherits these descriptors as 3, 4, 5 and so on, and no descriptors above.
pub fn inherit_from_three(command: &mut Command, fds: Vec<OwnedFd>) -> io::Result<()> {
    const FIRST: RawFd = 3;
    let Some(one) = fds.first() else {
        return Ok(());
    };
    let end = FIRST + RawFd::try_from(fds.len()).map_err(io::Error::other)?;
    // Numbers above the targets, so that no source is overwritten before its turn.
    let sources: Vec<OwnedFd> = fds
        .iter()
        .map(|fd| fcntl_dupfd_cloexec(fd, end))
        .collect::<Result<_, _>>()?;
    // Between fork and exec `Command` has its own pipe, which reports a failed exec. While these
    // numbers are in use the pipe gets a higher number and is not overwritten.
    let mut taken = Vec::new();
    loop {
        let duplicate = fcntl_dupfd_cloexec(one, FIRST)?;
        if duplicate.as_raw_fd() >= end {
            break;
        }
        taken.push(duplicate);
    }
    // SAFETY: the closure only calls dup2(2), on descriptors that it owns. dup2 replaces only
    // copies of `taken` in the child, or descriptors that exec closes.
    unsafe {
        command.pre_exec(move || {
            let _numbers_stay_taken = &taken;
            (FIRST..end)
                .zip(&sources)
                .try_for_each(|(target, source)| done(libc::dup2(source.as_raw_fd(), target)))
        });
    }
    Ok(())
}

fn done(result: c_int) -> io::Result<()> {
    Ok(Errno::result(result).map(drop)?)
}

/// Forks a child that is the only member of a new user namespace, and idles until it is killed.
pub fn child_in_user_namespace() -> io::Result<Pid> {
    let mut stack = [0; 16 * 1024];
    let idle = Box::new(|| {
        // If the shim is killed now, the child dies with the thread that forked it.
        let _ = set_parent_process_death_signal(Some(Signal::KILL));
        loop {
            pause();
        }
    });
    // SAFETY: without CLONE_VM this is a fork: the child has copies of all memory, so it cannot
    // harm the parent. The child makes two system calls that are allowed after a fork of a process
    // with threads, and never returns.
    let child = unsafe {
        clone(
            idle,
            &mut stack,
            CloneFlags::CLONE_NEWUSER,
            Some(libc::SIGCHLD),
        )
    }?;
    Pid::from_raw(child.as_raw()).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// The options for attaching a file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LoopMode {
    /// Writes are not allowed.
    pub read_only: bool,
    /// Bypass the page cache.
    pub direct_io: bool,
}

/// The number of a loop device that is currently free; `control` is /dev/loop-control.
pub fn free_loop_device(control: &File) -> io::Result<u32> {
    let number = ioctl(control, LOOP_CTL_GET_FREE, 0)?;
    u32::try_from(number).map_err(io::Error::other)
}

/// Attaches a file to a loop device, which detaches the file after the last user. EBUSY: a
/// competing process attached first.
pub fn attach_loop_device(device: &File, file: &File, mode: LoopMode) -> io::Result<()> {
    let config = configure(file, mode)?;
    match ioctl(device, LOOP_CONFIGURE, (&raw const config).addr()) {
        // Before Linux 5.8.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOTTY)) => {
            attach_in_steps(device, &config, mode)
        }
        result => result.map(drop),
    }
}

fn configure(file: &File, mode: LoopMode) -> io::Result<loop_config> {
    // SAFETY: all zeros are a valid loop_config, which has only numbers.
    let mut config: loop_config = unsafe { MaybeUninit::zeroed().assume_init() };
    config.fd = u32::try_from(file.as_raw_fd()).map_err(io::Error::other)?;
    config.info.lo_flags = LO_FLAGS_AUTOCLEAR as u32;
    if mode.direct_io {
        config.info.lo_flags |= LO_FLAGS_DIRECT_IO as u32;
    }
    if mode.read_only {
        config.info.lo_flags |= LO_FLAGS_READ_ONLY as u32;
    }
    Ok(config)
}

fn attach_in_steps(device: &File, config: &loop_config, mode: LoopMode) -> io::Result<()> {
    ioctl(device, LOOP_SET_FD, config.fd as usize)?;
    let mut set = ioctl(device, LOOP_SET_STATUS64, (&raw const config.info).addr());
    if set.is_ok() && mode.direct_io {
        set = ioctl(device, LOOP_SET_DIRECT_IO, 1);
    }
    set.map(drop)
        .inspect_err(|_| drop(ioctl(device, LOOP_CLR_FD, 0)))
}

fn ioctl(device: &File, request: u32, argument: usize) -> io::Result<i32> {
    // SAFETY: private to this file. The argument is a number, or the address of a struct in the
    // kernel's layout that outlives the call and that none of these requests writes to.
    let answer = unsafe { libc::ioctl(device.as_raw_fd(), request.into(), argument) };
    Ok(Errno::result(answer)?)
}

const TUNABLES: &str = "GLIBC_TUNABLES";
/// No lists of freed pieces, a single heap for all threads, and no cached stacks of ended threads.
const SETTINGS: &str =
    "glibc.malloc.tcache_count=0:glibc.malloc.arena_max=1:glibc.pthread.stack_cache_size=0";

/// The settings for the environment of a new server, after the existing settings.
pub fn memory_settings() -> (&'static str, OsString) {
    (
        TUNABLES,
        add_settings(env::var_os(TUNABLES).unwrap_or_default()),
    )
}

/// Removes the settings from this server's environment: the runtime and its hooks get containerd's
/// own. Call it before the first thread is started.
pub fn remove_memory_settings() {
    let settings = env::var_os(TUNABLES);
    let Some(others) = settings.as_deref().and_then(strip_settings) else {
        return;
    };
    // SAFETY: there is no other thread that could read the environment meanwhile.
    unsafe {
        if others.is_empty() {
            env::remove_var(TUNABLES);
        } else {
            env::set_var(TUNABLES, others);
        }
    }
}

fn add_settings(others: OsString) -> OsString {
    let mut both = others.into_vec();
    if !both.is_empty() {
        both.push(b':');
    }
    both.extend_from_slice(SETTINGS.as_bytes());
    OsString::from_vec(both)
}

/// `None` if the shim's settings are missing.
fn strip_settings(both: &OsStr) -> Option<&OsStr> {
    let others = both.as_bytes().strip_suffix(SETTINGS.as_bytes())?;
    Some(OsStr::from_bytes(
        others.strip_suffix(b":").unwrap_or(others),
    ))
}

/// Returns unused memory to the system.
pub fn return_unused_memory() {
    bindguard_sys::trim_heap();
    release_stack();
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use super::*;

    /// The number of resident pages below the caller, see "pagemap" in the kernel's documentation.
    #[inline(never)]
    fn pages_below() -> usize {
        let here = 0_u8;
        let first = (std::hint::black_box(&raw const here).addr() - MARGIN - 64 * 1024) / PAGE;
        let mut entries = [0; 8 * 16];
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        pagemap
            .read_exact_at(&mut entries, (first * 8) as u64)
            .unwrap();
        entries
            .chunks(8)
            .filter(|entry| entry[7] & 0x80 != 0)
            .count()
    }

    #[inline(never)]
    fn go_deep() {
        let mut deep = [7_u8; 96 * 1024];
        std::hint::black_box(&mut deep);
    }

    #[test]
    fn unused_stack_pages_are_released() {
        let thread = std::thread::Builder::new()
            .stack_size(512 * 1024)
            .spawn(|| {
                go_deep();
                let before = pages_below();
                release_stack();
                (before, pages_below())
            });
        assert_eq!(thread.unwrap().join().unwrap(), (16, 0));
    }
}

#[cfg(test)]
mod signals_tests {
    use std::env;
    use std::fs::File;
    use std::io::{BufRead as _, Read as _};
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::{Command, Stdio};

    use super::*;

    const CHILD: &str = "BINDGUARD_TEST_SIGNALS";
    const READY: &str = "the handlers are set";

    /// Signals are per process, so the test starts a process that runs `in_the_child`.
    fn child(what: &str) -> Command {
        let mut child = Command::new(env::current_exe().unwrap());
        child
            .args([
                "--exact",
                "kernel::signals_tests::in_the_child",
                "--nocapture",
            ])
            .env(CHILD, what);
        child
    }

    fn status(what: &str) -> std::process::ExitStatus {
        child(what).output().unwrap().status
    }

    fn sent() -> impl Iterator<Item = c_int> {
        (1..=64)
            .filter(|signal| !UNCHANGED.contains(signal))
            .flat_map(|signal| [signal; 2])
    }

    #[test]
    fn in_the_child() {
        let Ok(what) = env::var(CHILD) else { return };
        ignore_stray_signals();
        match what.as_str() {
            "sent" => {
                for signal in sent() {
                    // SAFETY: kill(2) takes two numbers.
                    assert_eq!(unsafe { libc::kill(libc::getpid(), signal) }, 0);
                }
            }
            "wait" => {
                println!("{READY}");
                // The parent closes the pipe when all is sent.
                io::stdin().read_to_end(&mut Vec::new()).unwrap();
            }
            // SAFETY: the write is invalid on purpose.
            "fault" => unsafe { std::ptr::without_provenance_mut::<u8>(8).write_volatile(1) },
            _ => std::process::abort(),
        }
    }

    #[test]
    fn sent_signals_are_ignored_and_faults_are_not() {
        assert_eq!(status("sent").signal(), None);
        assert!(status("sent").success());
        assert_eq!(status("fault").signal(), Some(libc::SIGSEGV));
        assert_eq!(status("abort").signal(), Some(libc::SIGABRT));
    }

    /// Signals to a stopped process arrive together when it continues, on the small alternate
    /// stack.
    #[test]
    fn many_pending_signals_are_ignored() {
        let mut child = child("wait")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = io::BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().contains(READY)));
        let pid = c_int::try_from(child.id()).unwrap();
        for signal in [libc::SIGSTOP]
            .into_iter()
            .chain(sent())
            .chain([libc::SIGCONT])
        {
            // SAFETY: kill(2) takes two numbers, and the child is not reaped yet.
            assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
        }
        drop(child.stdin.take());
        assert_eq!(child.wait().unwrap().signal(), None);
        drop(lines);
    }

    fn shell(script: &str) -> Command {
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", script]);
        shell
    }

    #[test]
    fn a_child_has_the_default_signals_and_dies_with_its_parent() {
        LIBC_SIGNALS
            .iter()
            .for_each(|signal| set_disposition(*signal, libc::SIG_IGN));
        let mut status = Command::new("cat");
        status.arg("/proc/self/status");
        let ignored = |command: &mut Command| {
            let output = command.output().unwrap().stdout;
            let status = String::from_utf8(output).unwrap();
            let mask = status
                .lines()
                .find_map(|line| line.strip_prefix("SigIgn:\t"))
                .unwrap();
            u64::from_str_radix(mask, 16).unwrap()
        };
        let of_the_library = LIBC_SIGNALS
            .iter()
            .map(|signal| 1 << (signal - 1))
            .sum::<u64>();
        assert_eq!(ignored(&mut status) & of_the_library, of_the_library);
        with_default_signals(&mut status);
        assert_eq!(
            ignored(&mut status) & (of_the_library | 1 << (libc::SIGPIPE - 1)),
            0
        );

        let starter = std::thread::spawn(|| {
            let mut child = Command::new("sleep");
            die_with_this_thread(child.arg("60"));
            child.spawn().unwrap()
        });
        let mut child = starter.join().unwrap();
        assert_eq!(
            std::os::unix::process::ExitStatusExt::signal(&child.wait().unwrap()),
            Some(libc::SIGKILL)
        );
    }

    #[test]
    fn an_inherited_descriptor_keeps_its_number_and_others_are_closed() {
        let (kept, _other) = (
            File::open("/dev/null").unwrap(),
            File::open("/dev/zero").unwrap(),
        );
        let script = "ls -l /proc/self/fd | grep -c -e /dev/zero; readlink /proc/self/fd/$KEPT";
        let mut command = shell(script);
        command
            .env("KEPT", kept.as_raw_fd().to_string())
            .stdin(Stdio::null());
        inherit(&mut command, kept.into());
        assert_eq!(
            String::from_utf8(command.output().unwrap().stdout).unwrap(),
            "0\n/dev/null\n"
        );
    }
}

#[cfg(test)]
mod waiting_tests {
    use std::time::Duration;

    use nix::libc;
    use nix::sys::signal::{Signal, raise};
    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn signals_that_arrive_together_are_reported_once() {
        let mut signals = Signals::register(&[libc::SIGUSR1, libc::SIGUSR2]).unwrap();
        assert!(
            timeout(Duration::from_millis(20), signals.next())
                .await
                .is_err()
        );
        for signal in [Signal::SIGUSR1, Signal::SIGUSR2, Signal::SIGUSR1] {
            raise(signal).unwrap();
        }
        signals.next().await.unwrap();
        assert!(
            timeout(Duration::from_millis(20), signals.next())
                .await
                .is_err()
        );
        assert!(signals.take(libc::SIGUSR1) && signals.take(libc::SIGUSR2));
        raise(Signal::SIGUSR2).unwrap();
        signals.next().await.unwrap();
        assert!(!signals.take(libc::SIGUSR1) && signals.take(libc::SIGUSR2));
    }
}

#[cfg(test)]
mod mounts_tests {
    use std::fs::{self, OpenOptions};
    use std::io::Write;

    use linux_raw_sys::loop_device::loop_info64;

    use super::*;

    #[test]
    fn the_structs_have_the_kernels_sizes() {
        assert_eq!(size_of::<loop_info64>(), 232);
        assert_eq!(size_of::<loop_config>(), 304);
    }

    /// The calls for kernels before 5.8; newer kernels still have them.
    #[test]
    fn attached_by_the_older_calls() {
        let open = |path: &str| OpenOptions::new().read(true).write(true).open(path);
        let Ok(control) = open("/dev/loop-control") else {
            let _ = writeln!(
                io::stderr(),
                "SKIPPED attached_by_the_older_calls: no loop devices"
            );
            return;
        };
        let image = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
        image.as_file().set_len(1 << 20).unwrap();
        // a competing process may take the free device first
        let attached = (0..100).find_map(|_| {
            let number = free_loop_device(&control).ok()?;
            let device = open(&format!("/dev/loop{number}")).ok()?;
            let mode = LoopMode {
                direct_io: true,
                ..LoopMode::default()
            };
            let config = configure(image.as_file(), mode).unwrap();
            attach_in_steps(&device, &config, mode)
                .ok()
                .map(|()| (number, device))
        });
        let (number, _device) = attached.unwrap();
        let of_device =
            |name: &str| fs::read_to_string(format!("/sys/block/loop{number}/{name}")).unwrap();
        assert_eq!(of_device("size").trim(), "2048");
        assert_eq!(of_device("loop/autoclear").trim(), "1");
        assert_eq!(of_device("loop/dio").trim(), "1");
    }
}

#[cfg(test)]
mod memory_tests {
    use super::*;

    #[test]
    fn other_settings_stay() {
        for others in ["", "glibc.malloc.check=3", "a=1:b=2"] {
            assert_eq!(
                strip_settings(&add_settings(others.into())),
                Some(OsStr::new(others))
            );
        }
        assert_eq!(strip_settings(OsStr::new("glibc.malloc.check=3")), None);
    }
}
