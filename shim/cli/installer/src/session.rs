//! One call of `install` or `uninstall`: its root directory, the lock against a second installer, the
//! report, and the signals of a pod.
//!
//! `--root` uses chroot(2): links resolve inside the new root, and the root's own containerd is run. The
//! lock file's mode keeps other users from locking it. Root of a container that reads the host's `/run`
//! can still hold it, so an installer waits for a limited time and then names the process. A DaemonSet's
//! pod must not end by itself, and its end means nothing for the node: pods are evicted, upgraded and
//! replaced.

use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions};
use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use bindguard_core::text::one_line;
use bindguard_operator::terminal::{print_remark, print_text};
use bindguard_sys::make_folders;
use clap::Args;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::SignalFd;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FlockOperation, Mode, OFlags, fchmod, flock};
use rustix::io::Errno;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde::Serialize;

use crate::change::{Change, Doing, Owner, Plan, identity, sweep_private};
use crate::record::{FOLDER, Record};
use crate::runtimes::recorded;

/// Arguments of both verbs.
#[derive(Debug, Args)]
pub struct CommonOptions {
    /// Print the planned changes and do nothing. The exit code is 1 if there is something to do.
    #[arg(long)]
    pub dry_run: bool,
    /// The node's root directory as this pod sees it, or the root directory of an image. Every
    /// other path is a path of the node.
    #[arg(long, value_name = "DIR")]
    pub root: Option<PathBuf>,
    /// Run the command that activates the changes, if there were any.
    #[arg(long)]
    pub restart: bool,
    /// Restart only while this command grants a slot, such as `bindguard-agent restart-slot`: it
    /// limits the nodes that restart at the same time.
    #[arg(long, value_name = "COMMAND", requires = "restart")]
    pub restart_slot: Option<String>,
    /// Label this node by this command while pods of the handler start, such as `bindguard-agent
    /// node-label`.
    #[arg(long, value_name = "COMMAND")]
    pub node_label: Option<String>,
    /// Label this node by this file of node-feature-discovery.
    #[arg(long, value_name = "FILE", conflicts_with = "node_label")]
    pub node_feature: Option<PathBuf>,
    /// Print the changes as JSON.
    #[arg(long)]
    pub json: bool,
    /// Wait for SIGTERM afterwards, which changes nothing: for the pod of a DaemonSet. Unfinished
    /// work is tried again.
    #[arg(long, conflicts_with = "dry_run")]
    pub stay: bool,
}

/// A call of a verb, and what it has done so far. No second installer runs meanwhile.
pub struct Session<'a> {
    pub common: &'a CommonOptions,
    pub record: Record,
    pub report: InstallReport,
    /// The changes that were made, or that a dry run plans.
    pub work: Vec<Change>,
    _lock: Option<File>,
}

impl<'a> Session<'a> {
    pub fn begin(common: &'a CommonOptions) -> Result<Self> {
        let mut lock = None;
        if !common.dry_run {
            let folder = Path::new("/run/bindguard");
            make_folders(folder, 0o755).doing("create", folder)?;
            lock = Some(lock_file(&folder.join("install.lock"), LOCK_TIMEOUT)?);
            sweep_private();
        }
        Ok(Self {
            common,
            record: recorded()?,
            report: InstallReport::default(),
            work: Vec::new(),
            _lock: lock,
        })
    }

    /// Prints the report, and returns the remaining work. The process of a pod tries again after a
    /// failed restart, with longer and longer pauses: a new container would start at once.
    ///
    /// # Errors
    /// If a restart failed, without `--stay`.
    pub fn finish(&mut self, restarted: Result<()>) -> Result<Progress> {
        let common = self.common;
        self.work.retain(|change| !change.is_none());
        let report = &mut self.report;
        report.dry_run = common.dry_run;
        for change in &self.work {
            report.files.push(FileReport {
                owner: change.owner,
                path: change.path.display().to_string(),
                action: change.word(),
                // a diff of bindguard's own commented config shows nothing new
                diff: match change.owner {
                    Owner::Bindguard => None,
                    _ => change.diff(),
                },
            });
        }
        let out = match common.json {
            true => serde_json::to_string_pretty(report)? + "\n",
            false => report.text(),
        };
        print_text(&out)?;
        match restarted {
            Err(error) if common.stay => {
                print_remark(format_args!("{error:#}"));
                Ok(Progress::Unfinished)
            }
            Err(error) => Err(error),
            Ok(()) if common.dry_run && !self.work.is_empty() => Ok(Progress::Unfinished),
            Ok(()) => Ok(report.progress),
        }
    }
}

