//! The runtimes that an install configures. Each file owns the plan, the removal and the restart of
//! its runtime.

pub mod agent;
mod containerd;
mod crio;
mod docker;
mod podman;
mod runtime_drop_in;

use std::path::{Component, Path, PathBuf};

use anyhow::{Result, ensure};
use bindguard_config::DEFAULT_PATH;

use crate::change::{self, Change, Content, NewAttributes};
use crate::options::{Healing, InstallOptions, Owner, PlannedChange, TargetPlan};
use crate::programs::CURRENT;
use crate::record::{Record, text_of};

pub use self::containerd::sandbox_image;
pub use self::docker::data_root as docker_root;

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

/// The files that runtimes read. `true`: an installation may have put an entry into the file.
pub fn files(record: &Record) -> Vec<(Owner, PathBuf, bool)> {
    let installed = record.verified(Owner::Containerd);
    let named = installed.and_then(|installed| installed.options.containerd_config.as_deref());
    let mut files = Vec::new();
    let (edited, templates) = containerd::files(named);
    for path in edited {
        files.push((Owner::Containerd, path, true));
    }
    for path in templates {
        files.push((Owner::Containerd, path, false));
    }
    files.push((Owner::Docker, docker::CONFIG.into(), true));
    for path in podman::files() {
        let is_own = path == Path::new(podman::DROP_IN);
        files.push((Owner::Podman, path, is_own));
    }
    for path in crio::files() {
        let is_own = path == Path::new(crio::DROP_IN);
        files.push((Owner::Crio, path, is_own));
    }
    files
}

/// The removal of entries that are bindguard's by their content, from files of which there is no
/// record.
pub fn unrecorded(record: &Record) -> Vec<PlannedChange> {
    let mut steps = Vec::new();
    for (owner, path, is_edited) in files(record) {
        let path = change::resolved(&path);
        if is_edited && record.entry(&path).is_none() {
            steps.extend(without_entries(owner, &path, record));
        }
    }
    steps
}

/// `None` if the file has no entry of bindguard's, or cannot be read as the runtime's.
fn without_entries(owner: Owner, path: &Path, record: &Record) -> Option<PlannedChange> {
    let present = change::content(path).ok()??;
    let after = without_bindguard(owner, path, &present, record).ok()?;
    if after.as_ref() == Some(&present) {
        return None;
    }
    let after = after.as_ref().and_then(Content::bytes);
    let change = Change::of(path, after.map(<[u8]>::to_vec), 0o644).ok()?;
    let installed = match owner {
        Owner::Containerd => containerd::restart_command(),
        Owner::Crio => Some(crio::RESTART.to_owned()),
        Owner::Docker | Owner::Podman | Owner::Agent | Owner::Bindguard => None,
    };
    Some(PlannedChange {
        owner,
        change,
        command: removal_command(owner, installed.as_deref(), present.bytes()),
    })
}

/// The content that a removal leaves at a path: see [`Record::content_without`].
pub fn without_bindguard(
    owner: Owner,
    path: &Path,
    present: &Content,
    record: &Record,
) -> Result<Option<Content>> {
    let cleaned: fn(&str, &str) -> Result<String> = match owner {
        Owner::Containerd => return containerd::without_bindguard(path, present, record),
        Owner::Docker => docker::cleaned,
        Owner::Podman => podman::cleaned,
        Owner::Crio => crio::cleaned,
        // bindguard's own files stay as they were edited
        Owner::Agent | Owner::Bindguard => |text, _| Ok(text.to_owned()),
    };
    record.content_without(path, present, |text, original| {
        cleaned(text, original.unwrap_or_default())
    })
}

/// Records a change, then makes it. Uninstall restores the content from before the *first* install.
/// If the file was edited since then, uninstall restores the edited file without bindguard in it.
pub fn put(record: &mut Record, step: &PlannedChange) -> Result<()> {
    let (owner, change) = (step.owner, &step.change);
    ensure!(
        may_write(owner, &change.path),
        "{} {}: `uninstall` would refuse to write such a file for {}; a file of containerd needs a name that ends in .toml",
        change.word(),
        change.path.display(),
        owner.name()
    );
    let original = match &change.before {
        Some(before) => without_bindguard(owner, &change.path, before, record)?,
        None => None,
    };
    let is_new = record.entry(&change.path).is_none();
    record.note(step, original.as_ref())?;
    record.owe(owner, step.command.as_deref())?;
    let former = record
        .entry(&change.path)
        .and_then(|entry| entry.attributes.clone());
    let applied = match former {
        // a restored file also gets its former modification time
        Some(former) if change.after == original => {
            let attributes = NewAttributes::Former(former);
            let change = change.clone();
            Change {
                attributes,
                ..change
            }
            .apply()
        }
        _ => change.apply(),
    };
    let is_gone = applied.is_ok() && change.after.is_none();
    if is_gone || applied.is_err() && is_new {
        record.forget(&change.path)?;
    }
    applied
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
            Owner::Containerd => name.ends_with(".toml") || containerd::is_read(path),
            Owner::Docker => is(docker::CONFIG),
            Owner::Podman => {
                is(podman::DROP_IN) || in_folder("/etc/containers") && name.ends_with(".conf")
            }
            Owner::Crio => is(crio::DROP_IN) || in_folder("/etc/crio") && name.ends_with(".conf"),
            Owner::Agent => name == agent::UNIT_NAME && in_folder("/etc/systemd/system"),
            Owner::Bindguard => is(DEFAULT_PATH) || name.contains("bindguard") || name == CURRENT,
        }
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
    let text = with_name_only(text_of(bytes)?, original, runtime)?;
    Ok(text.map(String::into_bytes))
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
            let is_needed = text.and_then(docker::needs_restart);
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
