//! The name `bindguard` in the files of Docker and Podman, which outlives the programs.
//!
//! Both engines record the name of a container's runtime and look the name up at each start, exec,
//! stop and kill. So a removal first makes the name that of the real runtime: the runtime that
//! bindguard-runtime called made the containers, and their state lies with it.
//!
//! | engine | the name goes |
//! |---|---|
//! | Docker | when no container has it, and the running dockerd gives it to no new container |
//! | Podman | on request: only users without root can list their own containers |

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use bindguard_config::{DEFAULT_PATH, KEPT_PATH, Loaded};
use bindguard_core::program_names::RUNTIME;

use crate::change::{self, Change, Content, name, stays};
use crate::options::CommonOptions;
use crate::owner::Owner;
use crate::plan::{PlannedChange, USUAL_RUNTIME};
use crate::put::put;
use crate::record::{Entry, Record};
use crate::removal::counted;
use crate::report::InstallReport;
use crate::running::{docker_containers, docker_root, podman_containers};
use crate::settings::RUNTIME_KEY;
use crate::{runtimes, search_path};

/// bindguard's name in the file of Docker or Podman, which containers have or may have.
#[derive(Debug)]
pub struct KeptName {
    /// The engine.
    pub owner: Owner,
    path: PathBuf,
    /// The containers, or why they are not known.
    containers: Result<Vec<String>>,
}

