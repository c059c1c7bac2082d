//! Removes the cgroup of a container whose create was interrupted.
//!
//! A runtime makes the cgroup before it writes its state. A runtime that is killed in between has
//! no record of the container, and `delete` does not find the cgroup. The spec still names the
//! cgroup. rmdir(2) removes only an empty cgroup, so a cgroup with processes or child cgroups
//! stays. Of the processes, only the init of this create is ended.

use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use super::hierarchies::hierarchies;
use super::scope::SystemdScope;
use super::waiting_init::end_waiting_init;
use crate::blocking::run_blocking;

/// A process that the dead runtime forked sees the end of its pipe, and then ends.
const TRIES: u32 = 25;
const PAUSE: Duration = Duration::from_millis(10);

/// Ends the init that a killed runtime left waiting, and removes the empty cgroup that a spec names
/// by `cgroupsPath`, in every hierarchy. With a path in systemd's form it stops the scope. `state`
/// is the runtime's directory for the container.
pub(crate) async fn remove_leftover_cgroup(cgroups_path: &str, state: &Path) {
    let scope = SystemdScope::of(cgroups_path);
    let Some(path) = scope
        .as_ref()
        .map(SystemdScope::path)
        .or_else(|| below_the_root(cgroups_path))
    else {
        return;
    };
    let directories: Vec<PathBuf> = hierarchies()
        .iter()
        .map(|hierarchy| hierarchy.join(path))
        .collect();
    let (within, state) = (directories.clone(), state.to_owned());
    if let Err(error) = run_blocking(move || end_waiting_init(&within, &state)).await {
        tracing::warn!(%error, "the init of an interrupted create may stay");
    }
    match scope {
        Some(scope) => scope.stop_if_empty().await,
        None => remove_empty(&directories).await,
    }
}

async fn remove_empty(directories: &[PathBuf]) {
    for directory in directories {
        for _ in 0..TRIES {
            match fs::remove_dir(directory) {
                Ok(()) => {
                    tracing::debug!(cgroup = %directory.display(), "removed what a killed runtime left")
                }
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
                Err(_) => {}
            }
            break;
        }
    }
}

/// Only an absolute path without `..` is the same folder for the runtime and for the shim.
fn below_the_root(cgroups_path: &str) -> Option<&Path> {
    let path = Path::new(cgroups_path).strip_prefix("/").ok()?;
    let is_plain = path
        .components()
        .all(|part| matches!(part, Component::Normal(_)));
    (is_plain && path.components().next().is_some()).then_some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_paths_from_the_top() {
        assert_eq!(
            below_the_root("/kubepods/burstable/web"),
            Some(Path::new("kubepods/burstable/web"))
        );
        for other in ["", "/", "web", "system.slice:cri:web", "/kubepods/../web"] {
            assert_eq!(below_the_root(other), None, "{other}");
        }
    }
}
