//! The runtimes that an install configures. Each file owns the plan, the removal and the restart of
//! its runtime.

pub mod agent;
mod containerd;
mod crio;
mod docker;
mod podman;
mod runtime_drop_in;

use std::path::{Component, Path, PathBuf};

use anyhow::{Result, anyhow};
use bindguard_config::DEFAULT_PATH;

pub use self::containerd::sandbox_image;
pub use self::docker::data_root as docker_root;
use self::runtime_drop_in::HEADING;
use super::change::{self, Change};
use super::owner::Owner;
use super::plan::{Healing, InstallOptions, PlannedChange, TargetPlan};
use super::record::{Installed, Record};
use super::versions::CURRENT;

/// Plans the changes for a runtime.
pub fn plan(owner: Owner, options: &InstallOptions, record: &Record) -> Result<TargetPlan> {
    match owner {
        Owner::Containerd => containerd::plan(options, record),
        Owner::Docker => docker::plan(options, record),
        Owner::Podman => podman::plan(options, record),
        Owner::Crio => crio::plan(options, record),
        Owner::Agent => agent::plan(options),
        Owner::Bindguard => Ok(TargetPlan::default()),
    }
}

/// A hash of everything on which the next plan depends, where a plan is costly.
pub fn inputs_now(
    owner: Owner,
    options: &InstallOptions,
    record: &Record,
) -> Result<Option<String>> {
    match owner {
        Owner::Containerd => containerd::inputs_now(options, record).map(Some),
        Owner::Docker | Owner::Podman | Owner::Crio | Owner::Agent | Owner::Bindguard => Ok(None),
    }
}

/// The installation that was planned, and is done.
pub fn installed(planned: Installed, record: &Record) -> Result<Installed> {
    let inputs = inputs_now(planned.owner, &planned.options, record)?;
    Ok(Installed {
        inputs: inputs.unwrap_or_default(),
        ..planned
    })
}

/// The edits after which a runtime's default starts containers, once these steps have removed
/// bindguard from its files.
///
/// # Errors
/// If no edit gives the runtime such a default: then the steps must not be done.
pub fn default_after_removal(
    owner: Owner,
    steps: &[PlannedChange],
    record: &Record,
) -> Result<Healing> {
    match owner {
        Owner::Containerd => containerd::default_after_removal(record),
        Owner::Docker => docker::default_after_removal(steps),
        Owner::Podman => podman::default_after_removal(steps),
        Owner::Crio => crio::default_after_removal(steps),
        Owner::Agent | Owner::Bindguard => Ok(Healing::default()),
    }
}

/// The files that runtimes read, and in which an installation may have put entries.
pub fn files(record: &Record) -> Vec<(Owner, PathBuf)> {
    let installed = record.verified(Owner::Containerd);
    let named = installed.and_then(|installed| installed.options.containerd_config.as_deref());
    let mut files = Vec::new();
    for path in containerd::files(named) {
        files.push((Owner::Containerd, path));
    }
    files.push((Owner::Docker, docker::CONFIG.into()));
    for path in podman::files() {
        files.push((Owner::Podman, path));
    }
    for path in crio::files() {
        files.push((Owner::Crio, path));
    }
    files
}

/// The removal of entries that are bindguard's by their content, from files of which there is no
/// record.
pub fn unrecorded(record: &Record) -> Vec<PlannedChange> {
    // the other files of these folders belong to the operator
    let is_edited = |owner: Owner, path: &Path| match owner {
        Owner::Podman => [podman::DROP_IN, podman::FORMER_DROP_IN]
            .map(Path::new)
            .contains(&path),
        Owner::Crio => [crio::DROP_IN, crio::FORMER_DROP_IN]
            .map(Path::new)
            .contains(&path),
        Owner::Containerd | Owner::Docker | Owner::Agent | Owner::Bindguard => true,
    };
    let lost = files(record).into_iter().filter(|(owner, path)| {
        is_edited(*owner, path) && record.entry(&change::resolved(path)).is_none()
    });
    lost.filter_map(|(owner, path)| without_entries(owner, &path))
        .collect()
}

