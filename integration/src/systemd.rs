//! systemd as cgroup manager: the machine's own, for a node that was set up with it
//! ([`Setup::systemd`](crate::Setup::systemd)).
//!
//! Such a node's containers are scopes in a slice that has the node's name. Dashes in a slice's
//! name are levels, so underscores replace the dashes: `bgt-7-0` has `bgt_7_0.slice`, and in it
//! `bgt-7-0-web.scope` and the `cri-containerd-….scope` of pods.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::Node;
use crate::process::host;
use crate::waiting::until;

/// Only a machine that systemd has booted has this, see sd_booted(3).
const BOOTED: &str = "/run/systemd/system";
/// The mount point of version 2 if it is the only hierarchy.
const UNIFIED: &str = "/sys/fs/cgroup";

/// The reason why systemd cannot make cgroups here; `None` if systemd can.
pub(crate) fn missing() -> Option<String> {
    if !Path::new(BOOTED).exists() {
        Some("systemd has not booted this machine".to_owned())
    } else if !Path::new(UNIFIED).join("cgroup.controllers").exists() {
        Some("cgroup v2 is not alone here".to_owned())
    } else {
        None
    }
}

/// The slice for the containers of the node `name`.
pub(crate) fn slice_of(name: &str) -> String {
    format!("{}.slice", name.replace('-', "_"))
}

/// The cgroup of a node's slice, which may be missing.
pub(crate) fn cgroup_of(name: &str) -> PathBuf {
    Path::new(UNIFIED).join(slice_of(name))
}

/// A property of a unit, by its name.
pub fn property(unit: &str, name: &str) -> Result<String> {
    Ok(
        host(["systemctl", "show", "--value", "--property", name, unit])?
            .trim()
            .to_owned(),
    )
}

/// The units that systemd knows under this pattern, including dead and failed units.
pub fn units(pattern: &str) -> Result<Vec<String>> {
    let table = host([
        "systemctl",
        "list-units",
        "--all",
        "--plain",
        "--no-legend",
        pattern,
    ])?;
    Ok(table
        .lines()
        .filter_map(|line| line.split_whitespace().next().map(str::to_owned))
        .collect())
}

/// The cgroups in the slice of the node `name`.
pub fn slice_members(name: &str) -> Result<Vec<String>> {
    let slice = cgroup_of(name);
    let entries = match fs::read_dir(&slice) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error).with_context(|| format!("list {}", slice.display())),
    };
    let folders = entries
        .flatten()
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    Ok(folders
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect())
}

/// The node's containerd as a service, with the settings of containerd's own unit that matter here.
/// It ends with this value.
#[derive(Debug)]
pub struct Service {
    name: String,
    unit: PathBuf,
    log: PathBuf,
}

impl Service {
    /// Starts the service, and waits for containerd's answer. The node's own containerd must have
    /// ended.
    pub fn start(node: &Node) -> Result<Self> {
        let name = format!("{}.service", node.name());
        let service = Self {
            unit: Path::new(BOOTED).join(&name),
            name,
            log: node.disk().join("service.log"),
        };
        let (daemon, config) = (
            node.containerd().display(),
            node.containerd_config().display(),
        );
        let namespace = format!(
            "/proc/{}/task/{}/ns/mnt",
            std::process::id(),
            nix::unistd::gettid()
        );
        let environment = node
            .environment()
            .map(|(name, value)| format!("Environment={name}={value}\n"));
        let text = format!(
            "[Unit]\nStartLimitIntervalSec=0\n[Service]\nKillMode=process\nDelegate=yes\nRestart=always\nRestartSec=0\n{}StandardError=append:{}\n\
             ExecStart=/bin/busybox nsenter -m{namespace} {daemon} --config {config}\n",
            environment.collect::<String>(),
            service.log.display(),
        );
        fs::write(&service.unit, text)
            .with_context(|| format!("write {}", service.unit.display()))?;
        host(["systemctl", "daemon-reload"])?;
        service.restart()?;
        Ok(service)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Restarts the service, and waits for containerd's answer.
    pub fn restart(&self) -> Result<()> {
        self.answers_again(|| host(["systemctl", "restart", &self.name]).map(drop))
    }

    /// Kills the service's main process; systemd starts the service again.
    pub fn crash(&self) -> Result<()> {
        self.answers_again(|| {
            host([
                "systemctl",
                "kill",
                "--kill-whom=main",
                "--signal=KILL",
                &self.name,
            ])
            .map(drop)
        })
    }

    pub fn stop(&self) -> Result<()> {
        host(["systemctl", "stop", &self.name]).map(drop)
    }

    fn answers_again(&self, action: impl FnOnce() -> Result<()>) -> Result<()> {
        let boots = || {
            fs::read_to_string(&self.log)
                .unwrap_or_default()
                .matches("successfully booted")
                .count()
        };
        let before = boots();
        action()?;
        until("containerd answers as a service", || Ok(boots() > before))
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.stop();
        let _ = fs::remove_file(&self.unit);
        let _ = host(["systemctl", "daemon-reload"]);
    }
}
