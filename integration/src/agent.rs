//! The node agent on a node, as a systemd unit or a pod starts it.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::kube_api::KubeApi;
use crate::node::{AGENT_LOG, Node, SOCKET};
use crate::programs::AGENT;
use crate::stopped::is_stopped;
use crate::waiting::until;

/// The place where the agent starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// In the node's mount namespace.
    Service,
    /// In a mount namespace of its own, to which nothing propagates, with the node's root in it, and
    /// in a network namespace of its own.
    Pod,
}

const SERVED: &str = "/run/bindguard-agent.sock";

/// The token of its service account.
pub const TOKEN: &str = "token-1";

/// A running agent. Drop ends the agent.
#[derive(Debug)]
pub struct Agent {
    child: Child,
    socket: PathBuf,
}

impl Agent {
    /// Starts it with the kubelet's root of the node and more lines of config, and waits until it
    /// is ready.
    pub fn start(node: &Node, config: &str) -> Result<Self> {
        Self::start_as(node, config, Form::Service)
    }

    /// As `start`, as a service or in a pod.
    pub fn start_as(node: &Node, config: &str, form: Form) -> Result<Self> {
        let command = match form {
            Form::Service => node.command(node.under_test().join(AGENT))?,
            Form::Pod => in_a_pod(node)?,
        };
        Self::spawn(node, config, command, SERVED)
    }

    /// As `start`, with this socket. The agent's files are beside the socket.
    pub fn start_at(node: &Node, config: &str, socket: &str) -> Result<Self> {
        Self::spawn(
            node,
            config,
            node.command(node.under_test().join(AGENT))?,
            socket,
        )
    }

    /// As `start`, from a build with fault points, with the fault `fault`.
    pub fn start_with_fault(node: &Node, fault: &str) -> Result<Self> {
        let mut command = node.command(node.under_test().join(AGENT))?;
        command.env("BINDGUARD_FAULT", fault);
        Self::spawn(node, "", command, SERVED)
    }

    /// In a pod whose service account leads to an API server.
    pub fn start_with_account(node: &Node, config: &str, api: &KubeApi) -> Result<Self> {
        let mut command = Self::with_account(node, &["--propagation", "private"], api)?;
        command
            .arg(node.under_test().join(AGENT))
            .args(["--host", "/"]);
        Self::spawn(node, config, command, SERVED)
    }

    /// A command that runs its arguments in a mount namespace with the service account's files, and
    /// with the environment of a pod; `options`: of unshare(1).
    pub fn with_account(node: &Node, options: &[&str], api: &KubeApi) -> Result<Command> {
        let account = node.disk().join("account");
        fs::create_dir_all(&account).context("make the folder of the service account")?;
        for (name, text) in [
            ("token", TOKEN),
            ("namespace", "kube-system"),
            ("ca.crt", api.certificate()),
        ] {
            fs::write(account.join(name), text).with_context(|| format!("write {name}"))?;
        }
        let place = "/var/run/secrets/kubernetes.io/serviceaccount";
        let mount = format!(
            "mkdir -p {place}; mount --bind {} {place}; exec \"$@\"",
            account.display()
        );
        let mut command = node.command("unshare")?;
        command
            .arg("--mount")
            .args(options)
            .args(["sh", "-ec", &mount, "sh"]);
        command.env("KUBERNETES_SERVICE_HOST", api.address().ip().to_string());
        command.env("KUBERNETES_SERVICE_PORT", api.address().port().to_string());
        command.env("NODE_NAME", "node-1");
        Ok(command)
    }

