//! The runtimes that an install configures. Each file owns the plan, the removal and the restart of
//! its runtime.

mod containerd;
mod engines;

use std::mem;
use std::path::{Component, Path, PathBuf};

use anyhow::{Result, ensure};
use bindguard_config::DEFAULT_PATH;

use crate::change::{self, Change, Content, Owner, Plan};
use crate::own_files::CURRENT;
use crate::record::{InstallOptions, Installed, Record, text_of};
use crate::running::AGENT_RESTART;
use crate::runtimes::containerd::{ContainerdLayout, unit_exists};
use crate::runtimes::engines::{
    CRIO, DOCKER, DOCKER_RESTART, ENGINES, Engine, PODMAN, docker_needs_restart,
};

pub use self::containerd::sandbox_image;
pub use self::engines::docker_data_root;

/// The record of the node's installation.
///
/// # Errors
/// If the record cannot be read, or is not root's.
pub fn recorded() -> Result<Record> {
    Record::load(may_write)
}

/// Plans an installation for a runtime.
pub fn plan(owner: Owner, options: &InstallOptions, record: &Record) -> Result<(Installed, Plan)> {
    let mut plan = match owner {
        Owner::Containerd => containerd::plan(options, record)?,
        Owner::Docker => engines::plan_docker(options, record)?,
        Owner::Podman => PODMAN.plan_drop_in(options)?,
        Owner::Crio => CRIO.plan_drop_in(options)?,
        Owner::Agent => plan_agent(options)?,
        Owner::Bindguard => Plan::default(),
    };
    for change in &mut plan.changes {
        change.command.clone_from(&plan.command);
    }
    let installed = Installed {
        owner,
        options: options.clone(),
        needs_runtime: plan.needs_runtime.take(),
        needs_programs: mem::take(&mut plan.needs_programs),
    };
    Ok((installed, plan))
}

/// The edits after which a runtime's default starts containers, once these changes have removed
/// bindguard from its files.
///
/// # Errors
/// If no edit gives the runtime such a default: then the changes must not be made.
pub fn default_after_removal(owner: Owner, changes: &[Change], record: &Record) -> Result<Plan> {
    match engine_of(owner) {
        Some(engine) => engine.default_after_removal(changes),
        None if owner == Owner::Containerd => containerd::default_after_removal(record),
        None => Ok(Plan::default()),
    }
}

fn engine_of(owner: Owner) -> Option<&'static Engine> {
    ENGINES.iter().find(|engine| engine.owner == owner)
}

