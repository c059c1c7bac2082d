//! The OCI runtime's command line: a method per verb.
//!
//! `create` and `restore` go through the guard (`guard`), all other verbs directly to runc, crun or
//! the program that the options name. The runtime's *text* is passed on, never parsed: decisions
//! depend on exit codes, files and pidfds.
//!
//! The runtime's output goes to memory files, not to pipes. A container's init inherits the streams
//! of its `create`. So a pipe would stay open, and a wait for its end would last, as long as the
//! container lives.
//!
//! The runtime's `--log` file: JSON objects, each on a line or, from crun 1.28, on several lines.
//! youki writes `ERROR` and `message` in place of `error` and `msg`.
//!
//! Each call has a separate file, so that the last error is not from an older call. An incomplete
//! object, whose writer was killed, must not hide its neighbours. The guard writes its messages
//! into the same file, below the level of an error; they are passed on to the shim's log.

mod guard;

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use containerd_shim_protos::shim::oci::CheckpointOptions;
use log::Level;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{Signal, kill_process_group};
use serde::Deserialize;

pub use guard::{GuardSettings, NewContainer};

use crate::bundle::{Bundle, Options, given_or};
use crate::exits::{Exit, Exits, Watched, kernel_pid};
use crate::io::PreparedIo;
use crate::kernel;
use crate::work::{run_blocking, spawn};

/// runc's state directory under containerd, without the namespace; Go's shim uses it for every
/// runtime.
const DEFAULT_ROOT: &str = "/run/containerd/runc";
pub const DEFAULT_BINARY: &str = "runc";
/// The time limit for a list of processes: a containerd that starts waits five seconds for it.
const PIDS_LIMIT: Duration = Duration::from_secs(3);

/// The runtime of a container.
pub struct Runtime {
    /// The container's.
    pub id: String,
    binary: String,
    root: PathBuf,
    systemd_cgroup: bool,
    pub bundle: Bundle,
    exits: Arc<Exits>,
}

impl Runtime {
    /// The runtime of the options, for a container in `namespace`.
    pub fn new(
        options: &Options,
        namespace: &str,
        id: &str,
        bundle: Bundle,
        exits: Arc<Exits>,
    ) -> Self {
        Self {
            id: id.to_owned(),
            binary: given_or(&options.binary_name, DEFAULT_BINARY).to_owned(),
            root: Path::new(given_or(&options.root, DEFAULT_ROOT)).join(namespace),
            systemd_cgroup: options.systemd_cgroup.unwrap_or(false),
            bundle,
            exits,
        }
    }

    /// The directory of the runtime's state of the container.
    pub fn state(&self) -> PathBuf {
        self.root.join(&self.id)
    }

    /// Runs a verb whose last argument is the container.
    pub async fn run(&self, verb: &'static str, mut args: Vec<OsString>) -> Result<()> {
        args.push((&self.id).into());
        self.run_captured(verb, args).await
    }

    /// Sends a signal to the container's init, or to all its processes.
    pub async fn kill(&self, signal: u32, all: bool) -> Result<()> {
        let mut args: Vec<OsString> = vec![(&self.id).into(), signal.to_string().into()];
        if all {
            args.insert(0, "--all".into());
        }
        self.run_captured("kill", args).await
    }

    async fn run_captured(&self, verb: &'static str, args: Vec<OsString>) -> Result<()> {
        let call = self.call(verb, args).await?;
        call.spawn(RunStreams::Captured)?.finish().await.map(drop)
    }

    /// A call of the runtime itself, without the guard.
    async fn call(&self, verb: &'static str, args: Vec<OsString>) -> Result<RuntimeCall> {
        let program = self.resolve_binary().await?;
        Ok(RuntimeCall::new(self, program, verb, args))
    }

    /// Removes the remains of a failed create, in any state, so that the next one finds the name
    /// free.
    pub async fn remove_failed_create(&self) {
        let _ = fs::remove_file(self.bundle.init_pid_file());
        if let Err(error) = self.run("delete", vec!["--force".into()]).await {
            // crun returns an error when there is nothing to remove.
            if self.knows_container() {
                log::warn!(id:% = self.id, error:%; "cannot remove what a failed create left");
            }
        }
    }