    fn spawn(node: &Node, config: &str, mut command: Command, socket: &str) -> Result<Self> {
        let (socket, file) = (PathBuf::from(socket), node.disk().join("agent.toml"));
        let metrics = match config.contains("agent.metrics") {
            true => "",
            false => "agent.metrics = 'off'\n",
        };
        let text = format!(
            "kubelet.roots = ['{}']\n{metrics}agent.socket = '{}'\n{config}",
            node.kubelet().root().display(),
            socket.display()
        );
        fs::write(&file, text).with_context(|| format!("write {}", file.display()))?;
        command.arg("--config").arg(&file).args(["--cri", SOCKET]);
        let log = node.disk().join(AGENT_LOG);
        let log = File::options()
            .create(true)
            .append(true)
            .open(&log)
            .with_context(|| format!("open {}", log.display()))?;
        // As the unit and the manifest say.
        command.stderr(log).env("MALLOC_ARENA_MAX", "1");
        let agent = Self {
            child: command.spawn().context("start the agent")?,
            socket,
        };
        until("the agent has surveyed the node", || {
            let answer = agent.get("/readyz");
            Ok(!answer.is_empty() && !answer.contains("the first survey is not done"))
        })?;
        Ok(agent)
    }

    /// The whole answer to a GET; empty if nothing answers.
    pub fn get(&self, path: &str) -> String {
        self.request("GET", path, "")
    }

    /// The whole answer to a request with more header lines, each with its line end.
    pub fn request(&self, method: &str, path: &str, headers: &str) -> String {
        let Ok(mut stream) = UnixStream::connect(&self.socket) else {
            return String::new();
        };
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: agent\r\nConnection: close\r\n{headers}\r\n"
        );
        let mut answer = String::new();
        let _ = stream
            .write_all(request.as_bytes())
            .and_then(|()| stream.read_to_string(&mut answer));
        answer
    }

    /// The value of a figure, its labels included in the name; 0 if there is none.
    pub fn figure(&self, name: &str) -> f64 {
        let text = self.get("/metrics");
        let value = text
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value
            .and_then(|value| value.trim().parse().ok())
            .unwrap_or_default()
    }

    /// Sends SIGSTOP, and waits until none of its threads runs.
    pub fn stop(&self) -> Result<()> {
        self.signal(Signal::SIGSTOP)?;
        until("the agent is stopped", || is_stopped(self.pid()))
    }

    /// Lets it go on after a stop.
    pub fn go_on(&self) -> Result<()> {
        self.signal(Signal::SIGCONT)
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let pid = Pid::from_raw(self.pid().try_into()?);
        kill(pid, signal).with_context(|| format!("send {signal} to the agent"))
    }

    /// Waits until SIGKILL has ended it.
    pub fn is_killed(&mut self) -> Result<()> {
        let mut status = None;
        until("the agent is killed", || {
            status = self.child.try_wait().context("wait for the agent")?;
            Ok(status.is_some())
        })?;
        let signal = status.and_then(|status| status.signal());
        ensure!(
            signal == Some(Signal::SIGKILL as i32),
            "the agent ended with {status:?}"
        );
        Ok(())
    }

    /// Kills its helper process, and waits until the agent has ended with an error for that.
    pub fn ends_without_its_helper(self) -> Result<()> {
        let helper = self.helper()?;
        kill(Pid::from_raw(helper.try_into()?), Signal::SIGKILL)?;
        self.ends_with_an_error()
    }

    /// Waits until it has ended with an error.
    pub fn ends_with_an_error(mut self) -> Result<()> {
        let mut status = None;
        until("the agent ends", || {
            status = self.child.try_wait().context("wait for the agent")?;
            Ok(status.is_some())
        })?;
        let code = status.and_then(|status| status.code());
        ensure!(code == Some(1), "the agent ended with {status:?}");
        Ok(())
    }

    /// The pid of its helper process.
    pub fn helper(&self) -> Result<u32> {
        let pid = self.pid();
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
        let mut children = children.split_whitespace();
        let helper = children.next().context("the agent has no child")?.parse()?;
        ensure!(
            children.next().is_none(),
            "the agent has more than one child"
        );
        Ok(helper)
    }

    /// Kills it now.
    pub fn kill(mut self) -> Result<()> {
        self.signal(Signal::SIGKILL)?;
        self.is_killed()
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

fn in_a_pod(node: &Node) -> Result<Command> {
    let mut command = node.command("unshare")?;
    command.args(["--net", "--mount", "--propagation", "private"]);
    command
        .arg(node.under_test().join(AGENT))
        .args(["--host", "/"]);
    Ok(command)
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
