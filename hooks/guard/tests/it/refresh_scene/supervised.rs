//! A process whose mount calls wait for the test, those of its children as well:
//! seccomp_unotify(2). So a test can kill all of them between two calls. On any kernel, the process
//! sees one without `MOVE_MOUNT_BENEATH`.

use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use nix::libc;
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork, setpgid};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

/// The calls that change mounts or enter another namespace.
const CALLS: [libc::c_long; 6] = [
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_open_tree,
    libc::SYS_move_mount,
    libc::SYS_unshare,
    libc::SYS_setns,
];

/// `MOVE_MOUNT_BENEATH`
const BENEATH: u32 = 0x200;

/// `_IOWR('!', 0, struct seccomp_notif)` and `_IOWR('!', 1, struct seccomp_notif_resp)`
const RECEIVE: libc::c_ulong = 0xc050_2100;
const SEND: libc::c_ulong = 0xc018_2101;

/// Runs `work` in a process and lets it make this many of its mount calls; kills it with its
/// children before the next one, or while it hangs. Returns true if the process ended by itself.
pub fn killed_after(calls: u32, work: impl FnOnce()) -> bool {
    // SAFETY: the child uses the heap, which glibc keeps usable across fork, and ends without
    // returning.
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            setpgid(Pid::from_raw(0), Pid::from_raw(0)).unwrap();
            nix::sys::signal::raise(Signal::SIGSTOP).unwrap();
            supervise_self().unwrap();
            work();
            // SAFETY: ends the process without running what its copy of this one has registered.
            unsafe { libc::_exit(0) }
        }
        ForkResult::Parent { child } => {
            waitpid(child, Some(WaitPidFlag::WUNTRACED)).unwrap();
            nix::sys::signal::kill(child, Signal::SIGCONT).unwrap();
            let pidfd = pidfd_open(
                rustix::process::Pid::from_raw(child.as_raw()).unwrap(),
                PidfdFlags::empty(),
            )
            .unwrap();
            let ended = let_go_on(calls, &pidfd);
            // The group: the refresh's own child as well.
            let _ = killpg(child, Signal::SIGKILL);
            let status = waitpid(child, None).unwrap();
            assert!(
                !ended || status == WaitStatus::Exited(child, 0),
                "{status:?}"
            );
            ended
        }
    }
}

fn let_go_on(calls: u32, process: &OwnedFd) -> bool {
    let Some(listener) = listener_of(process) else {
        return true;
    };
    for _ in 0..calls {
        if !is_waiting(&listener, process) {
            return has_ended(process);
        }
        answer(&listener);
    }
    !is_waiting(&listener, process) && has_ended(process)
}

/// The listener is the descriptor that the process has as [`LISTENER`], once it has it.
fn listener_of(process: &OwnedFd) -> Option<OwnedFd> {
    loop {
        match pidfd_getfd(process, LISTENER, PidfdGetfdFlags::empty()) {
            Ok(listener) => return Some(listener),
            Err(_) if has_ended(process) => return None,
            Err(_) => std::thread::yield_now(),
        }
    }
}

const LISTENER: i32 = 700;

/// Much longer than a refresh.
const CALL_TIMEOUT: Timespec = Timespec {
    tv_sec: 10,
    tv_nsec: 0,
};

/// Waits for a call. False if the process ends first, or makes no call within [`CALL_TIMEOUT`].
/// A forked process can hang in the start of the refresh's thread, if a thread of another test held
/// a lock of the standard library during the fork.
fn is_waiting(listener: &OwnedFd, process: &OwnedFd) -> bool {
    let mut both = [
        PollFd::new(listener, PollFlags::IN),
        PollFd::new(process, PollFlags::IN),
    ];
    poll(&mut both, Some(&CALL_TIMEOUT)).unwrap();
    both[0].revents().contains(PollFlags::IN)
}

fn has_ended(process: &OwnedFd) -> bool {
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    poll(
        &mut [PollFd::new(&process.as_fd(), PollFlags::IN)],
        Some(&now),
    )
    .unwrap()
        > 0
}

/// Lets the kernel make the call, but for one with [`BENEATH`].
fn answer(listener: &OwnedFd) {
    // SAFETY: the structures are the kernel's, and zero is a valid value of each field.
    unsafe {
        let mut call: libc::seccomp_notif = mem::zeroed();
        assert_eq!(
            libc::ioctl(listener.as_raw_fd(), RECEIVE, &raw mut call),
            0,
            "{}",
            io::Error::last_os_error()
        );
        let is_beneath = i64::from(call.data.nr) == libc::SYS_move_mount
            && call.data.args[4] as u32 & BENEATH != 0;
        let mut reply: libc::seccomp_notif_resp = mem::zeroed();
        reply.id = call.id;
        if is_beneath {
            reply.error = -libc::EINVAL;
        } else {
            reply.flags = libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32;
        }
        assert_eq!(
            libc::ioctl(listener.as_raw_fd(), SEND, &raw mut reply),
            0,
            "{}",
            io::Error::last_os_error()
        );
    }
}

/// Runs `work` in a thread for which the kernel has no such call.
pub fn without_call<T: Send>(call: libc::c_long, work: impl FnOnce() -> T + Send) -> T {
    let filtered = || {
        let missing = libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32;
        assert_eq!(set_filter(&[call], missing, 0), 0);
        work()
    };
    std::thread::scope(|scope| scope.spawn(filtered).join().unwrap())
}

/// From now on the calls of this process wait for the one that has the listener.
fn supervise_self() -> io::Result<()> {
    let flags = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER;
    let listener = set_filter(&CALLS, libc::SECCOMP_RET_USER_NOTIF, flags);
    if listener < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new, and no other value owns it.
    let listener = unsafe { OwnedFd::from_raw_fd(listener as i32) };
    // SAFETY: no value owns this number. The copy stays open until the process ends.
    match unsafe { libc::dup2(listener.as_raw_fd(), LISTENER) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Gives these calls of the calling thread an action: seccomp(2).
fn set_filter(calls: &[libc::c_long], action: u32, flags: libc::c_ulong) -> libc::c_long {
    let statement = |code: u32, k: u32| libc::sock_filter {
        code: code as u16,
        jt: 0,
        jf: 0,
        k,
    };
    let mut filter = vec![statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0)];
    for (index, call) in calls.iter().enumerate() {
        filter.push(libc::sock_filter {
            code: (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16,
            jt: (calls.len() - index) as u8,
            jf: 0,
            k: *call as u32,
        });
    }
    let result = libc::BPF_RET | libc::BPF_K;
    filter.push(statement(result, libc::SECCOMP_RET_ALLOW));
    filter.push(statement(result, action));
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_mut_ptr(),
    };
    let set = libc::SECCOMP_SET_MODE_FILTER;
    // SAFETY: the filter lives as long as the call, and the kernel copies it.
    unsafe { libc::syscall(libc::SYS_seccomp, set, flags, &raw const program) }
}