impl KeptName {
    /// The name in this file of an engine; `None` for other runtimes.
    ///
    /// # Errors
    /// If the record cannot be written.
    pub fn of(
        owner: Owner,
        path: &Path,
        record: &mut Record,
        common: &CommonOptions,
    ) -> Result<Option<Self>> {
        let containers = match owner {
            Owner::Docker => {
                remember_docker_root(record, common)?;
                docker_containers(record.docker_root(), &runtimes::docker_root())
            }
            // Podman is a program of the image, or of the node
            Owner::Podman if common.root.is_some() => {
                Err(anyhow!("with --root, Podman's containers are not listed"))
            }
            Owner::Podman => podman_containers(),
            Owner::Containerd | Owner::Crio | Owner::Agent | Owner::Bindguard => return Ok(None),
        };
        Ok(Some(Self {
            owner,
            path: path.to_owned(),
            containers,
        }))
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// True if no container has the name. Podman's list is never complete.
    pub fn can_go(&self) -> bool {
        self.owner == Owner::Docker && self.containers.as_ref().is_ok_and(Vec::is_empty)
    }

    /// The step after which the name is that of the real runtime. `None` if the file does not have
    /// the name.
    ///
    /// # Errors
    /// If the file cannot be edited.
    pub fn without_programs(
        &self,
        original: Option<&[u8]>,
        record: &Record,
    ) -> Result<Option<PlannedChange>> {
        let Some(before) = change::read(&self.path)? else {
            return Ok(None);
        };
        let runtime = runtime_of_containers(self.owner, record);
        let after = runtimes::with_name_only(self.owner, &before, original, &runtime);
        let Some(after) = after.with_context(|| format!("edit {}", name(&self.path)))? else {
            return Ok(None);
        };
        let change = Change::of(&self.path, Some(after), 0o644)?;
        let command = runtimes::removal_command(self.owner, None, Some(&before));
        Ok(Some(PlannedChange {
            owner: self.owner,
            command: command.filter(|_| !change.is_none()),
            change,
        }))
    }

    /// Reports that the name stays, and for which containers.
    pub fn report(&self, report: &mut InstallReport) {
        let stays = format!("the name {RUNTIME} stays in {}", name(&self.path));
        let rootless = "users without root";
        let known = match (self.owner, &self.containers) {
            (_, Err(error)) => format!("{stays}: {error:#}"),
            (Owner::Podman, Ok(containers)) if containers.is_empty() => format!(
                "{stays}: {rootless} may have containers of this runtime, and only they can list them"
            ),
            (Owner::Podman, Ok(containers)) => format!(
                "{stays} for {} of root's, and for those of {rootless}, which only they can list",
                counted(containers, "container")
            ),
            (_, Ok(containers)) => format!(
                "{stays} for {}, which Docker could not start or stop without the name",
                counted(containers, "container")
            ),
        };
        let advice = if self.owner == Owner::Podman {
            "when no container has the name, run bindguard uninstall --forget-name, or delete the file"
        } else {
            "when no container has the name, run bindguard uninstall again, or remove the name from the file"
        };
        let note = format!("{known}; {advice}");
        if report.waits_for_a_restart() {
            report.unfinished(note);
        } else {
            report.name_kept(note);
        }
    }

    fn report_forgotten(&self, report: &mut InstallReport) {
        let advice = "remove and create such containers again";
        match &self.containers {
            Ok(containers) if containers.is_empty() => {}
            Ok(containers) => report.note(format!(
                "the runtime {RUNTIME} of {} is gone; {advice}",
                counted(containers, "container")
            )),
            Err(error) => report.note(format!(
                "the runtime {RUNTIME} is gone, and containers may have it: {error:#}; {advice}"
            )),
        }
    }
}

/// The names that stay in these files, each with the step that removes the programs from the file.
/// `unread` gets the files that stay because they cannot be edited.
/// With `forgets` no name stays, and the report has the containers.
pub fn kept_names(
    entries: &[Entry],
    forgets: bool,
    record: &mut Record,
    report: &mut InstallReport,
    common: &CommonOptions,
    unread: &mut Vec<PathBuf>,
) -> Result<Vec<(KeptName, PlannedChange)>> {
    let mut kept = Vec::new();
    for entry in entries {
        let Some(found) = KeptName::of(entry.owner, &entry.path, record, common)? else {
            continue;
        };
        if forgets {
            found.report_forgotten(report);
            continue;
        }
        let step = entry.original().and_then(|original| {
            let original = original.as_ref().and_then(Content::bytes);
            found.without_programs(original, record)
        });
        match step {
            Ok(Some(step)) if !found.can_go() => kept.push((found, step)),
            Ok(_) => {}
            Err(error) => {
                report.unfinished(stays(&entry.path, &error));
                unread.push(entry.path.clone());
            }
        }
    }
    Ok(kept)
}

/// Makes a kept name that of the real runtime.
pub fn keep(
    step: &PlannedChange,
    record: &mut Record,
    report: &mut InstallReport,
    common: &CommonOptions,
) -> Result<()> {
    report.command(step.command.as_deref());
    if common.dry_run {
        return Ok(());
    }
    record.forget_installation(step.owner)?;
    put(record, step)
}

/// Records the data root of a running dockerd: nothing else names the data root once dockerd has
/// ended.
///
/// # Errors
/// If the record cannot be written.
pub fn remember_docker_root(record: &mut Record, common: &CommonOptions) -> Result<()> {
    if common.dry_run || !record.has_files_of(Owner::Docker) {
        return Ok(());
    }
    match docker_root() {
        Ok(Some(root)) => record.set_docker_root(root),
        Ok(None) | Err(_) => Ok(()),
    }
}

/// The runtime that bindguard-runtime called. The engines do not hand on an environment that names
/// another config.
fn runtime_of_containers(owner: Owner, record: &Record) -> PathBuf {
    let loaded = Loaded::from_file(Path::new(DEFAULT_PATH));
    let loaded = loaded.or_else(|_| Loaded::from_file(Path::new(KEPT_PATH)));
    let named = loaded.ok().filter(|it| it.set.contains(&RUNTIME_KEY));
    let installed = record.verified(owner);
    let runtime = match named {
        Some(loaded) => Some(loaded.config.runtime().to_owned()),
        None => installed.and_then(|installed| installed.needs_runtime.clone()),
    };
    let runtime = runtime.unwrap_or_else(|| USUAL_RUNTIME.into());
    search_path::find(&runtime).unwrap_or(runtime)
}
