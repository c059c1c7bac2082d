//! The active configuration of a running containerd: `config` in the answer to `Status` with `verbose` of the CRI.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;

use super::Daemon;
use crate::pods::cri::{GrpcStatus, query};

const CONFIG: &str = "/etc/containerd/config.toml";
const SOCKET: &str = "/run/containerd/containerd.sock";
/// `UNIMPLEMENTED`: a containerd without the CRI plugin.
const UNIMPLEMENTED: &str = "12";

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
    let socket = socket_of(containerd);
    let answer: Result<StatusResponse> = query(&socket, "Status", StatusRequest { verbose: true });
    match answer {
        Ok(answer) => {
            let config = answer.info.get("config").context("the answer has no config")?;
            serde_json::from_str(config).context("read the answer's config as JSON").map(Some)
        }
        Err(error) if error.downcast_ref::<GrpcStatus>().is_some_and(|status| status.code == UNIMPLEMENTED) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The socket of its arguments, of its file, or the default one.
fn socket_of(containerd: &Daemon) -> PathBuf {
    let of_file = || {
        let text = fs::read_to_string(containerd.config().unwrap_or_else(|| Path::new(CONFIG).to_owned())).ok()?;
        let file: toml::Table = toml::from_str(&text).ok()?;
        Some(PathBuf::from(file.get("grpc")?.get("address")?.as_str()?))
    };
    containerd.address().or_else(of_file).unwrap_or_else(|| Path::new(SOCKET).to_owned())
}
