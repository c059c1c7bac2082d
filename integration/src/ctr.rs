//! containerd's own client as stories use it: run, exec, kill, delete, with typed mounts and
//! runtimes.
//!
//! `ctr` writes the spec itself, so a container of a story has exactly the mounts that the story
//! names.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::image::BUSYBOX;
use crate::output::{read_all_output, staying};
use crate::process::{Finished, LIMIT, run, run_with_input};
use crate::programs::{GUARD, SHIM};
use crate::waiting::until;

/// The ways into the guard, and the way past it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Runtime {
    /// The stock shim: no guard.
    Stock,
    /// `runtime_type = "io.containerd.bindguard.v2"`.
    #[default]
    Bindguard,
    /// The stock runtime's name, with the path of the shim under test.
    BindguardByPath,
    /// The stock shim, with bindguard-runtime as its runc.
    Wrapper,
    /// `io.containerd.NAME.v2`: containerd searches for `containerd-shim-NAME-v2` among the node's
    /// programs.
    Named(&'static str),
}

/// A bind mount of a container.
#[derive(Clone, Debug)]
pub struct Bind {
    source: PathBuf,
    destination: String,
    options: String,
}

impl Bind {
    /// `source` on `destination`, with the options the kubelet's CRI gives: `rbind,rprivate,ro`.
    pub fn new(source: impl Into<PathBuf>, destination: &str) -> Self {
        Self {
            source: source.into(),
            destination: destination.to_owned(),
            options: "rbind:rprivate:ro".to_owned(),
        }
    }

    /// Replaces the options.
    pub fn options(self, options: &[&str]) -> Self {
        Self {
            options: options.join(":"),
            ..self
        }
    }

    fn argument(&self) -> String {
        format!(
            "type=bind,src={},dst={},options={}",
            self.source.display(),
            self.destination,
            self.options
        )
    }
}

#[derive(Clone, Debug)]
pub struct Container<'a> {
    ctr: &'a Ctr,
    id: String,
    runtime: Runtime,
    words: Vec<String>,
    arguments: Vec<String>,
}

/// The client of a containerd namespace.
#[derive(Clone, Debug)]
pub struct Ctr {
    program: PathBuf,
    socket: String,
    namespace: String,
    programs: PathBuf,
    slice: Option<String>,
}

impl Ctr {
    pub(crate) fn new(
        program: &Path,
        socket: &str,
        namespace: &str,
        programs: &Path,
        slice: Option<String>,
    ) -> Self {
        let (program, programs) = (program.to_path_buf(), programs.to_path_buf());
        Self {
            program,
            socket: socket.to_owned(),
            namespace: namespace.to_owned(),
            programs,
            slice,
        }
    }

    /// `ctr` with a different namespace of containerd: pods are in `k8s.io`.
    pub fn in_namespace(&self, namespace: &str) -> Self {
        Self {
            namespace: namespace.to_owned(),
            ..self.clone()
        }
    }

    /// Any `ctr` command.
    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command
            .args(["--address", &self.socket, "--namespace", &self.namespace])
            .args(words);
        command
    }

    /// Imports an OCI archive.
    pub fn import(&self, archive: &Path) -> Result<()> {
        let archive = archive.to_str().context("the archive's path is UTF-8")?;
        run(self.command(&["image", "import", archive]))?
            .success()
            .map(drop)
    }

    /// A container of the busybox image that sleeps.
    pub fn container(&self, id: &str) -> Container<'_> {
        let words = ["sleep", "1000000"].map(String::from).to_vec();
        Container {
            ctr: self,
            id: id.to_owned(),
            runtime: Runtime::default(),
            words,
            arguments: Vec::new(),
        }
    }

    /// Runs a program in a running container.
    pub fn exec(&self, id: &str, words: &[&str]) -> Result<Finished> {
        run(self.exec_command(id, words))
    }

    /// As `exec`, and receives the whole output.
    pub fn exec_to_end(&self, id: &str, words: &[&str]) -> Result<Finished> {
        read_all_output(self.exec_command(id, &staying(words)))
    }

    fn exec_command(&self, id: &str, words: &[&str]) -> Command {
        // the id of an exec must be new for each
        let exec_id = format!("exec-{}", unique());
        self.command(&[&["task", "exec", "--exec-id", &exec_id, id], words].concat())
    }

    /// The content of a file as a running container sees it.
    pub fn read(&self, id: &str, path: &str) -> Result<String> {
        self.exec_to_end(id, &["cat", path])?.success()
    }

    /// Sends a signal, by name without `SIG`.
    pub fn kill(&self, id: &str, signal: &str) -> Result<()> {
        run(self.command(&["task", "kill", "--signal", signal, id]))?
            .success()
            .map(drop)
    }

    /// The pid of a container's first process, in the host's numbers.
    pub fn pid(&self, id: &str) -> Result<u32> {
        let pids = self.pids()?;
        pids.get(id)
            .copied()
            .with_context(|| format!("find the task {id} in: {pids:?}"))
    }

    /// The pids of all containers' first processes, by container.
    pub fn pids(&self) -> Result<HashMap<String, u32>> {
        let table = self.tasks()?;
        let row = |line: &str| {
            let mut fields = line.split_whitespace();
            Some((fields.next()?.to_owned(), fields.next()?.parse().ok()?))
        };
        Ok(table.lines().filter_map(row).collect())
    }

    /// The table of tasks: id, pid, status.
    pub fn tasks(&self) -> Result<String> {
        run(self.command(&["task", "ls"]))?.success()
    }

    /// Waits until a container's status in the table of tasks is `status`.
    pub fn wait_for_status(&self, id: &str, status: &str) -> Result<()> {
        let mut table = String::new();
        let so = until(&format!("{id} is {status}"), || {
            table = self.tasks()?;
            Ok(table
                .lines()
                .any(|line| line.starts_with(id) && line.ends_with(status)))
        });
        so.with_context(|| table.clone())
    }

    /// Kills and removes a container completely, as a kubelet does before the next start.
    pub fn remove(&self, id: &str) -> Result<()> {
        run(self.command(&["task", "rm", "--force", id]))?.success()?;
        self.forget(id)
    }

    /// As `remove`, for many containers with two calls of ctr.
    pub fn remove_all<S: AsRef<OsStr>>(&self, ids: &[S]) -> Result<()> {
        for words in [&["task", "rm", "--force"][..], &["container", "rm"]] {
            let mut command = self.command(words);
            command.args(ids);
            run(command)?.success()?;
        }
        Ok(())
    }

    /// Removes a task whose runtime or shim was killed, until containerd has forgotten it.
    pub fn end_task(&self, id: &str) -> Result<()> {
        until("containerd has forgotten the task", || {
            let stays = self.tasks()?.contains(id);
            if stays {
                let _ = run(self.command(&["task", "rm", "--force", id]))?;
            }
            Ok(!stays)
        })
    }

    /// Removes a container without a task, whose create failed.
    pub fn forget(&self, id: &str) -> Result<()> {
        run(self.command(&["container", "rm", id]))?
            .success()
            .map(drop)
    }
}