/// The output of both verbs.
#[derive(Debug, Default, Serialize)]
pub struct InstallReport {
    /// Nothing was done.
    dry_run: bool,
    files: Vec<FileReport>,
    /// Notes for the operator.
    pub notes: Vec<String>,
    /// The operator's own steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    advice: Option<String>,
    /// The commands to run, in order.
    pub commands: Vec<String>,
    /// True if they were run.
    pub restarted: bool,
    #[serde(skip)]
    pub progress: Progress,
}

/// The state of an installation or a removal after a call.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Progress {
    /// Nothing is left to do.
    #[default]
    Done,
    /// A name stays in an engine's file, as that of the real runtime: containers have it.
    NameKept,
    /// The rest has to wait for the end of pods.
    KeptForPods,
    /// Work is left, such as a restart.
    Unfinished,
}

impl Progress {
    /// The exit code. While pods run, a dry run and a timer have nothing to do; a removal is not
    /// complete.
    pub fn exit_code(self, waits_for_pods: bool) -> ExitCode {
        match self {
            Self::Done | Self::NameKept => ExitCode::SUCCESS,
            Self::KeptForPods if waits_for_pods => ExitCode::SUCCESS,
            Self::KeptForPods | Self::Unfinished => ExitCode::FAILURE,
        }
    }
}

#[derive(Debug, Serialize)]
struct FileReport {
    owner: Owner,
    path: String,
    action: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    diff: Option<String>,
}

impl InstallReport {
    /// Adds the notes of a plan. Its command is added only if a change is made.
    pub fn take(&mut self, plan: &Plan) {
        self.notes.extend(plan.notes.iter().cloned());
        if plan.changes.iter().any(|change| !change.is_none()) {
            self.command(plan.command.as_deref());
        }
        if let Some(advice) = &plan.advice {
            self.progress = Progress::Unfinished;
            self.advice = Some(advice.clone());
        }
    }

    /// Adds a command that activates a change.
    pub fn command(&mut self, command: Option<&str>) {
        if let Some(command) = command
            && !self.commands.iter().any(|old| old == command)
        {
            self.commands.push(command.to_owned());
        }
    }

    /// Adds a note on work that is left.
    pub fn unfinished(&mut self, note: String) {
        self.left(Progress::Unfinished, note);
    }

    /// Adds a note on a part that stays.
    pub fn left(&mut self, progress: Progress, note: String) {
        self.progress = self.progress.max(progress);
        self.notes.push(note);
    }

    /// True if a service still uses the former files.
    pub fn waits_for_a_restart(&self) -> bool {
        !self.restarted && !self.commands.is_empty()
    }

    fn text(&self) -> String {
        let mut out = String::new();
        for file in &self.files {
            let _ = writeln!(out, "{:<8} {}", file.action, one_line(&file.path));
            out.push_str(file.diff.as_deref().unwrap_or_default());
        }
        for note in &self.notes {
            let _ = writeln!(out, "{:<8} {}", "note", one_line(note));
        }
        out.push_str(self.advice.as_deref().unwrap_or_default());
        if self.files.is_empty() && self.progress <= Progress::NameKept {
            let _ = writeln!(out, "{:<8} no file has to change", "nothing");
        }
        let word = if self.restarted { "ran" } else { "run" };
        for command in &self.commands {
            let _ = writeln!(out, "{word:<8} {command}");
        }
        if self.dry_run && !self.files.is_empty() {
            let _ = writeln!(out, "{:<8} this was a dry run", "nothing");
        }
        out
    }
}

/// Makes `root` this process's root.
pub fn enter(root: Option<&Path>) -> Result<()> {
    let Some(root) = root else { return Ok(()) };
    rustix::process::chroot(root)
        .with_context(|| format!("make {} the root directory", root.display()))?;
    rustix::process::chdir("/").doing("go to", root)
}

