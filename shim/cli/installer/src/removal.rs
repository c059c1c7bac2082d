//! The parts of an installation that stay on a node while pods or containers need them.
//!
//! | part | needed by | gone with |
//! |---|---|---|
//! | the default | no pod that exists | the first `uninstall` |
//! | the handler | containers that start in a pod of that handler | the last sandbox of the handler |
//! | the programs | containers that were created through them | the last such pod |
//! | Docker's name | containers that have the name | the last such container |
//! | Podman's name | the same, also of users without root, which only they can list | a request |
//!
//! Docker and Podman record the name of a container's runtime and look the name up at each start, exec,
//! stop and kill. So a removal first makes the name that of the real runtime: the runtime that
//! bindguard-runtime called made the containers, and their state lies with it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow};
use bindguard_config::{DEFAULT_PATH, KEPT_PATH, Loaded};
use bindguard_core::handover::{RUNTIME, SHIM};
use bindguard_operator::cri;
use bindguard_operator::terminal::print_remark;

use crate::change::{Change, Doing, Owner, Plan, stays};
use crate::own_files::{RUNTIME_KEY, beside_this_one, plan_config};
use crate::record::{Entry, Installed, Record, Removal, USUAL_RUNTIME};
use crate::running::{
    ProgramUser, docker_containers, find, podman_containers, pods_with_handler, users_of,
};
use crate::runtimes;
use crate::session::{InstallReport, Progress, Session};

/// The names that a message lists.
const MAX_NAMES: usize = 3;

/// A handler that pods still need, or may need.
#[derive(Debug)]
pub struct KeptHandler {
    /// The runtime that has it.
    pub owner: Owner,
    /// The pods, or why they are not known.
    pub pods: Result<Vec<String>>,
}

/// The runtimes' handlers that pods need. If a runtime does not answer, its handler is kept.
pub fn kept_handlers(owners: impl Iterator<Item = Owner>) -> Vec<KeptHandler> {
    let mut kept = Vec::new();
    for owner in owners.collect::<BTreeSet<Owner>>() {
        let pods = pods_with_handler(owner);
        if pods.as_ref().map_or(true, |pods| !pods.is_empty()) {
            kept.push(KeptHandler { owner, pods });
        }
    }
    kept
}

impl KeptHandler {
    /// Removes the default and keeps the handler, as after an installation without `--default`.
    pub fn without_default(&self, session: &mut Session) -> Result<()> {
        let (record, report) = (&mut session.record, &mut session.report);
        match &self.pods {
            Ok(pods) => {
                let pods = counted(pods, "pod");
                report.left(Progress::KeptForPods, format!(
                    "handler {RUNTIME} kept for {pods}: no container of such a pod could start without it; run this again later"
                ));
            }
            Err(error) => report.unfinished(format!(
                "the handler {RUNTIME} stays: {error:#}; start or restart the daemon, then run this again"
            )),
        }
        // An installation that was killed half-way has no pods of this handler.
        let Some(installed) = record.verified(self.owner) else {
            return Ok(());
        };
        match runtimes::plan(self.owner, &installed.without_default(), record) {
            Ok((installed, plan)) => make(installed, plan, session),
            Err(error) => {
                report.unfinished(format!("{error:#}"));
                Ok(())
            }
        }
    }
}

/// Makes a planned installation that replaces a recorded one.
pub fn make(installed: Installed, plan: Plan, session: &mut Session) -> Result<()> {
    let (record, report) = (&mut session.record, &mut session.report);
    report.take(&plan);
    let mut changes = plan.changes;
    match plan_config(installed.needs_runtime.as_deref(), None, record) {
        Ok(settings) => changes.extend(settings.change),
        // a config that is not valid must not keep the default on the node
        Err(error) => report.notes.push(format!("{error:#}")),
    }
    changes.retain(|change| !change.is_none());
    if !session.common.dry_run {
        runtimes::put(record, &changes)?;
        record.verify(installed);
        record.save()?;
    }
    session.work.extend(changes);
    Ok(())
}

