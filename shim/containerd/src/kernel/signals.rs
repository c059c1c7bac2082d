//! Signal handlers: for signals that the shim waits for, and for stray signals that would end the
//! shim and its containers.
//!
//! A stray signal gets a handler that does nothing instead of SIG_IGN: execve(2) keeps ignored
//! signals ignored, and the runtime, hooks and containers must begin like any program. See
//! signal(7).

use std::ffi::{c_int, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::net::UnixStream;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use nix::libc;
use rustix::net::{SendFlags, send};
use signal_hook::low_level::register;

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
pub(super) const LIBC_SIGNALS: [c_int; 2] = [32, 33];

/// The former actions of the faults.
static FORMER_ACTIONS: OnceLock<[Option<libc::sigaction>; FAULTS.len()]> = OnceLock::new();

/// From now on a signal sets the flag and sends a byte through the socket, instead of its former
/// action.
pub(crate) fn forward_signal(
    signal: c_int,
    arrived: Arc<AtomicBool>,
    socket: Arc<UnixStream>,
) -> io::Result<()> {
    let forward = move || {
        arrived.store(true, Ordering::Release);
        // A full socket has enough bytes to wake its reader.
        let _ = send(&*socket, b"x", SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    };
    // SAFETY: the action stores into an atomic and calls send(2), which signal-safety(7) allows;
    // rustix makes the system call itself and does not change errno.
    unsafe { register(signal, forward) }.map(drop)
}

/// Ignores all signals that processes may send, except requests to end. Call once.
pub(crate) fn ignore_stray_signals() {
    let all = (1..=libc::SIGRTMAX())
        .filter(|signal| !UNCHANGED.contains(signal) && !LIBC_SIGNALS.contains(signal));
    let _ = FORMER_ACTIONS.set(FAULTS.map(action_of));
    // Ignored already: by Rust, or by the program that started containerd.
    let is_ignored = |signal: &c_int| {
        action_of(*signal).is_none_or(|action| action.sa_sigaction == libc::SIG_IGN)
    };
    for signal in all.filter(|signal| !is_ignored(signal)) {
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
            tracing::warn!(signal, error = %io::Error::last_os_error(), "this signal would end the shim");
        }
    }
    LIBC_SIGNALS
        .iter()
        .for_each(|signal| set_disposition(*signal, libc::SIG_IGN));
}

/// Sets SIG_IGN or SIG_DFL, by the kernel's own call.
pub(super) fn set_disposition(signal: c_int, disposition: libc::sighandler_t) {
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
    let fault = FAULTS.iter().position(|fault| *fault == signal);
    // SAFETY: with SA_SIGINFO the kernel passes a siginfo. The code of a signal that a process sent
    // is not positive.
    let fault = fault.filter(|_| unsafe { (*info).si_code } > 0);
    let before = fault.and_then(|index| FORMER_ACTIONS.get()?.get(index)?.as_ref());
    if let Some(before) = before {
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

#[cfg(test)]
mod tests {
    use std::env;
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
                "kernel::signals::tests::in_the_child",
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
}
