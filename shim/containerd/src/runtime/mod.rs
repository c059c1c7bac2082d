//! The OCI runtime's command line: a method per verb.
//!
//! `create` and `restore` go through the guard (`guard`), all other verbs directly to runc, crun or
//! the program that the options name. The runtime's *text* is passed on, never parsed: decisions
//! depend on exit codes, files and pidfds.

mod besides;
mod checkpoint;
mod guard;
mod handover;
mod invoke;
mod log_file;
mod proof;

use std::ffi::OsString;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

pub(crate) use guard::{GuardSettings, NewContainer};
pub(crate) use invoke::RuntimeError;

use crate::blocking::run_blocking;
use crate::bundle::Bundle;
use crate::exits::Exits;
use crate::io::PreparedIo;
use crate::options::Options;
use guard::Created;
use invoke::{RunStreams, RuntimeCall};

/// runc's state directory under containerd, without the namespace; Go's shim uses it for every
/// runtime.
const DEFAULT_ROOT: &str = "/run/containerd/runc";
const DEFAULT_BINARY: &str = "runc";
/// The time limit for a list of processes: a containerd that starts waits five seconds for it.
const PIDS_LIMIT: Duration = Duration::from_secs(3);

/// The runtime of a container.
#[derive(Debug)]
pub(crate) struct Runtime {
    binary: String,
    root: PathBuf,
    systemd_cgroup: bool,
    bundle: Bundle,
    exits: Arc<Exits>,
}

/// The arguments of `exec`.
pub(crate) struct ExecCall<'a> {
    /// The OCI process, as JSON in a file.
    pub(crate) process: &'a Path,
    /// The file into which the runtime writes the pid.
    pub(crate) pid_file: &'a Path,
    /// The process's streams.
    pub(crate) prepared_io: &'a PreparedIo,
}

impl Runtime {
    /// The runtime of the options, for a container in `namespace`.
    pub(crate) fn new(
        options: &Options,
        namespace: &str,
        bundle: Bundle,
        exits: Arc<Exits>,
    ) -> Self {
        let or = |value: &str, default: &str| {
            if value.is_empty() {
                default.to_owned()
            } else {
                value.to_owned()
            }
        };
        Self {
            binary: or(&options.binary_name, DEFAULT_BINARY),
            root: PathBuf::from(or(&options.root, DEFAULT_ROOT)).join(namespace),
            systemd_cgroup: options.systemd_cgroup.unwrap_or(false),
            bundle,
            exits,
        }
    }

    /// The directory of the runtime's state of a container.
    pub(crate) fn state_of(&self, id: &str) -> PathBuf {
        self.root.join(id)
    }

    /// Creates the container, admitted by the guard if there is one.
    pub(crate) async fn create(
        &self,
        no_new_keyring: bool,
        container: &NewContainer<'_>,
    ) -> Result<Created, RuntimeError> {
        let args = no_new_keyring.then(|| "--no-new-keyring".into());
        self.create_or_restore("create", args.into_iter().collect(), container)
            .await
    }

    /// Runs the program of a created container.
    pub(crate) async fn start(&self, id: &str) -> Result<(), RuntimeError> {
        self.run("start", [id.into()]).await
    }

    /// Sends a signal to the container's init, or to all its processes.
    pub(crate) async fn kill(&self, id: &str, signal: u32, all: bool) -> Result<(), RuntimeError> {
        let all = all.then(|| OsString::from("--all"));
        self.run(
            "kill",
            all.into_iter()
                .chain([id.into(), signal.to_string().into()]),
        )
        .await
    }

    /// Removes a container that has stopped, or was never started.
    pub(crate) async fn delete(&self, id: &str) -> Result<(), RuntimeError> {
        self.run("delete", [id.into()]).await
    }

    /// Removes a container in any state.
    pub(crate) async fn force_delete(&self, id: &str) -> Result<(), RuntimeError> {
        self.run("delete", ["--force".into(), id.into()]).await
    }

    /// Freezes all processes.
    pub(crate) async fn pause(&self, id: &str) -> Result<(), RuntimeError> {
        self.run("pause", [id.into()]).await
    }

