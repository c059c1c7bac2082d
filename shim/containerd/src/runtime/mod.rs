//! The OCI runtime's command line: a method per verb.
//!
//! `create` and `restore` go through the guard (`guard`), all other verbs directly to runc, crun or
//! the program that the options name. The runtime's *text* is passed on, never parsed: decisions
//! depend on exit codes, files and pidfds.

mod guard;
mod invoke;

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use containerd_shim_protos::shim::oci::CheckpointOptions;

pub use guard::{GuardSettings, NewContainer};
pub use invoke::RuntimeError;

use crate::blocking::run_blocking;
use crate::bundle::Bundle;
use crate::exits::Exits;
use crate::io::PreparedIo;
use crate::options::Options;
use invoke::{RunStreams, RuntimeCall};

/// runc's state directory under containerd, without the namespace; Go's shim uses it for every
/// runtime.
const DEFAULT_ROOT: &str = "/run/containerd/runc";
const DEFAULT_BINARY: &str = "runc";
/// The time limit for a list of processes: a containerd that starts waits five seconds for it.
const PIDS_LIMIT: Duration = Duration::from_secs(3);

/// The runtime of a container.
#[derive(Debug)]
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
        let or = |value: &str, default: &str| {
            let chosen = if value.is_empty() { default } else { value };
            chosen.to_owned()
        };
        Self {
            id: id.to_owned(),
            binary: or(&options.binary_name, DEFAULT_BINARY),
            root: PathBuf::from(or(&options.root, DEFAULT_ROOT)).join(namespace),
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
    pub async fn run(
        &self,
        verb: &'static str,
        mut args: Vec<OsString>,
    ) -> Result<(), RuntimeError> {
        args.push((&self.id).into());
        self.run_captured(verb, args).await
    }

    /// Sends a signal to the container's init, or to all its processes.
    pub async fn kill(&self, signal: u32, all: bool) -> Result<(), RuntimeError> {
        let mut args: Vec<OsString> = vec![(&self.id).into(), signal.to_string().into()];
        if all {
            args.insert(0, "--all".into());
        }
        self.run_captured("kill", args).await
    }

    async fn run_captured(
        &self,
        verb: &'static str,
        args: Vec<OsString>,
    ) -> Result<(), RuntimeError> {
        let call = self.call(verb, args).await?;
        call.run(RunStreams::Captured).await.map(drop)
    }

    /// A call of the runtime itself, without the guard.
    async fn call(
        &self,
        verb: &'static str,
        args: Vec<OsString>,
    ) -> Result<RuntimeCall, RuntimeError> {
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
                tracing::warn!(id = self.id, %error, "cannot remove what a failed create left");
            }
        }
    }

    /// The pids of all processes of the container, within [`PIDS_LIMIT`].
    pub async fn pids(&self) -> Result<Vec<u32>, RuntimeError> {
        let no_answer = |why| RuntimeError::Failed {
            message: format!("read the answer of ps: {why}"),
        };
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
    ) -> Result<(), RuntimeError> {
        let mut args = vec!["--process".into(), process.into(), "--detach".into()];
        self.add_process(&mut args, pid_file, prepared_io);
        let call = self.call("exec", args).await?;
        let done = call.run(RunStreams::Process(prepared_io)).await;
        done.map(drop)
            .map_err(|error| error.into_final(prepared_io))
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
    async fn resolve_binary(&self) -> Result<PathBuf, RuntimeError> {
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
        Err(RuntimeError::Failed { message })
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
