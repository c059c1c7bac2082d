//! The runtimes that an install configures. Each file owns the plan, the removal and the restart of
//! its runtime.

pub mod agent;
mod containerd;
mod crio;
mod docker;
mod podman;
mod runtime_drop_in;

use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow};

use self::runtime_drop_in::HEADING;
use super::change::{self, Change};
use super::owner::Owner;
use super::plan::{InstallOptions, PlannedChange, TargetPlan};
use super::record::{Installed, Record};

/// Plans the changes for a runtime.
pub fn plan(owner: Owner, options: &InstallOptions, record: &Record) -> Result<TargetPlan> {
    match owner {
        Owner::Containerd => containerd::plan(options, record),
        Owner::Docker => docker::plan(options, record),
        Owner::Podman => podman::plan(options),
        Owner::Crio => crio::plan(options),
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

/// The installation that a plan has made.
pub fn installed(
    owner: Owner,
    options: &InstallOptions,
    (notes, needs_runtime): (Vec<String>, Option<PathBuf>),
    record: &Record,
) -> Result<Installed> {
    Ok(Installed {
        owner,
        options: options.clone(),
        inputs: inputs_now(owner, options, record)?.unwrap_or_default(),
        notes,
        needs_runtime,
    })
}

/// The removal of entries that are bindguard's by their content, from files of which there is no
/// record.
pub fn unrecorded(record: &Record) -> Vec<PlannedChange> {
    let containerd = containerd::files()
        .into_iter()
        .map(|path| (Owner::Containerd, path));
    let others = [
        (Owner::Docker, docker::CONFIG),
        (Owner::Podman, podman::DROP_IN),
        (Owner::Crio, crio::DROP_IN),
    ];
    let others = others
        .into_iter()
        .map(|(owner, path)| (owner, PathBuf::from(path)));
    let lost = containerd
        .chain(others)
        .filter(|(_, path)| record.entry(&change::resolved(path)).is_none());
    lost.filter_map(|(owner, path)| without_entries(owner, &path))
        .collect()
}

/// `None` if the file has no entry of bindguard's, or cannot be read as the runtime's.
fn without_entries(owner: Owner, path: &Path) -> Option<PlannedChange> {
    let present = change::read(path).ok()??;
    let is_own = present.starts_with(HEADING.as_bytes());
    let after = if is_own {
        None
    } else {
        Some(cleaned(owner, &present, None).ok()?)
    };
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
        command: removal_command(owner, installed.as_deref()),
    })
}

/// The content of an edited file without bindguard. bindguard's own files stay as they were edited.
pub fn cleaned(owner: Owner, bytes: &[u8], original: Option<&[u8]>) -> Result<Vec<u8>> {
    let text =
        |bytes: &[u8]| String::from_utf8(bytes.to_vec()).map_err(|_| anyhow!("it is not text"));
    let cleaned = match owner {
        Owner::Containerd => containerd::cleaned,
        Owner::Docker => docker::cleaned,
        Owner::Podman => podman::cleaned,
        Owner::Crio => crio::cleaned,
        Owner::Agent | Owner::Bindguard => return Ok(bytes.to_vec()),
    };
    Ok(cleaned(&text(bytes)?, &text(original.unwrap_or_default())?)?.into_bytes())
}

/// The command that activates the removal from a file. `installed` is the command of the install.
pub fn removal_command(owner: Owner, installed: Option<&str>) -> Option<String> {
    match owner {
        Owner::Docker => Some(docker::RESTART.to_owned()),
        Owner::Agent => Some(agent::STOP.to_owned()),
        Owner::Containerd | Owner::Crio | Owner::Podman | Owner::Bindguard => {
            installed.map(str::to_owned)
        }
    }
}
