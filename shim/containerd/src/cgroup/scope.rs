//! Stops the scope of a container whose create was interrupted.
//!
//! systemd ends a scope with its last process. A runtime that is killed while systemd starts the
//! scope can leave an empty scope that systemd does not end. The cgroup stays, and the next create
//! with this name fails. Only an empty scope is stopped.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use bindguard_core::error_chain;

use super::hierarchies::hierarchies;
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
        let occupied = cgroups
            .iter()
            .map(|cgroup| is_empty(cgroup))
            .find(|empty| !matches!(empty, Ok(true)));
        if let Some(Err(error)) = &occupied {
            tracing::warn!(
                unit = self.unit,
                error = error_chain(error),
                "a scope stays"
            );
        }
        if occupied.is_none() {
            tracing::debug!(
                unit = self.unit,
                "stopping the scope that a killed runtime left"
            );
            if let Err(error) = run_blocking(move || stop(&self.unit)).await {
                tracing::warn!(%error, "an empty scope stays: run systemctl");
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

/// A cgroup whose processes are not known.
#[derive(Debug, thiserror::Error)]
#[error("read {}", path.display())]
struct UnreadCgroup {
    path: PathBuf,
    source: io::Error,
}

/// True if the cgroup and its descendants have no process, or are gone. A cgroup that cannot be
/// read may have processes.
fn is_empty(cgroup: &Path) -> Result<bool, UnreadCgroup> {
    let unread = |path: &Path, source| {
        Err(UnreadCgroup {
            path: path.to_owned(),
            source,
        })
    };
    let processes = cgroup.join("cgroup.procs");
    match fs::read_to_string(&processes) {
        Ok(pids) if !pids.is_empty() => return Ok(false),
        Ok(_) => {}
        Err(error) if is_gone(&error) => return Ok(true),
        Err(error) => return unread(&processes, error),
    }
    let below = match fs::read_dir(cgroup) {
        Ok(below) => below,
        Err(error) if is_gone(&error) => return Ok(true),
        Err(error) => return unread(cgroup, error),
    };
    for entry in below {
        let entry = match entry {
            Ok(entry) => entry,
            Err(error) => return unread(cgroup, error),
        };
        let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
        if is_folder && !is_empty(&entry.path())? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// A cgroup that is removed while its file is open answers ENODEV.
fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(nix::libc::ENODEV)
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

    #[test]
    fn a_process_in_it_or_below_keeps_a_scope() {
        let dir = tempfile::tempdir().unwrap();
        let below = dir.path().join("app");
        fs::create_dir(&below).unwrap();
        fs::write(dir.path().join("cgroup.procs"), "").unwrap();
        fs::write(below.join("cgroup.procs"), "").unwrap();
        assert!(is_empty(dir.path()).unwrap() && is_empty(Path::new("/no/such/cgroup")).unwrap());
        fs::write(below.join("cgroup.procs"), "7\n").unwrap();
        assert!(!is_empty(dir.path()).unwrap());
    }

    /// EOPNOTSUPP of a threaded cgroup, EIO of a failing read: the file is there, and its content
    /// is not known.
    #[test]
    fn an_unreadable_cgroup_is_not_an_empty_one() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("cgroup.procs")).unwrap();
        assert!(is_empty(dir.path()).is_err());
    }
}