    /// The pids of all processes of the container, within [`PIDS_LIMIT`].
    pub async fn pids(&self) -> Result<Vec<u32>> {
        let no_answer = |why| RuntimeError::from(format!("read the answer of ps: {why}"));
        let args = vec!["--format".into(), "json".into(), (&self.id).into()];
        let mut call = self.call("ps", args).await?;
        call.command.process_group(0);
        let running = call.spawn(RunStreams::CapturedStdout)?;
        let answer = running.finish_within(PIDS_LIMIT).await;
        let json =
            answer.ok_or_else(|| no_answer(format!("there is none within {PIDS_LIMIT:?}")))??;
        // An empty container is `null` in Go's JSON.
        let pids: Option<Vec<u32>> =
            serde_json::from_slice(&json).map_err(|error| no_answer(error.to_string()))?;
        Ok(pids.unwrap_or_default())
    }

    /// Adds a process to a running container. `process` is the OCI process, as JSON in a file; the
    /// runtime writes the pid into the other file.
    pub async fn exec(
        &self,
        process: &Path,
        pid_file: &Path,
        prepared_io: &PreparedIo,
    ) -> Result<()> {
        let mut args = vec!["--process".into(), process.into(), "--detach".into()];
        self.add_process(&mut args, pid_file, prepared_io);
        let call = self.call("exec", args).await?;
        let running = call.spawn(RunStreams::Process(prepared_io))?;
        let done = running.finish().await.map(drop);
        done.map_err(|error| error.into_final(prepared_io))
    }

    /// Adds the last arguments of a verb that makes a process.
    fn add_process(&self, args: &mut Vec<OsString>, pid_file: &Path, prepared_io: &PreparedIo) {
        args.extend(["--pid-file".into(), pid_file.into()]);
        if let Some(socket) = prepared_io.console_socket() {
            args.extend(["--console-socket".into(), socket.into()]);
        }
        args.push((&self.id).into());
    }

    /// True if the runtime still has state of this container. runc, crun and youki have a directory
    /// per container. If that directory cannot be checked, the answer is true.
    pub fn knows_container(&self) -> bool {
        match self.state().try_exists() {
            Ok(exists) => exists,
            // Nothing can be below a file, or under a name that is too long: the runtime says why.
            Err(error) => !matches!(
                error.kind(),
                ErrorKind::NotADirectory | ErrorKind::InvalidFilename
            ),
        }
    }

    /// Away from the event loop: the path, or a folder of PATH, may be on a server that does not
    /// answer.
    async fn resolve_binary(&self) -> Result<PathBuf> {
        let binary = self.binary.clone();
        let found = run_blocking(move || look_up(&binary)).await;
        let message = match found {
            Ok(Some(program)) => return Ok(program),
            Ok(None) => format!(
                "exec: {:?}: executable file not found in $PATH",
                self.binary
            ),
            Err(error) => format!("run {}: {error}", self.binary),
        };
        Err(message.into())
    }
}

/// criu works and logs in `work`. `parent` is empty if the images are complete.
pub fn images_args(images: &str, work: &OsStr, parent: &str) -> Vec<OsString> {
    let mut args: Vec<OsString> = vec!["--image-path".into(), images.into()];
    args.extend(["--work-path".into(), work.into()]);
    if !parent.is_empty() {
        args.extend(["--parent-path".into(), parent.into()]);
    }
    args
}

pub fn checkpoint_args(options: &CheckpointOptions, parent: &str) -> Vec<OsString> {
    let mut args = images_args(&options.image_path, options.work_path.as_ref(), parent);
    for (is_wanted, flag) in [
        (options.open_tcp, "--tcp-established"),
        (options.external_unix_sockets, "--ext-unix-sk"),
        (options.terminal, "--shell-job"),
        (options.file_locks, "--file-locks"),
        (!options.exit, "--leave-running"),
    ] {
        if is_wanted {
            args.push(flag.into());
        }
    }
    for kind in &options.empty_namespaces {
        args.extend(["--empty-ns".into(), kind.into()]);
    }
    args
}

/// Finds a program as exec(3) would: a name with a slash is a path, a name without a slash is
/// searched on PATH.
pub fn look_up(program: &str) -> Option<PathBuf> {
    if program.contains('/') {
        return Some(PathBuf::from(program)).filter(|path| is_program(path));
    }
    let path = std::env::var_os("PATH")
        .unwrap_or_else(|| "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".into());
    std::env::split_paths(&path)
        .map(|dir| dir.join(program))
        .find(|file| is_program(file))
}

