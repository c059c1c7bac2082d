//! The runtimes that run now, and whether their active configuration names a program.
//!
//! A daemon uses the configuration files as of its start. So an edited file does not show whether a
//! program can be removed: the running daemon is queried. Without a running daemon, as in an image,
//! the files alone decide.
//!
//! | daemon | query |
//! |---|---|
//! | containerd | `Status` with `verbose` of the CRI: `containerd config dump` would read the files |
//! | dockerd | `GET /info` |
//! | CRI-O | `GET /config` on its own socket |

mod cri_status;
mod daemon;
mod engine_containers;
mod names;
mod sandboxes;

use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use bindguard_core::program_names::{AGENT, RUNTIME, WRAPPER};
use bindguard_operator::guarded_runtimes::GuardedRuntimes;
use bindguard_operator::unix_http;
use serde_json::Value;

use self::names::is_in;
pub use self::names::is_in_text;
use super::owner::Owner;

pub use self::cri_status::{active_config, socket_of};
pub use self::daemon::{Daemon, option, place_of, sees_processes};
pub use self::engine_containers::{docker_containers, docker_root, podman_containers};
pub use self::sandboxes::{leave_own_sandbox, pods_with_handler};

/// The time in which a restarted runtime has to answer. k3s also starts the kubelet.
const HEALTHY_TIMEOUT: Duration = Duration::from_secs(120);
const HEALTH_POLL_INTERVAL: Duration = Duration::from_millis(500);
const CONTAINERD: &str = "containerd";
const DOCKER: &str = "dockerd";
const CRIO: &str = "crio";
const DOCKER_SOCKET: &str = "/run/docker.sock";
const CRIO_SOCKET: &str = "/run/crio/crio.sock";

/// The running daemon that reads the files of a runtime.
pub fn daemon_of(owner: Owner) -> Option<Daemon> {
    match owner {
        Owner::Containerd => containerds().into_iter().next(),
        Owner::Docker => Daemon::named(DOCKER).into_iter().next(),
        Owner::Crio => Daemon::named(CRIO).into_iter().next(),
        Owner::Agent => Daemon::named(AGENT).into_iter().next(),
        Owner::Podman | Owner::Bindguard => None,
    }
}

/// The containerds that serve pods. dockerd may start a containerd with a file below `docker/`,
/// which serves no pods.
pub fn containerds() -> Vec<Daemon> {
    let is_dockers = |daemon: &Daemon| {
        daemon
            .config()
            .is_some_and(|config| config.to_string_lossy().contains("/docker/"))
    };
    Daemon::named(CONTAINERD)
        .into_iter()
        .filter(|daemon| !is_dockers(daemon))
        .collect()
}

/// Waits until each containerd, or CRI-O, answers.
///
/// # Errors
/// If that does not happen within the time limit, or none of them runs.
pub fn wait_until_healthy() -> Result<()> {
    let start = Instant::now();
    while let Err(error) = check_health() {
        if start.elapsed() > HEALTHY_TIMEOUT {
            return Err(error.context("wait for the runtime after its restart"));
        }
        thread::sleep(HEALTH_POLL_INTERVAL);
    }
    Ok(())
}

fn check_health() -> Result<()> {
    let containerds = containerds();
    for containerd in &containerds {
        active_config(containerd)?;
    }
    match Daemon::named(CRIO).is_empty() {
        false => crio_config().map(drop),
        true if containerds.is_empty() => bail!("neither containerd nor CRI-O runs"),
        true => Ok(()),
    }
}

/// True if a daemon runs that only root can inspect.
pub fn is_hidden(name: &str) -> bool {
    Daemon::is_hidden(name)
}

/// A running daemon whose active configuration names one of these programs, and that program.
///
/// # Errors
/// If a daemon runs and does not report its configuration.
pub fn daemon_that_names(programs: &[PathBuf]) -> Result<Option<(&'static str, &Path)>> {
    for (daemon, config) in active_configs() {
        let config = config?;
        let named = programs.iter().find(|program| is_in(&config, program));
        if let Some(program) = named {
            return Ok(Some((daemon, program)));
        }
    }
    Ok(None)
}