/// The folder of the node's root directory in a pod of `kubectl debug node`.
pub const DEBUG_ROOT: &str = "/host";

/// True in such a pod: the folder has the `/run` of another root, and its `/proc`.
pub fn is_in_debug_pod() -> bool {
    let root = Path::new(DEBUG_ROOT);
    let run = identity(&root.join("run"));
    run.is_some()
        && run != identity(Path::new("/run"))
        && root.join("proc/1").symlink_metadata().is_ok()
}

/// Reads the node from here on: `root` is its root directory as a pod sees it. A pod has copies of
/// the node's mounts with a different propagation. So this function enters the mount namespace of
/// the node's first process, if this process has the given root. An image has no process:
/// `needs_mounts` fails there.
pub fn enter_node(root: &Path, needs_mounts: bool) -> Result<()> {
    let run = Path::new("/proc/1/root/run");
    let of_first_process = identity(run);
    if of_first_process.is_none() || of_first_process != identity(&root.join("run")) {
        let is_denied = fs::metadata(run).is_err_and(|it| it.kind() == ErrorKind::PermissionDenied);
        ensure!(
            !needs_mounts || !is_denied,
            "enter the node's mounts: permission denied; start the pod with kubectl debug node/NODE --profile=sysadmin"
        );
        ensure!(
            !needs_mounts,
            "{} is not the root of the first process here: give the pod the node's processes (hostPID), or run this on the node",
            root.display()
        );
        return enter(Some(root));
    }
    let namespace = File::open("/proc/1/ns/mnt").context("open the node's mount namespace")?;
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Mount))
        .context("enter the node's mount namespace")
}

/// The time limit for a running installer, which may restart containerd.
const LOCK_TIMEOUT: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(20);

/// Waits until no other installer runs on this node.
fn lock_file(path: &Path, patience: Duration) -> Result<File> {
    // A reader can have a lease on the file, which makes an open for writing wait: fcntl(2).
    let flags = (OFlags::NONBLOCK | OFlags::NOFOLLOW).bits().cast_signed();
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false).mode(0o600);
    let file = options.custom_flags(flags).open(path).doing("open", path)?;
    fchmod(&file, Mode::RUSR | Mode::WUSR).doing("change the mode of", path)?;
    let start = Instant::now();
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(Errno::INTR) => {}
            Err(Errno::WOULDBLOCK) if start.elapsed() < patience => thread::sleep(POLL),
            Err(Errno::WOULDBLOCK) => {
                let holder = match holder_of(&file) {
                    Some(pid) => format!("process {pid}"),
                    None => "a process of another pid namespace".to_owned(),
                };
                bail!(
                    "lock {} for {FOLDER}: {holder} has held the lock for {} s; end it and try again",
                    path.display(),
                    patience.as_secs()
                );
            }
            Err(errno) => {
                return Err(errno).with_context(|| format!("lock {} for {FOLDER}", path.display()));
            }
        }
    }
}

/// The process that holds a flock(2) lock on this file: proc_locks(5), `1: FLOCK  ADVISORY  WRITE
/// 712 00:18:1523 0 EOF`.
fn holder_of(file: &File) -> Option<u32> {
    let inode = file.metadata().ok()?.ino().to_string();
    for line in fs::read_to_string("/proc/locks").ok()?.lines() {
        let fields: Vec<_> = line.split_whitespace().collect();
        if let [_, "FLOCK", _, _, pid, place, ..] = fields[..]
            && place.rsplit(':').next() == Some(&inode)
            && let Ok(pid @ 1..) = pid.parse()
        {
            return Some(pid);
        }
    }
    None
}

/// The first pause before unfinished work is tried again: a runtime restarts, or the shim of a
/// removed pod ends. Each pause doubles up to [`CHECK_INTERVAL`]: an operator may be needed, and
/// pods run for months.
const RETRY: Duration = Duration::from_secs(5);

/// The interval between two checks for changes by other tools.
const CHECK_INTERVAL: Duration = Duration::from_secs(60);

/// SIGTERM and SIGINT, from the first moment on. A signal during the work takes effect after the
/// work.
#[derive(Debug)]
pub struct Stay(Option<SignalFd>);

