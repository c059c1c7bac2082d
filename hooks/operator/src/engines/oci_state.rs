//! The state of a container as crun and runc keep it: its bundle and its init process.
//!
//! `status` of crun (`libcrun_container_status_s`) and `state.json` of runc (`libcontainer.State`).

use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

#[derive(Debug, Deserialize)]
struct CrunStatus {
    pid: u32,
    bundle: PathBuf,
}

#[derive(Debug, Deserialize)]
struct RuncState {
    init_process_pid: u32,
    config: RuncConfig,
}

#[derive(Debug, Deserialize)]
struct RuncConfig {
    labels: Vec<String>,
}

/// The bundle and the init process of a container with this state folder.
pub(super) fn bundle_and_pid(state: &Path) -> Option<(PathBuf, u32)> {
    of_crun(state)
        .or_else(|| of_runc(state))
        .filter(|(_, pid)| *pid > 0)
}

fn of_crun(state: &Path) -> Option<(PathBuf, u32)> {
    let status: CrunStatus = serde_json::from_slice(&fs::read(state.join("status")).ok()?).ok()?;
    Some((status.bundle, status.pid))
}

fn of_runc(state: &Path) -> Option<(PathBuf, u32)> {
    let state: RuncState =
        serde_json::from_slice(&fs::read(state.join("state.json")).ok()?).ok()?;
    let bundle = state
        .config
        .labels
        .iter()
        .find_map(|label| label.strip_prefix("bundle="))?;
    Some((bundle.into(), state.init_process_pid))
}
