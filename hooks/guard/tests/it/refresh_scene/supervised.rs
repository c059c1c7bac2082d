//! A refresh whose mount calls, and those of its children, wait for the test: seccomp_unotify(2).
//! So a test can kill all processes between two calls. On any kernel, the refresh sees a kernel
//! without `MOVE_MOUNT_BENEATH`.

use std::env;
use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Lines};
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use bindguard_core::refresh_request::Notify;
use bindguard_guard::refresh::{
    HeldProcess, HelperProcess, PodVolumes, REPLACE_TIMEOUT, RefreshAct, TuckRecords,
    refresh_container,
};
use bindguard_testing::live;
use nix::libc;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

/// The calls that change mounts or enter another namespace.
pub const MOUNT_CALLS: [libc::c_long; 6] = [
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

/// Lets a refresh make this many mount calls, then kills the refresh with its children before the
/// next call. Returns true if the refresh ended before.
pub fn killed_after(calls: u32, refresh: &Refresh) -> bool {
    work_killed_after(calls, &refresh.work())
}

/// As [`killed_after`], for any work.
pub fn work_killed_after(calls: u32, work: &Work) -> bool {
    let program = work.start(Mode::Supervised);
    let ended = let_go_on(calls, &program, work.has_beneath);
    if ended {
        let status = program.wait();
        assert!(status.success(), "{status:?}");
    } else {
        program.kill();
    }
    ended
}

/// Answers the calls of the work up to the first `call`, which never returns.
///
/// # Panics
/// If the work fails, or makes no such call.
pub fn without_return_of(call: libc::c_long, work: &Work) {
    let program = work.start(Mode::Supervised);
    let listener = listener_of(&program.pidfd);
    let next = || {
        assert!(
            is_waiting(&listener, &program.pidfd),
            "it made no such call"
        );
        receive(&listener)
    };
    let mut made = next();
    while i64::from(made.data.nr) != call {
        answer(&listener, &made, work.has_beneath);
        made = next();
    }
    let status = program.wait();
    assert!(status.success(), "{status:?}");
}

/// Kills a refresh and its children `time` after the start.
pub fn killed_while_it_runs(time: Duration, refresh: &Refresh) {
    let program = refresh.work().start(Mode::Free);
    thread::sleep(time);
    program.kill();
}

/// A refresh in a process that executes this test program anew. A forked process could hang by
/// itself: another thread of the test program may hold a lock during the fork.
pub struct Refresh {
    /// The directory of the pod.
    pub pod: PathBuf,
    /// The directory of the records.
    pub records: PathBuf,
    /// The init of the container.
    pub init: u32,
    /// True if the kernel has `MOVE_MOUNT_BENEATH` for the refresh.
    pub has_beneath: bool,
}

/// Work in a process that executes this test program anew.
pub struct Work {
    /// The ignored test that calls [`begin`], then works.
    pub test: &'static str,
    pub environment: Vec<(&'static str, OsString)>,
    /// True if the kernel has `MOVE_MOUNT_BENEATH` for the work.
    pub has_beneath: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Supervised,
    Free,
}

/// The environment of the program.
const POD: &str = "BINDGUARD_TEST_POD";
const RECORDS: &str = "BINDGUARD_TEST_RECORDS";
const INIT: &str = "BINDGUARD_TEST_INIT";
const SUPERVISED: &str = "BINDGUARD_TEST_SUPERVISED";

/// The line that the program prints before the refresh.
const BEGINS: &str = "the work begins";

impl Refresh {
    fn work(&self) -> Work {
        Work {
            test: "refresh_scene::supervised::program",
            environment: vec![
                (POD, self.pod.clone().into()),
                (RECORDS, self.records.clone().into()),
                (INIT, self.init.to_string().into()),
            ],
            has_beneath: self.has_beneath,
        }
    }
}

impl Work {
    fn start(&self, mode: Mode) -> Program {
        let mut command = Command::new("/proc/self/exe");
        command
            .args(["--exact", self.test, "--ignored", "--nocapture"])
            .envs(self.environment.iter().cloned())
            .env_remove(SUPERVISED)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .process_group(0);
        if mode == Mode::Supervised {
            command.env(SUPERVISED, "1");
        }
        let mut process = command.spawn().unwrap();
        let pid = rustix::process::Pid::from_child(&process);
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).unwrap();
        let mut output = BufReader::new(process.stdout.take().unwrap()).lines();
        assert!(
            output.any(|line| line.unwrap().ends_with(BEGINS)),
            "the program of the work ended"
        );
        Program {
            process,
            pidfd,
            _output: output,
        }
    }
}

/// The program. [`Refresh`] sets its environment.
#[test]
#[ignore = "other tests run this program"]
fn program() {
    let Some(pod) = env::var_os(POD) else {
        bindguard_testing::skipped("it is the program of other tests");
        return;
    };
    let records = TuckRecords::at(Path::new(&env::var_os(RECORDS).unwrap()));
    let init = env::var(INIT).unwrap().parse().unwrap();
    let process = HeldProcess::open(init).unwrap();
    // Its children have the filter, too.
    begin(&MOUNT_CALLS);
    let helper = HelperProcess::start().unwrap();
    let volumes = PodVolumes::open(Path::new(&pod)).unwrap();
    let act = RefreshAct::Replace(Notify::None);
    refresh_container(
        &helper,
        REPLACE_TIMEOUT,
        &process,
        Some(&live::spec_of(None)),
        &[&volumes],
        act,
        &records,
    )
    .unwrap();
}

/// Reports that the work begins. If this process is supervised, these calls wait for the test.
pub fn begin(calls: &[libc::c_long]) {
    println!("{BEGINS}");
    if env::var_os(SUPERVISED).is_some() {
        supervise_self(calls).unwrap();
    }
}

/// Work that runs.
struct Program {
    process: Child,
    pidfd: OwnedFd,
    /// Open: the program prints more, and would end otherwise.
    _output: Lines<BufReader<ChildStdout>>,
}

impl Program {
    /// Kills it, and the refresh's own child as well.
    fn kill(mut self) {
        let group = Pid::from_raw(self.process.id() as i32);
        let _ = killpg(group, Signal::SIGKILL);
        self.process.wait().unwrap();
    }

    /// Waits for its end after the refresh.
    fn wait(mut self) -> ExitStatus {
        let mut end = [PollFd::new(&self.pidfd, PollFlags::IN)];
        let ended = poll(&mut end, Some(&CALL_TIMEOUT)).unwrap();
        assert!(ended > 0, "the refresh ended, and its program hangs");
        self.process.wait().unwrap()
    }
}

fn let_go_on(calls: u32, program: &Program, has_beneath: bool) -> bool {
    let process = &program.pidfd;
    let listener = listener_of(process);
    for _ in 0..calls {
        if !is_waiting(&listener, process) {
            return true;
        }
        answer(&listener, &receive(&listener), has_beneath);
    }
    !is_waiting(&listener, process)
}

/// The program has the listener soon after it has reported that the work begins.
fn listener_of(process: &OwnedFd) -> OwnedFd {
    let start = Instant::now();
    loop {
        match pidfd_getfd(process, LISTENER, PidfdGetfdFlags::empty()) {
            Ok(listener) => return listener,
            Err(errno) => assert!(start.elapsed() < Duration::from_secs(60), "{errno}"),
        }
        thread::sleep(Duration::from_millis(1));
    }
}

const LISTENER: i32 = 700;

/// Longer than the limits of a refresh.
const CALL_TIMEOUT: Timespec = Timespec {
    tv_sec: 60,
    tv_nsec: 0,
};

/// Waits for a call. False if the refresh ended.
///
/// # Panics
/// If the refresh makes no call and does not end.
fn is_waiting(listener: &OwnedFd, process: &OwnedFd) -> bool {
    let mut both = [
        PollFd::new(listener, PollFlags::IN),
        PollFd::new(process, PollFlags::IN),
    ];
    let ready = poll(&mut both, Some(&CALL_TIMEOUT)).unwrap();
    assert!(ready > 0, "the refresh hangs");
    both[0].revents().contains(PollFlags::IN)
}

fn receive(listener: &OwnedFd) -> libc::seccomp_notif {
    // SAFETY: the structure is the kernel's, and zero is a valid value of each field.
    let mut call: libc::seccomp_notif = unsafe { mem::zeroed() };
    // SAFETY: the kernel fills a structure of the size that the request names.
    let received = unsafe { libc::ioctl(listener.as_raw_fd(), RECEIVE, &raw mut call) };
    assert_eq!(received, 0, "{}", io::Error::last_os_error());
    call
}

/// Lets the kernel make the call. Refuses a call with [`BENEATH`] if `has_beneath` is false.
fn answer(listener: &OwnedFd, call: &libc::seccomp_notif, has_beneath: bool) {
    let is_refused = !has_beneath
        && i64::from(call.data.nr) == libc::SYS_move_mount
        && call.data.args[4] as u32 & BENEATH != 0;
    // SAFETY: the structure is the kernel's, and zero is a valid value of each field.
    let mut reply: libc::seccomp_notif_resp = unsafe { mem::zeroed() };
    reply.id = call.id;
    if is_refused {
        reply.error = -libc::EINVAL;
    } else {
        reply.flags = libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32;
    }
    // SAFETY: the kernel reads a structure of the size that the request names.
    let sent = unsafe { libc::ioctl(listener.as_raw_fd(), SEND, &raw mut reply) };
    assert_eq!(sent, 0, "{}", io::Error::last_os_error());
}

/// From now on the calls of this process wait for the process with the listener.
fn supervise_self(calls: &[libc::c_long]) -> io::Result<()> {
    let flags = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER;
    let listener = set_filter(calls, libc::SECCOMP_RET_USER_NOTIF, flags);
    if listener < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new, and no value owns it yet.
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