/// The runtimes of the running daemons that call the guard; an error for each daemon that does not
/// report its configuration.
pub fn guarded_runtimes() -> Vec<Result<GuardedRuntimes>> {
    let guarded = |(daemon, config): (&'static str, Result<Value>)| {
        let of_file = |config, runtimes, default| {
            GuardedRuntimes::from_config(daemon, config, runtimes, default)
        };
        let config = config?;
        Ok(match daemon {
            DOCKER => of_file(&config, "Runtimes", "DefaultRuntime"),
            CRIO => of_file(&config["crio"]["runtime"], "runtimes", "default_runtime"),
            _ => GuardedRuntimes::of_containerd(&config),
        })
    };
    active_configs().into_iter().map(guarded).collect()
}

/// True if the active configuration of containerd or CRI-O has the handler; `None` if none of them
/// runs and answers.
pub fn has_handler() -> Option<bool> {
    let mut found = None;
    for daemon in guarded_runtimes() {
        let daemon = daemon.ok()?;
        if daemon.daemon != DOCKER {
            let has_it = daemon.runtimes.iter().any(|name| name == RUNTIME);
            found = Some(has_it || found == Some(true));
        }
    }
    found
}

/// The active configuration of each running daemon. A containerd without CRI has none.
fn active_configs() -> Vec<(&'static str, Result<Value>)> {
    let of_containerd = containerds().into_iter().filter_map(|containerd| {
        let config = active_config(&containerd).transpose()?;
        Some((CONTAINERD, containerd, config))
    });
    let of_docker = Daemon::named(DOCKER)
        .into_iter()
        .map(|dockerd| (DOCKER, dockerd, docker_info()));
    let of_crio = Daemon::named(CRIO)
        .into_iter()
        .map(|crio| (CRIO, crio, crio_config()));
    let read = |(name, daemon, config): (&'static str, Daemon, Result<Value>)| {
        let doing = || {
            format!(
                "read the active configuration of {name}, process {}",
                daemon.pid
            )
        };
        (name, config.with_context(doing))
    };
    of_containerd
        .chain(of_docker)
        .chain(of_crio)
        .map(read)
        .collect()
}

/// The command after which the agent runs with its unit and its program of now.
pub const AGENT_RESTART: &str = "systemctl restart bindguard-agent";
/// The command with which dockerd reads its file again.
pub const DOCKER_RELOAD: &str = "systemctl reload docker";

/// True if the running daemon uses its file as it is now, without a restart: dockerd was reloaded.
pub fn is_reloaded(owner: Owner, command: &str) -> bool {
    owner == Owner::Docker && command == DOCKER_RELOAD && knows_bindguard().unwrap_or_default()
}

/// True if bindguard's name is that of the guard in the running dockerd. After a removal the name
/// may point at runc.
fn knows_bindguard() -> Result<bool> {
    let info = docker_info()?;
    let path = info["Runtimes"][RUNTIME]["path"].as_str();
    Ok(path.is_some_and(|path| Path::new(path).ends_with(WRAPPER)))
}

fn crio_socket() -> PathBuf {
    socket_option(CRIO, &["listen"]).unwrap_or_else(|| CRIO_SOCKET.into())
}

fn crio_config() -> Result<Value> {
    let text = unix_http::get(&crio_socket(), "/config")?;
    toml::from_str(&text).context("read CRI-O's answer as TOML")
}

fn docker_info() -> Result<Value> {
    let named = socket_option(DOCKER, &["host", "H"]);
    let usual = [
        PathBuf::from(DOCKER_SOCKET),
        Path::new("/var").join(&DOCKER_SOCKET[1..]),
    ];
    let present = || {
        usual
            .iter()
            .find(|socket| socket.symlink_metadata().is_ok())
            .cloned()
    };
    let socket = named
        .or_else(present)
        .unwrap_or_else(|| DOCKER_SOCKET.into());
    serde_json::from_str(&unix_http::get(&socket, "/info")?)
        .context("read dockerd's answer as JSON")
}

/// The unix socket that an option of a running daemon names, as a path or as a URL.
fn socket_option(daemon: &str, names: &[&str]) -> Option<PathBuf> {
    let daemon = Daemon::named(daemon).into_iter().next()?;
    let value = option(&daemon.arguments(), names)?;
    let path = value.strip_prefix("unix://").unwrap_or(&value);
    path.starts_with('/').then(|| PathBuf::from(path))
}