impl Stay {
    /// Blocks the signals, if the process is to stay.
    pub fn prepare(common: &CommonOptions) -> Result<Self> {
        if !common.stay {
            return Ok(Self(None));
        }
        let signals = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT]);
        signals.thread_block().context("block SIGTERM")?;
        let signals = SignalFd::new(&signals).context("create a descriptor for SIGTERM")?;
        Ok(Self(Some(signals)))
    }

    /// Does the work once or, with `--stay`, until it succeeds. Then calls it with `true`, at once and
    /// once a minute, until a signal comes.
    ///
    /// # Errors
    /// If the work fails. The kubelet then starts the container again.
    pub fn after(&self, mut work: impl FnMut(bool) -> Result<Progress>) -> Result<Progress> {
        let mut last = None;
        let mut pause = RETRY;
        loop {
            let progress = work(false)?;
            let Some(signals) = &self.0 else {
                return Ok(progress);
            };
            let is_new = last.replace(progress) != Some(progress);
            if is_new {
                pause = RETRY;
            }
            match progress {
                Progress::Done => {
                    print_remark("done; waiting for SIGTERM, which changes nothing on this node");
                    loop {
                        work(true)?;
                        if is_readable(signals, CHECK_INTERVAL).context("wait for SIGTERM")? {
                            return Ok(progress);
                        }
                    }
                }
                Progress::KeptForPods if is_new => print_remark(
                    "done but for what running pods need; waiting for SIGTERM or their end",
                ),
                Progress::NameKept if is_new => print_remark(
                    "done but for a name that containers have; waiting for SIGTERM or their end",
                ),
                Progress::NameKept | Progress::KeptForPods | Progress::Unfinished => {}
            }
            // the pods of a fleet start at the same time, and query one API server
            let clock = SystemTime::now().duration_since(UNIX_EPOCH);
            let random = clock.map_or(0, |now| now.subsec_micros() % 1000);
            let pause_of_pod = pause.mul_f64(1.0 - f64::from(random) / 2000.0);
            if is_readable(signals, pause_of_pod).context("wait for SIGTERM")? {
                return Ok(progress);
            }
            pause = CHECK_INTERVAL.min(pause * 2);
        }
    }
}

/// True once the descriptor can be read, false after the time limit.
pub fn is_readable(descriptor: impl AsFd, limit: Duration) -> Result<bool> {
    let limit = Timespec::try_from(limit)?;
    loop {
        match poll(&mut [PollFd::new(&descriptor, PollFlags::IN)], Some(&limit)) {
            Ok(ready) => return Ok(ready > 0),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]
    use super::*;
    use bindguard_testing::documented;

    /// Issue 14: a process that can only read the file can lock it.
    #[test]
    fn a_lock_that_a_reader_holds_is_not_waited_for_without_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("install.lock");
        drop(lock_file(&path, Duration::ZERO).unwrap());
        let reader = File::open(&path).unwrap();
        flock(&reader, FlockOperation::LockShared).unwrap();
        let error = lock_file(&path, Duration::from_millis(50))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains(&format!("process {}", std::process::id())),
            "{error}"
        );
        drop(reader);
        // A child of a parallel test may have a copy of the descriptor between fork and exec.
        assert_eq!(
            lock_file(&path, Duration::from_secs(5))
                .unwrap()
                .metadata()
                .unwrap()
                .mode()
                & 0o777,
            0o600
        );
    }

    #[test]
    fn json_is_what_the_document_shows() {
        let expected: serde_json::Value =
            serde_json::from_str(documented("`install`, `uninstall`")).unwrap();
        let file = |owner, path: &str, action, diff: Option<&str>| FileReport {
            owner,
            path: path.to_owned(),
            action,
            diff: diff.map(str::to_owned),
        };
        let diff = "--- /etc/containerd/config.toml\n+++ /etc/containerd/config.toml\n...";
        let report = InstallReport {
            files: vec![
                file(
                    Owner::Bindguard,
                    "/usr/local/bin/bindguard-runtime",
                    "create",
                    None,
                ),
                file(
                    Owner::Containerd,
                    "/etc/containerd/config.toml",
                    "change",
                    Some(diff),
                ),
            ],
            commands: vec!["systemctl restart containerd".to_owned()],
            ..InstallReport::default()
        };
        assert_eq!(serde_json::to_value(&report).unwrap(), expected);
    }
}