/// The unfinished removal, with the pods that still need files.
pub fn pending(record: &Record) -> Option<Removal> {
    let runtimes = &record.removal.as_ref()?.runtimes;
    let owners = record.files.iter().map(|entry| entry.owner);
    let handlers = kept_handlers(owners.filter(|owner| is_meant(runtimes, *owner)));
    Some(Removal::of(&handlers, &programs_to_go(runtimes, record)))
}

/// True if an uninstall for these runtimes concerns this owner's files.
pub fn is_meant(runtimes: &[Owner], owner: Owner) -> bool {
    runtimes.is_empty() || runtimes.contains(&owner)
}

/// bindguard's own files that are removed with these runtimes. A record without programs belongs to
/// a package: the package's programs are removed later, for the same reasons.
pub fn programs_to_go(runtimes: &[Owner], record: &Record) -> Vec<PathBuf> {
    let mut files = Vec::new();
    if !is_meant(runtimes, Owner::Bindguard) {
        return files;
    }
    for entry in &record.files {
        if entry.owner == Owner::Bindguard {
            files.push(entry.path.clone());
        }
    }
    if !files.iter().any(|file| file.ends_with(SHIM)) {
        files.extend(beside_this_one());
    }
    files
}

impl Removal {
    /// Counts the pods that need the handlers or the programs.
    pub fn of(handlers: &[KeptHandler], programs: &[PathBuf]) -> Self {
        let pods = handlers.iter().flat_map(|kept| &kept.pods);
        Self {
            handler_kept_for_pods: pods.map(Vec::len).sum(),
            programs_kept_for_pods: pods_of(&users_of(programs)).len(),
        }
    }
}

/// The names of the pods among the users of programs.
pub fn pods_of(users: &[ProgramUser]) -> Vec<String> {
    let ids: BTreeSet<&str> = users.iter().filter_map(|user| user.id.as_deref()).collect();
    if ids.is_empty() {
        return Vec::new();
    }
    let pods = cri::pods(None).unwrap_or_else(|error| {
        print_remark(format_args!("the names of pods are not known: {error:#}"));
        None
    });
    let pods = pods.unwrap_or_default();
    let mut names = BTreeSet::new();
    for container in &pods.containers {
        if ids.contains(container.id.as_str()) {
            names.extend(container.pod.display_name());
        }
    }
    names.into_iter().collect()
}

/// The number of pods or containers, and the first names.
pub fn counted(all: &[String], noun: &str) -> String {
    let mut names: Vec<&str> = all.iter().take(MAX_NAMES).map(String::as_str).collect();
    if all.len() > MAX_NAMES {
        names.push("...");
    }
    let plural = if all.len() == 1 { "" } else { "s" };
    format!("{} {noun}{plural} ({})", all.len(), names.join(", "))
}

/// bindguard's name in the file of Docker or Podman, which containers have or may have.
#[derive(Debug)]
pub struct KeptName {
    pub owner: Owner,
    pub path: PathBuf,
    /// The containers, or why they are not known.
    containers: Result<Vec<String>>,
}