/// `None` if the file has no entry of bindguard's, or cannot be read as the runtime's.
fn without_entries(owner: Owner, path: &Path) -> Option<PlannedChange> {
    let present = change::read(path).ok()??;
    let after = former(owner, &present).ok()?;
    let change = Change::of(path, after, 0o644)
        .ok()
        .filter(|change| !change.is_none())?;
    let installed = match owner {
        Owner::Containerd => containerd::restart_command(),
        Owner::Crio => Some(crio::RESTART.to_owned()),
        Owner::Docker | Owner::Podman | Owner::Agent | Owner::Bindguard => None,
    };
    Some(PlannedChange {
        owner,
        change,
        command: removal_command(owner, installed.as_deref(), Some(&present)),
    })
}

/// The content without bindguard of a file that is not in the record; `None` if the whole file is
/// bindguard's.
pub fn former(owner: Owner, present: &[u8]) -> Result<Option<Vec<u8>>> {
    if present.starts_with(HEADING.as_bytes()) {
        return Ok(None);
    }
    cleaned(owner, present, None).map(Some)
}

/// True if an install can write this file. No installer wrote a record that names another file. A link
/// of a known name may lead to any file.
pub fn may_write(owner: Owner, path: &Path) -> bool {
    let is = |known: &str| path == Path::new(known) || path == change::resolved(Path::new(known));
    let in_folder = |folder: &str| path.starts_with(folder);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let is_plain = path
        .components()
        .all(|part| !matches!(part, Component::ParentDir));
    path.is_absolute()
        && is_plain
        && match owner {
            Owner::Containerd => {
                name.ends_with(".toml") || name.ends_with(".tmpl") || containerd::is_read(path)
            }
            Owner::Docker => is(docker::CONFIG),
            Owner::Podman => {
                is(podman::DROP_IN) || in_folder("/etc/containers") && name.ends_with(".conf")
            }
            Owner::Crio => is(crio::DROP_IN) || in_folder("/etc/crio") && name.ends_with(".conf"),
            Owner::Agent => name == agent::UNIT_NAME && in_folder("/etc/systemd/system"),
            Owner::Bindguard => is(DEFAULT_PATH) || name.contains("bindguard") || name == CURRENT,
        }
}

/// The content of an edited file without bindguard. bindguard's own files stay as they were edited.
pub fn cleaned(owner: Owner, bytes: &[u8], original: Option<&[u8]>) -> Result<Vec<u8>> {
    let cleaned = match owner {
        Owner::Containerd => containerd::cleaned,
        Owner::Docker => docker::cleaned,
        Owner::Podman => podman::cleaned,
        Owner::Crio => crio::cleaned,
        Owner::Agent | Owner::Bindguard => return Ok(bytes.to_vec()),
    };
    let original = text_of(original.unwrap_or_default())?;
    Ok(cleaned(&text_of(bytes)?, &original)?.into_bytes())
}

/// The content of a file in which only the runtime's name is left, as that of `runtime`. `None` if
/// the content has no entry of the name.
pub fn with_name_only(
    owner: Owner,
    bytes: &[u8],
    original: Option<&[u8]>,
    runtime: &Path,
) -> Result<Option<Vec<u8>>> {
    let with_name_only = match owner {
        Owner::Docker => docker::with_name_only,
        Owner::Podman => podman::with_name_only,
        Owner::Containerd | Owner::Crio | Owner::Agent | Owner::Bindguard => return Ok(None),
    };
    let original = text_of(original.unwrap_or_default())?;
    let text = with_name_only(&text_of(bytes)?, &original, runtime)?;
    Ok(text.map(String::into_bytes))
}

fn text_of(bytes: &[u8]) -> Result<String> {
    String::from_utf8(bytes.to_vec()).map_err(|_| anyhow!("it is not text"))
}

/// The command that activates the removal from a file with this content. `installed` is the command
/// of the install.
pub fn removal_command(
    owner: Owner,
    installed: Option<&str>,
    before: Option<&[u8]>,
) -> Option<String> {
    match owner {
        Owner::Docker => {
            let text = text_of(before.unwrap_or_default());
            let is_needed = text.and_then(|text| docker::needs_restart(&text));
            is_needed
                .unwrap_or(true)
                .then(|| docker::RESTART.to_owned())
        }
        Owner::Agent => Some(agent::STOP.to_owned()),
        Owner::Containerd | Owner::Crio | Owner::Podman | Owner::Bindguard => {
            installed.map(str::to_owned)
        }
    }
}
