//! The active configuration of a running containerd: `config` in the answer to `Status` with
//! `verbose` of the CRI.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Error, Result};
use bindguard_operator::cri::of_node::{is_unimplemented, query};
use bindguard_operator::cri::{CriError, PodSandbox};
use serde_json::Value;

use super::Daemon;
use crate::change::read_text;

const CONFIG: &str = "/etc/containerd/config.toml";
const SOCKET: &str = "/run/containerd/containerd.sock";
/// The time that a containerd has to initialize its CRI plugin after a restart.
const START_LIMIT: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(100);

/// The configuration as of containerd's start. `None` if containerd has no CRI.
pub fn active_config(containerd: &Daemon) -> Result<Option<Value>> {
    let socket = socket_of(containerd);
    match unless_it_starts(|| query(&socket, async |cri| cri.active_config().await)) {
        Ok(config) => serde_json::from_str(&config)
            .context("read the answer's config as JSON")
            .map(Some),
        Err(error) if is_unimplemented(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Every sandbox of containerd, in any state. Empty if containerd has no CRI.
pub fn sandboxes(containerd: &Daemon) -> Result<Vec<PodSandbox>> {
    let socket = socket_of(containerd);
    match unless_it_starts(|| query(&socket, async |cri| cri.sandboxes().await)) {
        Err(error) if is_unimplemented(&error) => Ok(Vec::new()),
        answer => answer,
    }
}

/// The first process of a sandbox.
pub fn pid_of_sandbox(containerd: &Daemon, sandbox: &str) -> Result<i32> {
    let socket = socket_of(containerd);
    let info = unless_it_starts(|| info_of_sandbox(&socket, sandbox))?;
    let pid = info["pid"].as_i64().context("the info has no pid")?;
    i32::try_from(pid).context("the pid is too large")
}

/// The runtime's own facts about a sandbox.
pub fn info_of_sandbox(socket: &Path, sandbox: &str) -> Result<Value> {
    let info = query(socket, async |cri| cri.sandbox_info(sandbox).await)?;
    serde_json::from_str(&info).context("read the answer's info as JSON")
}

/// Repeats the call while containerd starts.
fn unless_it_starts<A>(call: impl Fn() -> Result<A>) -> Result<A> {
    let start = Instant::now();
    loop {
        match call() {
            Err(error) if is_starting(&error) && start.elapsed() < START_LIMIT => {
                thread::sleep(PAUSE)
            }
            answer => return answer,
        }
    }
}

/// A restart takes the socket away for a moment.
fn is_starting(error: &Error) -> bool {
    error
        .downcast_ref::<CriError>()
        .is_some_and(|error| error.is_starting() || matches!(error, CriError::Connect(_)))
}

/// The socket from containerd's arguments, from its file, or the default socket.
pub fn socket_of(containerd: &Daemon) -> PathBuf {
    let of_file = || {
        let config = containerd.config();
        let text = read_text(config.as_deref().unwrap_or(Path::new(CONFIG)));
        address_in(&text.ok()??)
    };
    containerd
        .address()
        .or_else(of_file)
        .unwrap_or_else(|| Path::new(SOCKET).to_owned())
}

/// The address in containerd's file: in the section of version 4, or of older versions.
fn address_in(text: &str) -> Option<PathBuf> {
    let file: toml::Table = toml::from_str(text).ok()?;
    let server = file
        .get("plugins")
        .and_then(|plugins| plugins.get("io.containerd.server.v1.grpc"));
    Some(PathBuf::from(
        server
            .or_else(|| file.get("grpc"))?
            .get("address")?
            .as_str()?,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pod that removes bindguard restarts containerd, and then looks for its own sandbox.
    #[test]
    fn a_containerd_without_a_socket_may_start() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("containerd.sock");
        let called = || query(&socket, async |cri| cri.sandboxes().await);
        assert!(is_starting(&called().unwrap_err()));
        // As after a kill: the socket has no server.
        drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
        assert!(is_starting(&called().unwrap_err()));
    }

    #[test]
    fn the_address_is_found_in_every_version_of_the_file() {
        let old = "version = 3\n[grpc]\naddress = '/run/a.sock'\n";
        let new =
            "version = 4\n[plugins.'io.containerd.server.v1.grpc']\naddress = '/run/a.sock'\n";
        assert_eq!(
            [old, new].map(address_in),
            [(); 2].map(|()| Some(PathBuf::from("/run/a.sock")))
        );
        assert_eq!(address_in("version = 4\n"), None);
    }
}
