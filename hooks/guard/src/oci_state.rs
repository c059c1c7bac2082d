//! Reads the bundle and the init process of a container from the state files of crun, runc and
//! youki.
//!
//! `status` of crun (`libcrun_container_status_s`), `state.json` of runc (`libcontainer.State`) and of
//! youki (`libcontainer::container::State`).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use bindguard_sys::unless_absent;
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

#[derive(Debug, Deserialize)]
struct YoukiState {
    pid: Option<u32>,
    bundle: PathBuf,
}

/// The bundle and the init process of a container with this state folder.
pub fn bundle_and_pid(state: &Path) -> Option<(PathBuf, u32)> {
    read_bundle_and_pid(state).ok().flatten()
}

fn read_bundle_and_pid(state: &Path) -> io::Result<Option<(PathBuf, u32)>> {
    let status = unless_absent(fs::read(state.join("status")))?.unwrap_or_default();
    let json = unless_absent(fs::read(state.join("state.json")))?.unwrap_or_default();
    let found = of_crun(&status)
        .or_else(|| of_runc(&json))
        .or_else(|| of_youki(&json));
    Ok(found.filter(|(_, pid)| *pid > 0))
}

fn of_crun(status: &[u8]) -> Option<(PathBuf, u32)> {
    let status: CrunStatus = serde_json::from_slice(status).ok()?;
    Some((status.bundle, status.pid))
}

fn of_runc(state: &[u8]) -> Option<(PathBuf, u32)> {
    let state: RuncState = serde_json::from_slice(state).ok()?;
    let bundle = state
        .config
        .labels
        .iter()
        .find_map(|label| label.strip_prefix("bundle="))?;
    Some((bundle.into(), state.init_process_pid))
}

fn of_youki(state: &[u8]) -> Option<(PathBuf, u32)> {
    let state: YoukiState = serde_json::from_slice(state).ok()?;
    Some((state.bundle, state.pid?))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::*;

    #[test]
    fn the_state_of_each_runtime_is_read() {
        for (name, state, pid) in [
            (
                "status",
                r#"{"pid":7,"bundle":"/b","rootfs":"/b/rootfs"}"#,
                7,
            ),
            (
                "state.json",
                r#"{"init_process_pid":8,"config":{"labels":["a=1","bundle=/b"]}}"#,
                8,
            ),
            (
                "state.json",
                r#"{"ociVersion":"v1.0.2","id":"c","status":"created","pid":9,"bundle":"/b"}"#,
                9,
            ),
        ] {
            let folder = tempfile::tempdir().unwrap();
            fs::write(folder.path().join(name), state).unwrap();
            assert_eq!(
                bundle_and_pid(folder.path()),
                Some(("/b".into(), pid)),
                "{state}"
            );
        }
        assert_eq!(bundle_and_pid(Path::new("/nowhere")), None);
    }
}