/// The files that runtimes read. `true`: an installation may have put an entry into the file.
pub fn files(record: &Record) -> Vec<(Owner, PathBuf, bool)> {
    let installed = record.verified(Owner::Containerd);
    let named = installed.and_then(|installed| installed.options.containerd_config.as_deref());
    let mut files = containerd::files(named);
    for engine in &ENGINES {
        for path in engine.files() {
            let is_own = path == Path::new(engine.file);
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
        if let Ok(mut change) = Change::to(owner, path, None)
            && let Some(present) = &change.before
            && let Ok(after) = without_bindguard(owner, &change.path, present, record)
            && after.as_ref() != Some(present)
        {
            change.after = after;
            let installed = match engine_of(owner) {
                Some(engine) => engine.restart.map(str::to_owned),
                None => ContainerdLayout::detect(None).ok().map(|it| it.restart),
            };
            change.command = removal_command(owner, installed.as_deref(), change.before.as_ref());
            changes.push(change);
        }
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
    if owner == Owner::Containerd {
        return containerd::without_bindguard(path, present, record);
    }
    let cleaned = engine_of(owner).map(|engine| {
        move |text: &str, former: Option<&str>| engine.cleaned(text, former.unwrap_or_default())
    });
    record.content_without(path, present, cleaned)
}

/// Records each change before the change is made. Uninstall restores the content from before the *first* install.
/// If the file was edited since then, uninstall restores the edited file without bindguard in it.
pub fn put(record: &mut Record, changes: &[Change]) -> Result<()> {
    for change in changes {
        let (owner, path) = (change.owner, &change.path);
        ensure!(
            may_write(owner, path),
            "{} {}: `uninstall` would refuse to write such a file for {owner}; a file of containerd needs a name that ends in .toml",
            change.word(),
            path.display(),
        );
        let original = match &change.before {
            Some(before) => without_bindguard(owner, path, before, record)?,
            None => None,
        };
        let is_new = record.entry(path).is_none();
        record.note(change, original.as_ref())?;
        record.owe(owner, change.command.as_deref())?;
        // a restored file also gets its former modification time
        let restored = record.entry(path).filter(|_| change.after == original);
        let applied = change.apply(restored.and_then(|entry| entry.attributes.as_ref()));
        let is_gone = applied.is_ok() && change.after.is_none();
        if is_gone || applied.is_err() && is_new {
            record.forget(path)?;
        }
        applied?;
    }
    Ok(())
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
        Owner::Containerd => {
            let is_read = |layout: ContainerdLayout| change::resolved(&layout.config) == path;
            name.ends_with(".toml") || ContainerdLayout::detect(None).is_ok_and(is_read)
        }
        Owner::Docker => is(DOCKER.file),
        Owner::Podman => is(PODMAN.file) || is_conf_in("/etc/containers"),
        Owner::Crio => is(CRIO.file) || is_conf_in("/etc/crio"),
        Owner::Agent => name == UNIT_NAME && path.starts_with("/etc/systemd/system"),
        Owner::Bindguard => is(DEFAULT_PATH) || name.contains("bindguard") || name == CURRENT,
    }
}

/// The content of a file in which only the runtime's name is left, as that of `runtime`. `None` if
/// the content has no entry of the name.
pub fn with_name_only(
    owner: Owner,
    present: Option<&Content>,
    original: Option<&Content>,
    runtime: &Path,
) -> Result<Option<Content>> {
    let Some(engine) = engine_of(owner) else {
        return Ok(None);
    };
    let text = engine.with_name_only(text_of(present)?, text_of(original)?, runtime)?;
    Ok(text.map(|text| Content::File(text.into_bytes())))
}

/// The command that activates the removal from a file with this content. `installed` is the command
/// of the install.
pub fn removal_command(
    owner: Owner,
    installed: Option<&str>,
    before: Option<&Content>,
) -> Option<String> {
    let command = match owner {
        Owner::Docker => {
            let is_needed = text_of(before).and_then(docker_needs_restart);
            is_needed.unwrap_or(true).then_some(DOCKER_RESTART)
        }
        Owner::Agent => Some(STOP_AGENT),
        Owner::Containerd | Owner::Crio | Owner::Podman | Owner::Bindguard => installed,
    };
    command.map(str::to_owned)
}

const UNIT: &str = include_str!("../../../../../config/systemd/bindguard-agent.service");
const UNIT_NAME: &str = "bindguard-agent.service";
const OWN_UNIT: &str = "/etc/systemd/system/bindguard-agent.service";
const ENABLED: &str = "/etc/systemd/system/multi-user.target.wants/bindguard-agent.service";
/// The units of a package.
const PACKAGED: [&str; 2] = [
    "/usr/lib/systemd/system/bindguard-agent.service",
    "/lib/systemd/system/bindguard-agent.service",
];
/// The folder of the program in the unit as it is shipped.
const SHIPPED_PREFIX: &str = "/usr/local/bin/";

/// Makes systemd read a new unit.
pub const RELOAD_UNITS: &str = "systemctl daemon-reload";
/// The command after which no process runs the agent's program.
const STOP_AGENT: &str = "systemctl stop bindguard-agent";

/// True if systemd knows a unit of the agent.
pub fn has_agent_unit() -> bool {
    unit_exists(Path::new("/"), "bindguard-agent")
}

/// Plans the unit of the agent's service, unless a package has one, and the link that starts the service
/// at boot. `systemctl enable` would make the same link. The installer makes the link, because an image
/// has no running systemd, and `uninstall` must know the link.
fn plan_agent(options: &InstallOptions) -> Result<Plan> {
    let mut plan = Plan {
        command: Some(AGENT_RESTART.to_owned()),
        ..Plan::default()
    };
    let packaged = PACKAGED.map(Path::new);
    let packaged = packaged
        .into_iter()
        .find(|unit| unit.symlink_metadata().is_ok());
    let unit = packaged.unwrap_or(Path::new(OWN_UNIT));
    if packaged.is_none() {
        let mut text =
            "# The node agent of bindguard, written by `bindguard install --agent`\n".to_owned();
        let shipped = UNIT.replace(SHIPPED_PREFIX, &format!("{}/", options.prefix.display()));
        for line in shipped.lines() {
            if !line.starts_with("# The node agent") {
                text.extend([line, "\n"]);
            }
        }
        plan.changes.push(Change::text(Owner::Agent, unit, text)?);
    }
    plan.changes
        .push(Change::link(Owner::Agent, ENABLED.into(), unit)?);
    Ok(plan)
}
