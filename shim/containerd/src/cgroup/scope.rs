//! Stops the scope of a container whose create was interrupted.
//!
//! systemd ends a scope with its last process. A runtime that is killed while systemd starts the
//! scope can leave an empty scope that systemd does not end. The cgroup stays, and the next create
//! with this name fails. Only an empty scope is stopped.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use bindguard_core::error_chain;

use super::hierarchies::hierarchies;
use super::processes::processes_within;
use crate::blocking::run_blocking;
use crate::kernel;

/// Usually systemd notices within this time.
const TRIES: u32 = 25;
const PAUSE: Duration = Duration::from_millis(10);

/// runc's slice for a path without a slice.
const USUAL_SLICE: &str = "system.slice";

/// A scope of systemd's.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct SystemdScope {
    unit: String,
    path: PathBuf,
}

impl SystemdScope {
    /// The scope that a runtime makes for `cgroupsPath` in systemd's form, `slice:prefix:name`.
    pub(super) fn of(cgroups_path: &str) -> Option<Self> {
        let parts: Vec<&str> = cgroups_path.split(':').collect();
        let [slice, prefix, name] = parts[..] else {
            return None;
        };
        let is_plain = |text: &str| !text.contains('/') && !text.is_empty();
        if !is_plain(prefix) || !is_plain(name) || name.ends_with(".slice") {
            return None;
        }
        let unit = format!("{prefix}-{name}.scope");
        Some(Self {
            path: path_of_slice(if slice.is_empty() { USUAL_SLICE } else { slice })?.join(&unit),
            unit,
        })
    }

    /// Its cgroup below each hierarchy.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Stops the scope if systemd leaves the empty scope in place.
    pub(super) async fn stop_if_empty(self) {
        let cgroups: Vec<PathBuf> = hierarchies()
            .iter()
            .map(|hierarchy| hierarchy.join(&self.path))
            .collect();
        for _ in 0..TRIES {
            if !cgroups.iter().any(|cgroup| fs::metadata(cgroup).is_ok()) {
                return;
            }
            tokio::time::sleep(PAUSE).await;
        }
        let unit = self.unit;
        match cgroups
            .iter()
            .flat_map(|cgroup| processes_within(cgroup))
            .next()
        {
            Some(Ok(_)) => {}
            Some(Err(error)) => {
                tracing::warn!(unit, error = error_chain(&error), "a scope stays");
            }
            None => {
                tracing::debug!(unit, "stopping the scope that a killed runtime left");
                if let Err(error) = run_blocking(move || stop(&unit)).await {
                    tracing::warn!(%error, "an empty scope stays: run systemctl");
                }
            }
        }
    }
}

/// `a-b.slice` lies in `a.slice`: systemd.slice(5).
fn path_of_slice(slice: &str) -> Option<PathBuf> {
    let name = slice
        .strip_suffix(".slice")
        .filter(|name| !name.contains('/'))?;
    // `-.slice` is the root.
    if name == "-" {
        return Some(PathBuf::new());
    }
    let mut path = PathBuf::new();
    for (end, _) in name.match_indices('-').chain([(name.len(), "")]) {
        let parent = name
            .get(..end)
            .filter(|parent| !parent.is_empty() && !parent.ends_with('-'))?;
        path.push(format!("{parent}.slice"));
    }
    Some(path)
}

fn stop(unit: &str) {
    let mut command = Command::new("systemctl");
    command.args(["stop", "--no-block", "--quiet", "--", unit]);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    kernel::with_default_signals(&mut command);
    match command.status() {
        Ok(status) if status.success() => {}
        Ok(status) => tracing::warn!(unit, %status, "an empty scope stays: systemctl stop failed"),
        Err(error) => tracing::warn!(unit, %error, "an empty scope stays: run systemctl"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scope(unit: &str, path: &str) -> Option<SystemdScope> {
        Some(SystemdScope {
            unit: unit.to_owned(),
            path: path.into(),
        })
    }

    #[test]
    fn a_path_in_systemds_form_names_a_scope_in_its_slices() {
        assert_eq!(
            SystemdScope::of(":cri:web"),
            scope("cri-web.scope", "system.slice/cri-web.scope")
        );
        assert_eq!(
            SystemdScope::of("kubepods-burstable-pod1_2.slice:cri-containerd:7"),
            scope(
                "cri-containerd-7.scope",
                "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1_2.slice/cri-containerd-7.scope"
            )
        );
        assert_eq!(
            SystemdScope::of("-.slice:cri:web"),
            scope("cri-web.scope", "cri-web.scope")
        );
        for other in [
            "",
            "/kubepods/web",
            "a.slice:cri",
            "a.slice::web",
            "a.slice:cri:b.slice",
            "a/b.slice:c:d",
            "a:b:c",
        ] {
            assert_eq!(SystemdScope::of(other), None, "{other}");
        }
        for slice in [
            "a--b.slice:cri:web",
            "-a.slice:cri:web",
            "a.slice:../cri:web",
        ] {
            assert_eq!(SystemdScope::of(slice), None, "{slice}");
        }
    }
}