impl Container<'_> {
    /// Through which door.
    pub fn runtime(self, runtime: Runtime) -> Self {
        Self { runtime, ..self }
    }

    pub fn runs(self, words: &[&str]) -> Self {
        Self {
            words: words.iter().map(|word| (*word).to_owned()).collect(),
            ..self
        }
    }

    pub fn mount(self, bind: Bind) -> Self {
        let argument = bind.argument();
        self.argument("--mount").argument(&argument)
    }

    /// An annotation in the spec.
    pub fn annotation(self, key: &str, value: &str) -> Self {
        let pair = format!("{key}={value}");
        self.argument("--annotation").argument(&pair)
    }

    /// The annotations that containerd's CRI plugin gives a container with this name of the pod
    /// `default/POD`.
    pub fn in_pod(self, name: &str, pod: &str, uid: &str) -> Self {
        let annotations = [
            ("container-type", "container"),
            ("container-name", name),
            ("sandbox-id", pod),
            ("sandbox-name", pod),
            ("sandbox-namespace", "default"),
            ("sandbox-uid", uid),
        ];
        let annotate =
            |it: Self, (key, value)| it.annotation(&format!("io.kubernetes.cri.{key}"), value);
        annotations.into_iter().fold(self, annotate)
    }

    /// Any further argument of `ctr run`.
    pub fn argument(mut self, argument: &str) -> Self {
        self.arguments.push(argument.to_owned());
        self
    }

    /// Creates and starts the container, and leaves it running.
    pub fn start(self) -> Result<Finished> {
        run(self.command(&["--detach", "--null-io"]))
    }

    /// Runs the container to its end and removes it.
    pub fn run(self) -> Result<Finished> {
        run(self.command(&["--rm"]))
    }

    /// As `run`, and receives the whole output.
    pub fn run_to_end(self) -> Result<Finished> {
        read_all_output(self.staying().command(&["--rm"]))
    }

    /// The same container, kept running until its output has been received.
    pub fn staying(self) -> Self {
        let words: Vec<&str> = self.words.iter().map(String::as_str).collect();
        let staying = staying(&words).into_iter().map(str::to_owned).collect();
        Self {
            words: staying,
            ..self
        }
    }

    /// As `run`, with `input` on stdin.
    pub fn run_with_input(self, input: &str) -> Result<Finished> {
        run_with_input(self.command(&["--rm"]), input, LIMIT)
    }

    /// The `ctr run` command itself.
    pub fn command(&self, flags: &[&str]) -> Command {
        let mut command = self.ctr.command(&["run"]);
        command.args(flags).arg("--runtime");
        match self.runtime {
            Runtime::Stock => command.arg("io.containerd.runc.v2"),
            Runtime::Bindguard => command.arg("io.containerd.bindguard.v2"),
            Runtime::BindguardByPath => command.arg(self.ctr.programs.join(SHIM)),
            Runtime::Wrapper => command
                .arg("io.containerd.runc.v2")
                .arg("--runc-binary")
                .arg(self.ctr.programs.join(GUARD)),
            Runtime::Named(name) => command.arg(format!("io.containerd.{name}.v2")),
        };
        if let Some(slice) = &self.ctr.slice {
            command
                .arg("--cgroup")
                .arg(format!("{slice}:{}:{}", self.ctr.namespace, self.id));
            // `ctr` has this option only for runc's shim; other shims decide by the cgroup path
            if matches!(self.runtime, Runtime::Stock | Runtime::Wrapper) {
                command.arg("--runc-systemd-cgroup");
            }
        }
        command
            .args(&self.arguments)
            .arg(BUSYBOX)
            .arg(&self.id)
            .args(&self.words);
        command
    }
}

fn unique() -> u32 {
    use std::sync::atomic::{AtomicU32, Ordering};
    static COUNT: AtomicU32 = AtomicU32::new(0);
    COUNT.fetch_add(1, Ordering::Relaxed)
}
