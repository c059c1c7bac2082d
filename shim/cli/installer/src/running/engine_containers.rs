//! The containers that have bindguard's name in the database of Docker or Podman. An engine looks
//! the name up at each start, exec, stop and kill of such a container.
//!
//! | engine | database |
//! |---|---|
//! | Docker | `containers/ID/hostconfig.json` below its data root, which only a running dockerd knows |
//! | Podman | queried through its command line; containers of users without root are not in it |

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use bindguard_core::program_names::RUNTIME;
use bindguard_operator::root_program::{RootProgram, output_of};
use serde::Deserialize;

use super::{DOCKER, Daemon, docker_info};
use crate::change;

/// dockerd creates this folder at its start, with a folder for each container.
const CONTAINERS: &str = "containers";
/// The length of an id in Docker's own output.
const SHORT_ID: usize = 12;

#[derive(Deserialize)]
struct HostConfig {
    #[serde(default, rename = "Runtime")]
    runtime: String,
}

#[derive(Deserialize)]
struct ContainerConfig {
    #[serde(rename = "Name")]
    name: String,
}

/// The data root that the running dockerd uses; `None` if no dockerd runs.
///
/// # Errors
/// If dockerd does not name it.
pub fn docker_root() -> Result<Option<PathBuf>> {
    if Daemon::named(DOCKER).is_empty() {
        return Ok(None);
    }
    let info = docker_info()?;
    let root = info["DockerRootDir"].as_str();
    let root = root.context("read dockerd's answer: it names no data root")?;
    Ok(Some(root.into()))
}

/// The names of Docker's containers with the runtime `bindguard`. Without dockerd: `recorded` is the
/// data root that a running dockerd named earlier, `usual` is that of a dockerd which never ran.
///
/// # Errors
/// If they are not known, or if the running dockerd still gives the name to new containers.
pub fn docker_containers(recorded: Option<&Path>, usual: &Path) -> Result<Vec<String>> {
    if Daemon::named(DOCKER).is_empty() {
        let Some(root) = recorded else {
            let never_ran = fs::symlink_metadata(usual.join(CONTAINERS))
                .is_err_and(|error| error.kind() == ErrorKind::NotFound);
            return if never_ran {
                Ok(Vec::new())
            } else {
                containers_below(usual)
            };
        };
        return containers_below(root);
    }
    let info = docker_info()?;
    // a container that is made after the database was read is not in the answer
    ensure!(
        info["DefaultRuntime"] != RUNTIME,
        "dockerd gives the name to each new container until it is restarted"
    );
    let root = info["DockerRootDir"].as_str();
    containers_below(Path::new(
        root.context("read dockerd's answer: it names no data root")?,
    ))
}

fn containers_below(root: &Path) -> Result<Vec<String>> {
    let folder = root.join(CONTAINERS);
    let doing = || format!("list Docker's containers in {}", folder.display());
    let mut names = Vec::new();
    for entry in fs::read_dir(&folder).with_context(doing)? {
        let entry = entry.with_context(doing)?;
        if !entry.file_type().with_context(doing)?.is_dir() {
            continue;
        }
        let file = entry.path().join("hostconfig.json");
        // without this file, dockerd uses its default runtime
        let Some(bytes) = change::read(&file)? else {
            continue;
        };
        let config: HostConfig =
            serde_json::from_slice(&bytes).with_context(|| format!("parse {}", file.display()))?;
        if config.runtime == RUNTIME {
            names.push(name_of(&entry.path()));
        }
    }
    names.sort();
    Ok(names)
}

fn name_of(container: &Path) -> String {
    let bytes = fs::read(container.join("config.v2.json")).unwrap_or_default();
    if let Ok(config) = serde_json::from_slice::<ContainerConfig>(&bytes) {
        return config.name.trim_start_matches('/').to_owned();
    }
    let id = container.file_name().unwrap_or_default().to_string_lossy();
    id.chars().take(SHORT_ID).collect()
}

/// The names of root's Podman containers with the runtime `bindguard`.
///
/// # Errors
/// If Podman does not list them.
pub fn podman_containers() -> Result<Vec<String>> {
    let found = RootProgram::find(Path::new("podman"), None)?;
    let podman = found.context("find podman: it is not on PATH")?;
    let listed = podman.output(&["ps", "--all", "--quiet", "--no-trunc"])?;
    let ids: Vec<&str> = listed.split_whitespace().collect();
    if ids.is_empty() {
        return Ok(Vec::new());
    }
    let format = "{{.OCIRuntime}} {{.Name}}";
    let mut inspect = podman.command();
    inspect.args(["container", "inspect", "--format", format]);
    inspect.args(ids);
    let inspected = output_of(inspect).context("run podman container inspect")?;
    let mut names = Vec::new();
    for line in inspected.lines() {
        if let Some((RUNTIME, name)) = line.split_once(' ') {
            names.push(name.to_owned());
        }
    }
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::*;

    #[test]
    fn an_entry_that_is_not_understood_is_an_error() {
        let root = tempfile::tempdir().unwrap();
        assert!(containers_below(root.path()).is_err(), "an unmounted disk");
        let write = |id: &str, file: &str, text: &str| {
            let folder = root.path().join("containers").join(id);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join(file), text).unwrap();
        };
        write("a", "hostconfig.json", "{\"Runtime\":\"bindguard\"}");
        write("a", "config.v2.json", "{\"Name\":\"/web\"}");
        write(
            "0123456789abcdef",
            "hostconfig.json",
            "{\"Runtime\":\"bindguard\"}",
        );
        write("b", "hostconfig.json", "{\"Runtime\":\"runc\"}");
        write("c", "hostconfig.json", "{}");
        write("d", "config.v2.json", "{\"Name\":\"/removed\"}");
        assert_eq!(
            containers_below(root.path()).unwrap(),
            ["0123456789ab", "web"]
        );
        write("b", "hostconfig.json", "{\"Runtime\":");
        assert!(containers_below(root.path()).is_err());
    }
}