impl KeptName {
    /// The name in this file of an engine; `None` for other runtimes.
    ///
    /// # Errors
    /// If the record cannot be written.
    pub fn of(owner: Owner, path: &Path, session: &mut Session) -> Result<Option<Self>> {
        let containers = match owner {
            Owner::Docker => {
                if !session.common.dry_run {
                    session.record.remember_docker_root()?;
                }
                let recorded = session.record.docker_root.as_deref();
                docker_containers(recorded, &runtimes::docker_data_root())
            }
            // Podman is a program of the image, or of the node
            Owner::Podman if session.common.root.is_some() => {
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

    /// True if no container has the name. Podman's list is never complete.
    pub fn can_go(&self) -> bool {
        self.owner == Owner::Docker && self.containers.as_ref().is_ok_and(Vec::is_empty)
    }

    /// The change after which the name is that of the real runtime. `None` if the file does not have
    /// the name.
    ///
    /// # Errors
    /// If the file cannot be edited.
    pub fn without_programs(&self, record: &Record) -> Result<Option<Change>> {
        let mut change = Change::to(self.owner, self.path.clone(), None)?;
        let (before, original) = (change.before.as_ref(), record.original(&self.path)?);
        let runtime = runtime_of_containers(self.owner, record);
        change.after = runtimes::with_name_only(self.owner, before, original.as_ref(), &runtime)
            .doing("edit", &self.path)?;
        if change.after.is_none() {
            return Ok(None);
        }
        if !change.is_none() {
            change.command = runtimes::removal_command(self.owner, None, before);
        }
        Ok(Some(change))
    }

    /// Reports that the name stays, and for which containers.
    pub fn report(&self, report: &mut InstallReport) {
        let stays = format!("the name {RUNTIME} stays in {}", self.path.display());
        let is_podman = self.owner == Owner::Podman;
        let known = match &self.containers {
            Err(error) => format!("{stays}: {error:#}"),
            Ok(containers) if is_podman && containers.is_empty() => format!(
                "{stays}: users without root may have containers of this runtime, and only they can list them"
            ),
            Ok(containers) if is_podman => format!(
                "{stays} for {} of root's, and for those of users without root, which only they can list",
                counted(containers, "container")
            ),
            Ok(containers) => format!(
                "{stays} for {}, which Docker could not start or stop without the name",
                counted(containers, "container")
            ),
        };
        let advice = if is_podman {
            "when no container has the name, run bindguard uninstall --forget-name, or delete the file"
        } else {
            "when no container has the name, run bindguard uninstall again, or remove the name from the file"
        };
        let progress = match report.waits_for_a_restart() {
            true => Progress::Unfinished,
            false => Progress::NameKept,
        };
        report.left(progress, format!("{known}; {advice}"));
    }
}

/// The names that stay in these files, each with the change that removes the programs from the file.
/// `unread` gets the files that stay because they cannot be edited.
/// With `forgets` no name stays, and the report has the containers.
pub fn kept_names(
    entries: &[Entry],
    forgets: bool,
    session: &mut Session,
    unread: &mut Vec<PathBuf>,
) -> Result<Vec<(KeptName, Change)>> {
    let mut kept = Vec::new();
    for entry in entries {
        let Some(found) = KeptName::of(entry.owner, &entry.path, session)? else {
            continue;
        };
        if forgets {
            let lost = match &found.containers {
                Ok(containers) if containers.is_empty() => continue,
                Ok(containers) => format!("of {} is gone", counted(containers, "container")),
                Err(error) => format!("is gone, and containers may have it: {error:#}"),
            };
            session.report.notes.push(format!(
                "the runtime {RUNTIME} {lost}; remove and create such containers again"
            ));
            continue;
        }
        match found.without_programs(&session.record) {
            Ok(Some(change)) if !found.can_go() => kept.push((found, change)),
            Ok(_) => {}
            Err(error) => {
                session.report.unfinished(stays(&entry.path, &error));
                unread.push(entry.path.clone());
            }
        }
    }
    Ok(kept)
}

/// The runtime that bindguard-runtime called. The engines do not hand on an environment that names
/// another config.
fn runtime_of_containers(owner: Owner, record: &Record) -> PathBuf {
    let loaded = Loaded::from_file(Path::new(DEFAULT_PATH));
    let loaded = loaded.or_else(|_| Loaded::from_file(Path::new(KEPT_PATH)));
    let installed = record.verified(owner);
    let mut runtime = installed.and_then(|it| it.needs_runtime.clone());
    if let Ok(loaded) = loaded
        && loaded.set.contains(&RUNTIME_KEY)
    {
        runtime = Some(loaded.config.runtime().to_owned());
    }
    let runtime = runtime.unwrap_or_else(|| USUAL_RUNTIME.into());
    find(&runtime).unwrap_or(runtime)
}