    /// Thaws all processes.
    pub(crate) async fn resume(&self, id: &str) -> Result<(), RuntimeError> {
        self.run("resume", [id.into()]).await
    }

    /// Changes resource limits; `resources` is a file with an OCI LinuxResources.
    pub(crate) async fn update(&self, id: &str, resources: &Path) -> Result<(), RuntimeError> {
        self.run(
            "update",
            ["--resources".into(), resources.into(), id.into()],
        )
        .await
    }

    /// The pids of all processes of the container, within [`PIDS_LIMIT`].
    pub(crate) async fn pids(&self, id: &str) -> Result<Vec<u32>, RuntimeError> {
        let args = vec!["--format".into(), "json".into(), id.into()];
        let mut call = RuntimeCall::new(self, self.resolve_binary().await?, "ps", args);
        call.lead_group();
        let running = call.spawn(RunStreams::CapturedStdout)?;
        let no_answer = || RuntimeError::Answer {
            verb: "ps",
            why: format!("there is none within {PIDS_LIMIT:?}"),
        };
        let answer = running.finish_within(PIDS_LIMIT).await;
        let json = answer.ok_or_else(no_answer)??;
        // An empty container is `null` in Go's JSON.
        serde_json::from_slice::<Option<Vec<u32>>>(&json)
            .map(Option::unwrap_or_default)
            .map_err(|error| RuntimeError::Answer {
                verb: "ps",
                why: error.to_string(),
            })
    }

    /// Adds a process to a running container.
    pub(crate) async fn exec(&self, id: &str, exec: &ExecCall<'_>) -> Result<(), RuntimeError> {
        let mut args: Vec<OsString> =
            vec!["--process".into(), exec.process.into(), "--detach".into()];
        args.extend(["--pid-file".into(), exec.pid_file.into()]);
        if let Some(socket) = exec.prepared_io.console_socket() {
            args.extend(["--console-socket".into(), socket.into()]);
        }
        args.push(id.into());
        let call = RuntimeCall::new(self, self.resolve_binary().await?, "exec", args);
        call.run(RunStreams::Process(exec.prepared_io))
            .await
            .map(drop)
            .map_err(|error| error.into_final(exec.prepared_io))
    }

    /// True if the runtime still has state of this container. runc, crun and youki have a directory
    /// per container. If that directory cannot be checked, the answer is true.
    pub(crate) fn knows(&self, id: &str) -> bool {
        match self.root.join(id).try_exists() {
            Ok(exists) => exists,
            // Nothing can be below a file, or under a name that is too long: the runtime says why.
            Err(error) => !matches!(
                error.kind(),
                ErrorKind::NotADirectory | ErrorKind::InvalidFilename
            ),
        }
    }

    async fn run(
        &self,
        verb: &'static str,
        args: impl IntoIterator<Item = OsString>,
    ) -> Result<(), RuntimeError> {
        let call = RuntimeCall::new(
            self,
            self.resolve_binary().await?,
            verb,
            args.into_iter().collect(),
        );
        call.run(RunStreams::Captured).await.map(drop)
    }

    /// Away from the event loop: the path, or a folder of PATH, may be on a server that does not
    /// answer.
    async fn resolve_binary(&self) -> Result<PathBuf, RuntimeError> {
        let (binary, program) = (self.binary.clone(), self.binary.clone());
        run_blocking(move || look_up(&program))
            .await
            .map_err(|source| RuntimeError::Spawn {
                program: binary.clone(),
                source,
            })?
            .ok_or(RuntimeError::Missing { binary })
    }
}

/// Finds a program as exec(3) would: a name with a slash is a path, a name without a slash is
/// searched on PATH.
pub(crate) fn look_up(program: &str) -> Option<PathBuf> {
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
pub(crate) fn is_program(path: &Path) -> bool {
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
            Runtime::new(&options, "ns", bundle, Arc::new(Exits::default())).knows(id)
        };
        assert!(knows("", "c"));
        for (folder, id) in [("", "d"), ("file", "c"), ("file/x", "c")] {
            assert!(!knows(folder, id), "{folder} {id}");
        }
        assert!(!knows("", &"x".repeat(300)));
    }
}