/// execvp(3) skips files that it cannot run, such as a directory, or a file in a folder that it may
/// not search.
fn is_program(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

/// The limit of the runtime's stderr that is kept for the error.
const STDERR_TAIL: u64 = 2048;

type Result<T, E = RuntimeError> = std::result::Result<T, E>;

/// A run of the runtime that failed.
#[derive(Debug, thiserror::Error)]
#[error("{message}{unrepaired}")]
pub struct RuntimeError {
    /// The runtime's own text, or why it could not be run.
    message: String,
    /// False if neither the runtime's log nor a stderr that the shim captured gives a reason.
    is_explained: bool,
    /// The fault of an unrepaired bind that explains the failure; empty without one.
    unrepaired: String,
}

impl From<String> for RuntimeError {
    fn from(message: String) -> Self {
        Self {
            message,
            is_explained: true,
            unrepaired: String::new(),
        }
    }
}

/// The destinations of a run's streams.
enum RunStreams<'a> {
    /// To the shim, which needs them only for an error.
    Captured,
    /// To the shim, which needs the output on stdout.
    CapturedStdout,
    /// To the process that the runtime makes.
    Process(&'a PreparedIo),
}

/// A run of the runtime, not started yet. The caller may add to the command.
struct RuntimeCall {
    command: Command,
    verb: &'static str,
    log: LogFile,
    exits: Arc<Exits>,
}

/// A run that has started.
struct Running {
    child: Watched,
    verb: &'static str,
    log: LogFile,
    stdout_file: Option<File>,
    stderr_file: Option<File>,
}

impl RuntimeCall {
    /// `PROGRAM --root R --log L --log-format json [--systemd-cgroup] VERB ARGS`
    fn new(runtime: &Runtime, program: PathBuf, verb: &'static str, args: Vec<OsString>) -> Self {
        let bundle = &runtime.bundle;
        let log = LogFile::in_bundle(&bundle.path, verb);
        let mut command = Command::new(program);
        command.arg("--root").arg(&runtime.root);
        command.arg("--log").arg(&log.path);
        command.args(["--log-format", "json"]);
        if runtime.systemd_cgroup {
            command.arg("--systemd-cgroup");
        }
        command.arg(verb).args(args);
        // containerd may have removed the bundle of a container whose create it gave up.
        command.current_dir(match bundle.is_gone() {
            true => Path::new("/"),
            false => &bundle.path,
        });
        kernel::die_with_this_thread(&mut command);
        kernel::with_default_signals(&mut command);
        Self {
            command,
            verb,
            log,
            exits: Arc::clone(&runtime.exits),
        }
    }

    fn spawn(self, streams: RunStreams<'_>) -> Result<Running> {
        let program = Path::new(self.command.get_program()).to_owned();
        self.try_spawn(streams)
            .map_err(|error| format!("run {}: {error}", program.display()).into())
    }

    fn try_spawn(mut self, streams: RunStreams<'_>) -> io::Result<Running> {
        let (mut stdout_file, mut stderr_file) = (None, None);
        let mut ends;
        match streams {
            RunStreams::Captured | RunStreams::CapturedStdout => {
                let file: &File = stderr_file.insert(memory_file()?);
                ends = [None, Some(file.as_fd()), Some(file.as_fd())];
                if matches!(streams, RunStreams::CapturedStdout) {
                    let file: &File = stdout_file.insert(memory_file()?);
                    ends[1] = Some(file.as_fd());
                }
            }
            RunStreams::Process(prepared_io) => {
                ends = prepared_io.child_streams();
                // With a terminal the runtime's stderr has no reader, and the container's process
                // does not get this stderr.
                if ends[2].is_none() && prepared_io.console_socket().is_some() {
                    let file: &File = stderr_file.insert(memory_file()?);
                    ends[2] = Some(file.as_fd());
                }
            }
        }
        let [stdin, stdout, stderr] = ends;
        self.command
            .stdin(stdio(stdin)?)
            .stdout(stdio(stdout)?)
            .stderr(stdio(stderr)?);
        let child = self.command.spawn()?;
        Ok(Running {
            child: Watched::child(child.id(), &self.exits)?,
            verb: self.verb,
            log: self.log,
            stdout_file,
            stderr_file,
        })
    }
}

/// /dev/null in place of a missing stream.
fn stdio(fd: Option<BorrowedFd<'_>>) -> io::Result<Stdio> {
    match fd {
        Some(fd) => Ok(fd.try_clone_to_owned()?.into()),
        None => Ok(Stdio::null()),
    }
}

impl Running {
    /// Waits for the end; returns the output with `RunStreams::CapturedStdout`.
    async fn finish(self) -> Result<Vec<u8>> {
        let exit = self.child.exit().await;
        self.result(exit)
    }

    /// Waits for the end for at most `limit`. `None` if the run had to be killed; it must lead a
    /// group.
    async fn finish_within(self, limit: Duration) -> Option<Result<Vec<u8>>> {
        if let Ok(exit) = tokio::time::timeout(limit, self.child.exit()).await {
            return Some(self.result(exit));
        }
        self.kill_group();
        // Passes on its current content.
        self.log.read();
        // In the kernel it may hang for as long as a server does.
        spawn(async move {
            self.child.exit().await;
        });
        None
    }

    fn result(self, exit: Exit) -> Result<Vec<u8>> {
        let last_error = self.log.read();
        if exit.status == 0 {
            let stdout = self.stdout_file.map(|file| read_from(file, 0));
            return Ok(stdout.unwrap_or_default());
        }
        let message = last_error.filter(|text| !text.is_empty());
        let unexplained = RuntimeError {
            is_explained: false,
            ..format!("{}: exit status {}", self.verb, exit.status).into()
        };
        Err(unexplained.explained_by(message.or_else(|| self.stderr_file.and_then(tail))))
    }

    /// Kills the runtime and its forked processes. Call before the end of a run that leads a group.
    fn kill_group(&self) {
        if let Some(group) = kernel_pid(self.child.pid) {
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

impl RuntimeError {
    /// The error of the last try. Some runtimes explain an error only on the process's stderr, as
    /// crun does for a missing program: then the error quotes the end of this output. A log file
    /// gets the whole output.
    fn into_final(self, prepared_io: &PreparedIo) -> Self {
        let message = prepared_io.last_output();
        prepared_io.write_failure();
        self.explained_by(message)
    }

    /// The guard's policy refuses the container.
    fn refused(reason: &str) -> Self {
        format!("refused by bindguard: {reason}").into()
    }

    /// Adds the guard's reason. The reason of the latest check wins.
    fn with_unrepaired(mut self, unrepaired: Option<String>) -> Self {
        if let Some(reason) = unrepaired {
            self.unrepaired = format!("; bindguard: {reason}");
        }
        self
    }

    /// Uses this text as the reason, if the error has none.
    fn explained_by(mut self, reason: Option<String>) -> Self {
        if let Some(reason) = reason
            && !self.is_explained
        {
            self.message = reason;
            self.is_explained = true;
        }
        self
    }
}

fn tail(file: File) -> Option<String> {
    let length = file.metadata().map_or(0, |meta| meta.len());
    let bytes = read_from(file, length.saturating_sub(STDERR_TAIL));
    Some(String::from_utf8_lossy(&bytes).trim().to_owned()).filter(|text| !text.is_empty())
}

fn memory_file() -> io::Result<File> {
    Ok(memfd_create("runtime-output", MemfdFlags::CLOEXEC)?.into())
}

fn read_from(mut file: File, start: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    let read = file
        .seek(SeekFrom::Start(start))
        .and_then(|_| file.read_to_end(&mut bytes));
    if let Err(error) = read {
        log::warn!(error:%; "cannot read what the runtime printed");
    }
    bytes
}

static COUNTER: AtomicU64 = AtomicU64::new(0);

/// The log's path if no file can be made in the bundle.
const NOWHERE: &str = "/dev/null";

/// The level of youki's errors.
const YOUKI_ERROR: &str = "ERROR";

/// The end of youki's message where its environment has `RUST_BACKTRACE`.
const YOUKI_BACKTRACE: &str = "\n\nStack backtrace:";

/// The log file of a call; removed when dropped.
struct LogFile {
    path: PathBuf,
    /// None if no file can be made in the bundle.
    file: Option<File>,
}

#[derive(Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(default)]
struct RuntimeMessage {
    level: String,
    #[serde(alias = "message")]
    msg: String,
    /// youki's error value, beside some messages.
    err: Option<String>,
}

impl LogFile {
    /// A new file in the bundle. If the file cannot be made (the disk is full, or read-only) the
    /// runtime logs to `/dev/null`: a runtime without a log ends at once, and a container must
    /// still be killed and deleted.
    fn in_bundle(bundle: &Path, verb: &str) -> Self {
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let path = bundle.join(format!("log-{verb}-{}-{number}.json", std::process::id()));
        let opened = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&path);
        let (path, file) = match opened {
            Ok(file) => (path, Some(file)),
            Err(error) => {
                log::warn!(error:%, path:% = path.display(); "the runtime is called without a log");
                (NOWHERE.into(), None)
            }
        };
        Self { path, file }
    }

    /// Passes on messages below the level of an error, and returns the last error.
    fn read(&self) -> Option<String> {
        let mut bytes = Vec::new();
        let mut file = self.file.as_ref()?;
        file.rewind()
            .and_then(|()| file.read_to_end(&mut bytes))
            .ok()?;
        let messages = parse(&String::from_utf8_lossy(&bytes));
        for RuntimeMessage { level, msg, .. } in &messages {
            let level = match level.to_ascii_lowercase().as_str() {
                "warning" | "warn" => Level::Warn,
                "info" => Level::Info,
                "debug" | "trace" => Level::Debug,
                _ => continue,
            };
            log::log!(level, from:% = "runtime"; "{msg}");
        }
        last_error(messages)
    }
}

impl Drop for LogFile {
    fn drop(&mut self) {
        if self.file.is_some() {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// An object begins with its line. A line that begins no complete object is skipped.
fn parse(text: &str) -> Vec<RuntimeMessage> {
    let mut messages = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        rest = match first_message(rest) {
            Some((message, end)) => {
                messages.push(message);
                &rest[end..]
            }
            None => rest.split_once('\n').map_or("", |(_, next)| next),
        };
    }
    messages
}

/// The message at the start of a text, and its end.
fn first_message(text: &str) -> Option<(RuntimeMessage, usize)> {
    if !text.trim_start_matches([' ', '\t']).starts_with('{') {
        return None;
    }
    let mut objects = serde_json::Deserializer::from_str(text).into_iter();
    let message = objects.next()?.ok()?;
    Some((message, objects.byte_offset()))
}

/// runc and crun write a single error. youki writes an error for each step: the last says what
/// failed, and the first why.
fn last_error(messages: Vec<RuntimeMessage>) -> Option<String> {
    let mut errors = messages;
    errors.retain(|message| {
        let level = message.level.to_ascii_lowercase();
        matches!(level.as_str(), "error" | "fatal" | "panic")
    });
    let (last, before) = errors.split_last()?;
    let first = before.first();
    if first.unwrap_or(last).level != YOUKI_ERROR {
        return Some(last.msg.trim().to_owned());
    }
    let what = last.msg.split(YOUKI_BACKTRACE).next().unwrap_or_default();
    let mut text = what.trim().to_owned();
    let why = first.map(|error| error.msg.as_str());
    let value = errors.iter().find_map(|error| error.err.as_deref());
    for part in [why, value].into_iter().flatten() {
        text.push_str(": ");
        text.push_str(part.trim());
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::*;

    #[test]
    fn a_runtime_knows_no_container_below_a_file() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("ns/c")).unwrap();
        fs::write(root.path().join("file"), "").unwrap();
        let knows = |folder: &str, id: &str| {
            let options = Options {
                root: root.path().join(folder).to_str().unwrap().to_owned(),
                ..Options::default()
            };
            let bundle = Bundle::at(root.path());
            Runtime::new(&options, "ns", id, bundle, Arc::default()).knows_container()
        };
        assert!(knows("", "c"));
        for (folder, id) in [("", "d"), ("file", "c"), ("file/x", "c")] {
            assert!(!knows(folder, id), "{folder} {id}");
        }
        assert!(!knows("", &"x".repeat(300)));
    }

    #[test]
    fn every_option_has_its_flag() {
        let options = CheckpointOptions {
            image_path: "/i".into(),
            work_path: "/w".into(),
            ..CheckpointOptions::default()
        };
        assert_eq!(
            checkpoint_args(&options, ""),
            ["--image-path", "/i", "--work-path", "/w", "--leave-running"]
        );
        let all = CheckpointOptions {
            exit: true,
            open_tcp: true,
            external_unix_sockets: true,
            terminal: true,
            file_locks: true,
            empty_namespaces: vec!["network".into()],
            ..options
        };
        let flags = [
            "--parent-path",
            "../before",
            "--tcp-established",
            "--ext-unix-sk",
            "--shell-job",
            "--file-locks",
            "--empty-ns",
            "network",
        ];
        assert_eq!(checkpoint_args(&all, "../before")[4..], flags);
    }
}

#[cfg(test)]
mod log_tests {
    use super::*;

    #[test]
    fn the_last_error_counts_and_remarks_do_not() {
        let text = r#"
            {"level":"error","msg":"first","time":"2026-11-21T05:10:00Z"}
            {"level":"error","msg":"runc create failed: no such file or directory\n","time":"2026-11-21T05:10:00Z"}
            {"level":"warning","msg":"re-bound /var/lib/kubelet/x"}"#;
        assert_eq!(
            last_error(parse(text)).as_deref(),
            Some("runc create failed: no such file or directory")
        );
    }

    /// As crun 1.28 writes an error.
    #[test]
    fn an_object_may_take_several_lines() {
        let crun = "{\n  \"msg\": \"cannot stat `\\/data`\",\n  \"level\": \"error\",\n  \"time\": \"2026-11-21T05:10:00.0Z\"\n}\n";
        let expected = Some("cannot stat `/data`");
        assert_eq!(last_error(parse(crun)).as_deref(), expected);
        let guard = "{\"level\":\"warning\",\"msg\":\"re-bound /var/lib/kubelet/x\"}\n";
        let around = format!("{guard}{crun}{guard}");
        assert_eq!(parse(&around).len(), 3);
        assert_eq!(last_error(parse(&around)).as_deref(), expected);
        let half = &crun[..crun.len() - 10];
        assert_eq!(parse(&format!("{half}\n{guard}")).len(), 1);
        assert_eq!(
            last_error(parse(&format!("{crun}{half}"))).as_deref(),
            expected
        );
    }

    /// As youki 0.7 writes errors, with `RUST_BACKTRACE`.
    #[test]
    fn the_cause_follows_the_last_error() {
        let youki = r#"
            {"timestamp":"2026-11-25T23:45:10.3Z","level":"ERROR","message":"failed to mount /data: syscall","target":"libcontainer::rootfs::mount"}
            {"timestamp":"2026-11-25T23:45:10.3Z","level":"ERROR","message":"failed to prepare rootfs","err":"Mount(Syscall(Nix(ENOENT)))","target":"libcontainer::process::init::process"}
            {"timestamp":"2026-11-25T23:45:10.4Z","level":"ERROR","message":"failed to create container\n\nStack backtrace:\n   0: <unknown>","target":"youki"}
            {"timestamp":"2026-11-25T23:45:10.4Z","level":"DEBUG","message":"ended","target":"youki"}"#;
        let expected = "failed to create container: failed to mount /data: syscall: Mount(Syscall(Nix(ENOENT)))";
        assert_eq!(last_error(parse(youki)).as_deref(), Some(expected));
        let last_alone = parse(youki).split_off(2);
        assert_eq!(
            last_error(last_alone).as_deref(),
            Some("failed to create container")
        );
    }

    #[test]
    fn a_half_written_line_hides_nothing() {
        let text = "{\"level\":\"error\",\"msg\":\"the one\"}\n{\"level\":\"err";
        assert_eq!(last_error(parse(text)).as_deref(), Some("the one"));
        let text = "{\"level\":\"err\n{\"level\":\"error\",\"msg\":\"the one\"}\nnot json\n";
        assert_eq!(last_error(parse(text)).as_deref(), Some("the one"));
        assert_eq!(last_error(parse("")), None);
    }

    #[test]
    fn the_log_file_is_removed_with_its_call() {
        let dir = tempfile::tempdir().unwrap();
        let log = LogFile::in_bundle(dir.path(), "create");
        assert_ne!(log.path, LogFile::in_bundle(dir.path(), "create").path);
        assert_eq!(log.read(), None);
        assert_eq!(
            LogFile::in_bundle(&dir.path().join("missing"), "create").path,
            Path::new(NOWHERE)
        );
        fs::write(&log.path, "{\"level\":\"error\",\"msg\":\"x\"}").unwrap();
        assert_eq!(log.read().as_deref(), Some("x"));
        let path = log.path.clone();
        drop(log);
        assert!(!path.try_exists().unwrap());
    }
}
