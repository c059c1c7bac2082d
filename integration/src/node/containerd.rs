//! The configuration, start and end of a node's containerd.
//!
//! The same `version = 2` file serves all three generations (2.1 migrates it). Unneeded plugins are
//! disabled, because they take most of containerd's start. With a private `/run`, every path of
//! containerd is the default path.

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::post_mortem::tail;
use crate::image::PAUSE;
use crate::waiting::until;

/// The socket of every node's containerd, in the node's private `/run`.
pub const SOCKET: &str = "/run/containerd/containerd.sock";

const NEVER_NEEDED: [&str; 5] = [
    "io.containerd.internal.v1.opt",
    "io.containerd.snapshotter.v1.btrfs",
    "io.containerd.snapshotter.v1.devmapper",
    "io.containerd.snapshotter.v1.zfs",
    "io.containerd.tracing.processor.v1.otlp",
];
const CRI_ONLY: [&str; 4] = [
    "io.containerd.grpc.v1.cri",
    "io.containerd.cri.v1.images",
    "io.containerd.cri.v1.runtime",
    "io.containerd.nri.v1.nri",
];

/// The inputs of a configuration.
#[derive(Debug)]
pub(super) struct Configuration<'a> {
    /// The node's folder on disk.
    pub(super) disk: &'a Path,
    /// The folder with the node's programs.
    pub(super) programs: &'a Path,
    /// True if pods can be run.
    pub(super) cri: bool,
    /// True if NRI plugins can register.
    pub(super) nri: bool,
    /// True if each entry of the guard has a handler already.
    pub(super) handlers: bool,
    /// True if systemd makes the pods' cgroups.
    pub(super) systemd: bool,
}

impl Configuration<'_> {
    pub(super) fn write(&self, file: &Path) -> Result<()> {
        file.parent()
            .map_or(Ok(()), fs::create_dir_all)
            .with_context(|| format!("make room for {}", file.display()))?;
        fs::write(file, self.text()).with_context(|| format!("write {}", file.display()))
    }

    fn text(&self) -> String {
        let disabled =
            NEVER_NEEDED
                .iter()
                .chain(if self.cri { [].iter() } else { CRI_ONLY.iter() });
        let disabled: Vec<String> = disabled.map(|plugin| format!("{plugin:?}")).collect();
        let mut text = format!(
            "version = 2\nroot = \"{}/containerd\"\ndisabled_plugins = [{}]\n[grpc]\n  address = \"{SOCKET}\"\n[debug]\n  level = \"info\"\n",
            self.disk.display(),
            disabled.join(", "),
        );
        if self.cri {
            text.push_str(&self.cri_text());
            if self.handlers {
                text.push_str(&self.handlers_text());
            }
        }
        text
    }

    fn cri_text(&self) -> String {
        let (disk, without_nri) = (self.disk.display(), !self.nri);
        format!(
            r#"[plugins."io.containerd.nri.v1.nri"]
  disable = {without_nri}
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  restrict_oom_score_adj = true
  disable_apparmor = true
[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "{disk}/cni"
  conf_dir = "{disk}/cni"
[plugins."io.containerd.grpc.v1.cri".containerd]
  default_runtime_name = "runc"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
{}"#,
            self.options_text("runc", None)
        )
    }

    fn handlers_text(&self) -> String {
        let programs = self.programs.display();
        let wrapper = format!("BinaryName = \"{programs}/bindguard-runtime\"");
        let handlers = format!(
            r#"[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.bindguard]
  runtime_type = "io.containerd.bindguard.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.bindguard-path]
  runtime_type = "io.containerd.runc.v2"
  runtime_path = "{programs}/containerd-shim-bindguard-v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.bindguard-wrapper]
  runtime_type = "io.containerd.runc.v2"
"#
        );
        // a runtime of a name of its own gets no options, as `bindguard install` has it
        let options = [
            ("bindguard-path", None),
            ("bindguard-wrapper", Some(wrapper.as_str())),
        ];
        handlers
            + &options
                .map(|(handler, option)| self.options_text(handler, option))
                .concat()
    }

    /// A handler's options for the shim; empty without options.
    fn options_text(&self, handler: &str, option: Option<&str>) -> String {
        let systemd = self.systemd.then_some("SystemdCgroup = true");
        let options: Vec<&str> = option.into_iter().chain(systemd).collect();
        if options.is_empty() {
            return String::new();
        }
        let table =
            format!("plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.{handler}.options");
        format!("[{table}]\n  {}\n", options.join("\n  "))
    }
}

#[derive(Debug)]
pub(super) struct Containerd(Child);

impl Containerd {
    /// Starts it with `command` (which already says in which cgroup and environment) and waits
    /// until it answers.
    pub(super) fn start(command: &mut Command, log: &Path) -> Result<Self> {
        let output = File::options().create(true).append(true).open(log);
        let output = output.with_context(|| format!("open {}", log.display()))?;
        let offset = output.metadata().context("look at containerd's log")?.len() as usize;
        let errors = output.try_clone().context("duplicate containerd's log")?;
        command
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(errors)
            .process_group(0);
        let child = command.spawn().context("start containerd")?;
        let mut containerd = Self(child);
        containerd.wait_until_it_answers(log, offset)?;
        Ok(containerd)
    }

    /// Sends `signal` and waits for its end.
    pub(super) fn stop(mut self, signal: Signal) -> Result<()> {
        let pid = Pid::from_raw(self.0.id().try_into().context("containerd's pid")?);
        kill(pid, signal).with_context(|| format!("send {signal} to containerd"))?;
        until(&format!("containerd has ended after {signal}"), || {
            Ok(self.0.try_wait().context("wait for containerd")?.is_some())
        })
    }

    /// "containerd successfully booted" is logged after the sockets are served, by every
    /// generation. Earlier starts wrote to the same log, so only what lies past `offset` counts.
    fn wait_until_it_answers(&mut self, log: &Path, offset: usize) -> Result<()> {
        let mut said = String::new();
        let answers = until("containerd answers", || {
            let text =
                fs::read_to_string(log).with_context(|| format!("read {}", log.display()))?;
            text.get(offset..).unwrap_or_default().clone_into(&mut said);
            if said.contains("containerd successfully booted") {
                return Ok(true);
            }
            match self.0.try_wait().context("wait for containerd")? {
                Some(status) => bail!("containerd ended at its start ({status})"),
                None => Ok(false),
            }
        });
        answers.with_context(|| tail(&said, 10))
    }
}

impl Drop for Containerd {
    /// The keeper would end it too, but only its parent can reap it.
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(None)) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}
