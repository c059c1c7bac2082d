//! The runtimes that an install configures. Each file owns the plan, the removal and the restart of
//! its runtime.

mod agent;
mod containerd;
mod docker;
mod drop_ins;

use std::path::{Component, Path, PathBuf};

use anyhow::{Result, ensure};
use bindguard_config::DEFAULT_PATH;

use crate::change::{self, Change, Content, Plan};
use crate::options::{InstallOptions, Owner};
use crate::programs::CURRENT;
use crate::record::{Record, text_of};
use crate::runtimes::drop_ins::{CRIO, PODMAN};

pub use self::agent::{RELOAD_UNITS, has_agent_unit};
pub use self::containerd::sandbox_image;
pub use self::docker::data_root as docker_root;

/// The record of the node's installation.
///
/// # Errors
/// If the record cannot be read, or is not root's.
pub fn recorded() -> Result<Record> {
    Record::load(may_write)
}

/// Plans the changes for a runtime.
pub fn plan(owner: Owner, options: &InstallOptions, record: &Record) -> Result<Plan> {
    let mut plan = match owner {
        Owner::Containerd => containerd::plan(options, record)?,
        Owner::Docker => docker::plan(options, record)?,
        Owner::Podman => drop_ins::plan_podman(options)?,
        Owner::Crio => drop_ins::plan_crio(options)?,
        Owner::Agent => agent::plan(options)?,
        Owner::Bindguard => Plan::default(),
    };
    for change in &mut plan.changes {
        change.command.clone_from(&plan.command);
    }
    Ok(plan)
}

/// The edits after which a runtime's default starts containers, once these changes have removed
/// bindguard from its files.
///
/// # Errors
/// If no edit gives the runtime such a default: then the changes must not be made.
pub fn default_after_removal(owner: Owner, changes: &[Change], record: &Record) -> Result<Plan> {
    match owner {
        Owner::Containerd => containerd::default_after_removal(record),
        Owner::Docker => docker::default_after_removal(changes),
        Owner::Podman => drop_ins::default_after_removal(&PODMAN, changes),
        Owner::Crio => drop_ins::default_after_removal(&CRIO, changes),
        Owner::Agent | Owner::Bindguard => Ok(Plan::default()),
    }
}

/// The files that runtimes read. `true`: an installation may have put an entry into the file.
pub fn files(record: &Record) -> Vec<(Owner, PathBuf, bool)> {
    let installed = record.verified(Owner::Containerd);
    let named = installed.and_then(|installed| installed.options.containerd_config.as_deref());
    let mut files = Vec::new();
    for (path, is_edited) in containerd::files(named) {
        files.push((Owner::Containerd, path, is_edited));
    }
    files.push((Owner::Docker, docker::CONFIG.into(), true));
    for engine in [PODMAN, CRIO] {
        for path in engine.files() {
            let is_own = path == Path::new(engine.drop_in);
            files.push((engine.owner, path, is_own));
        }
    }
    files
}

/// The removal of entries that are bindguard's by their content, from files of which there is no
/// record. A file that cannot be read as the runtime's has no entry.
pub fn unrecorded(record: &Record) -> Vec<Change> {
    let mut changes = Vec::new();
    for (owner, path, is_edited) in files(record) {
        let path = change::resolved(&path);
        if !is_edited || record.entry(&path).is_some() {
            continue;
        }
        let Ok(Some(present)) = change::content(&path) else {
            continue;
        };
        let Ok(after) = without_bindguard(owner, &path, &present, record) else {
            continue;
        };
        if after.as_ref() == Some(&present) {
            continue;
        }
        let Ok(mut change) = Change::to(owner, path, after) else {
            continue;
        };
        let installed = match owner {
            Owner::Containerd => containerd::restart_command(),
            Owner::Crio => CRIO.restart.map(str::to_owned),
            Owner::Docker | Owner::Podman | Owner::Agent | Owner::Bindguard => None,
        };
        change.command = removal_command(owner, installed.as_deref(), present.bytes());
        changes.push(change);
    }
    changes
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
        Owner::Podman => drop_ins::cleaned_podman,
        Owner::Crio => drop_ins::cleaned_crio,
        // bindguard's own files stay as they were edited
        Owner::Agent | Owner::Bindguard => |text, _| Ok(text.to_owned()),
    };
    record.content_without(path, present, |text, original| {
        cleaned(text, original.unwrap_or_default())
    })
}

/// Records a change, then makes it. Uninstall restores the content from before the *first* install.
/// If the file was edited since then, uninstall restores the edited file without bindguard in it.
pub fn put(record: &mut Record, change: &Change) -> Result<()> {
    let (owner, path) = (change.owner, &change.path);
    ensure!(
        may_write(owner, path),
        "{} {}: `uninstall` would refuse to write such a file for {}; a file of containerd needs a name that ends in .toml",
        change.word(),
        path.display(),
        owner.name()
    );
    let original = match &change.before {
        Some(before) => without_bindguard(owner, path, before, record)?,
        None => None,
    };
    let is_new = record.entry(path).is_none();
    record.note(change, original.as_ref())?;
    record.owe(owner, change.command.as_deref())?;
    let mut change = change.clone();
    if change.after == original {
        // a restored file also gets its former modification time
        let entry = record.entry(&change.path);
        change.former = entry.and_then(|entry| entry.attributes.clone());
    }
    let applied = change.apply();
    let is_gone = applied.is_ok() && change.after.is_none();
    if is_gone || applied.is_err() && is_new {
        record.forget(&change.path)?;
    }
    applied
}

/// True if an install can write this file. No installer wrote a record that names another file. A link
/// of a known name may lead to any file.
fn may_write(owner: Owner, path: &Path) -> bool {
    let is = |known: &str| path == Path::new(known) || path == change::resolved(Path::new(known));
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let mut parts = path.components();
    if !path.is_absolute() || parts.any(|part| part == Component::ParentDir) {
        return false;
    }
    let is_conf_in = |folder: &str| path.starts_with(folder) && name.ends_with(".conf");
    match owner {
        Owner::Containerd => name.ends_with(".toml") || containerd::is_read(path),
        Owner::Docker => is(docker::CONFIG),
        Owner::Podman => is(PODMAN.drop_in) || is_conf_in("/etc/containers"),
        Owner::Crio => is(CRIO.drop_in) || is_conf_in("/etc/crio"),
        Owner::Agent => name == agent::UNIT_NAME && path.starts_with("/etc/systemd/system"),
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
        Owner::Podman => drop_ins::with_name_only,
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
    let command = match owner {
        Owner::Docker => {
            let text = text_of(before.unwrap_or_default());
            let is_needed = text.and_then(docker::needs_restart).unwrap_or(true);
            is_needed.then_some(docker::RESTART)
        }
        Owner::Agent => Some(agent::STOP),
        Owner::Containerd | Owner::Crio | Owner::Podman | Owner::Bindguard => installed,
    };
    command.map(str::to_owned)
}
