//! The active configuration of a running containerd: `config` in the answer to `Status` with
//! `verbose` of the CRI.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Error, Result};
use serde_json::Value;

use super::Daemon;
use crate::pods::cri::{GrpcStatus, is_unimplemented, query};
use crate::pods::messages::{
    ListPodSandboxResponse, ListRequest, PodSandbox, PodSandboxStatusRequest,
    PodSandboxStatusResponse,
};

const CONFIG: &str = "/etc/containerd/config.toml";
const SOCKET: &str = "/run/containerd/containerd.sock";
/// `UNKNOWN` and `UNAVAILABLE`: the answers of a CRI plugin that is not initialized yet.
const STARTING: [&str; 2] = ["2", "14"];
/// The time that a containerd has to initialize its CRI plugin after a restart.
const START_LIMIT: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(100);

/// `StatusRequest` of `k8s.io/cri-api`, v1.
#[derive(Clone, PartialEq, prost::Message)]
struct StatusRequest {
    #[prost(bool, tag = "1")]
    verbose: bool,
}

/// `StatusResponse`, without the conditions.
#[derive(Clone, PartialEq, prost::Message)]
struct StatusResponse {
    #[prost(map = "string, string", tag = "2")]
    info: HashMap<String, String>,
}

/// The configuration that this containerd read at its start. `None` if it serves no pods.
pub fn active_config(containerd: &Daemon) -> Result<Option<Value>> {
    match unless_it_starts(|| {
        query(
            &socket_of(containerd),
            "Status",
            StatusRequest { verbose: true },
        )
    }) {
        Ok(StatusResponse { info }) => {
            let config = info.get("config").context("the answer has no config")?;
            serde_json::from_str(config)
                .context("read the answer's config as JSON")
                .map(Some)
        }
        Err(error) if is_unimplemented(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Every sandbox of this containerd, also one that has ended. None if it serves no pods.
pub fn sandboxes(containerd: &Daemon) -> Result<Vec<PodSandbox>> {
    let socket = socket_of(containerd);
    let answer = unless_it_starts(|| query(&socket, "ListPodSandbox", ListRequest {}));
    match answer {
        Ok(ListPodSandboxResponse { items }) => Ok(items),
        Err(error) if is_unimplemented(&error) => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// The first process of a sandbox.
pub fn pid_of_sandbox(containerd: &Daemon, sandbox: &str) -> Result<i32> {
    let request = PodSandboxStatusRequest {
        pod_sandbox_id: sandbox.to_owned(),
        verbose: true,
    };
    let answer: PodSandboxStatusResponse =
        query(&socket_of(containerd), "PodSandboxStatus", request)?;
    let info = answer.info.get("info").context("the answer has no info")?;
    let info: Value = serde_json::from_str(info).context("read the answer's info as JSON")?;
    let pid = info["pid"].as_i64().context("the info has no pid")?;
    i32::try_from(pid).context("the pid is too large")
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

fn is_starting(error: &Error) -> bool {
    error
        .downcast_ref::<GrpcStatus>()
        .is_some_and(|status| STARTING.contains(&status.code.as_str()))
}

/// The socket of its arguments, of its file, or the default one.
fn socket_of(containerd: &Daemon) -> PathBuf {
    let of_file = || {
        let text = fs::read_to_string(
            containerd
                .config()
                .unwrap_or_else(|| Path::new(CONFIG).to_owned()),
        )
        .ok()?;
        address_in(&text)
    };
    containerd
        .address()
        .or_else(of_file)
        .unwrap_or_else(|| Path::new(SOCKET).to_owned())
}

/// The address in containerd's file: in the section of version 4, or in that of older ones.
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
