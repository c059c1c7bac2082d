//! The parts of an installation that stay on a node while pods need them.
//!
//! | part | needed by | gone with |
//! |---|---|---|
//! | the default | no pod that exists | the first `uninstall` |
//! | the handler | containers that start in a pod of that handler | the last sandbox of the handler |
//! | the programs | containers that were created through them | the last such pod |

use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::Result;
use bindguard_core::program_names::{RUNTIME, SHIM};
use bindguard_operator::cri::of_node;

use crate::options::CommonOptions;
use crate::owner::Owner;
use crate::plan::{InstallOptions, PlannedChange};
use crate::program_users::{ProgramUser, users_of};
use crate::programs::beside_this_one;
use crate::put::put;
use crate::record::{Entry, Installed, Record, Removal};
use crate::report::InstallReport;
use crate::running::pods_with_handler;
use crate::runtimes;
use crate::settings::{self, SettingsPlan};
use bindguard_operator::pods::Pods;
use bindguard_operator::terminal::print_remark;

/// The names that a message lists.
const MAX_NAMES: usize = 3;

/// A handler that pods still need, or may need.
#[derive(Debug)]
pub struct KeptHandler {
    /// The runtime that has it.
    pub owner: Owner,
    /// The pods, or why they are not known.
    pub pods: Result<Vec<String>, anyhow::Error>,
}

/// The runtimes' handlers that pods need. If a runtime does not answer, its handler is kept.
pub fn kept_handlers(owners: impl Iterator<Item = Owner>) -> Vec<KeptHandler> {
    let mut owners: Vec<Owner> = owners.collect();
    owners.sort();
    owners.dedup();
    owners
        .into_iter()
        .map(|owner| KeptHandler {
            owner,
            pods: pods_with_handler(owner),
        })
        .filter(|kept| kept.pods.as_ref().map_or(true, |pods| !pods.is_empty()))
        .collect()
}

impl KeptHandler {
    /// Removes the default and keeps the handler, as after an installation without `--default`.
    pub fn without_default(
        &self,
        record: &mut Record,
        report: &mut InstallReport,
        common: &CommonOptions,
    ) -> Result<Vec<PlannedChange>> {
        match &self.pods {
            Ok(pods) => report.kept_for_pods(format!(
                "handler {RUNTIME} kept for {}: no container of such a pod could start without it; run this again later",
                counted(pods, "pod")
            )),
            Err(error) => report.unfinished(format!(
                "the handler {RUNTIME} stays: {error:#}; start or restart the daemon, then run this again"
            )),
        }
        // An installation that was killed half-way has no pods of this handler.
        let Some(installed) = record.verified(self.owner) else {
            return Ok(Vec::new());
        };
        let options = InstallOptions {
            default: false,
            ..installed.options.clone()
        };
        let plan = match runtimes::plan(self.owner, &options, record) {
            Ok(plan) => plan,
            Err(error) => {
                report.unfinished(format!("{error:#}"));
                return Ok(Vec::new());
            }
        };
        report.take(&plan);
        let planned = Installed::planned(self.owner, &options, &plan);
        let settings = match settings::plan(planned.needs_runtime.as_deref(), None, record) {
            Ok(settings) => settings,
            // a config that is not valid must not keep the default on the node
            Err(error) => {
                report.note(format!("{error:#}"));
                SettingsPlan::default()
            }
        };
        let steps: Vec<_> = plan
            .into_steps(self.owner)
            .chain(settings.change.map(PlannedChange::own))
            .filter(|step| !step.change.is_none())
            .collect();
        if !common.dry_run {
            steps.iter().try_for_each(|step| put(record, step))?;
            record.verify(planned)?;
        }
        Ok(steps)
    }
}

/// The unfinished removal, with the pods that still need files.
pub fn pending(record: &Record) -> Option<Removal> {
    let runtimes = &record.removal()?.runtimes;
    let owners = record.files().iter().map(|entry| entry.owner);
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
    if !is_meant(runtimes, Owner::Bindguard) {
        return Vec::new();
    }
    let of_bindguard = |entry: &&Entry| entry.owner == Owner::Bindguard;
    let recorded = record.files().iter().filter(of_bindguard);
    let mut files: Vec<PathBuf> = recorded.map(|entry| entry.path.clone()).collect();
    if !files.iter().any(|file| file.ends_with(SHIM)) {
        files.extend(beside_this_one());
    }
    files
}

impl Removal {
    /// Counts the pods that need the handlers or the programs.
    pub fn of(handlers: &[KeptHandler], programs: &[PathBuf]) -> Self {
        Self {
            handler_kept_for_pods: handlers
                .iter()
                .flat_map(|kept| &kept.pods)
                .map(Vec::len)
                .sum(),
            programs_kept_for_pods: pods_of(&users_of(programs)).len(),
        }
    }
}

/// The pods among the users of programs.
pub fn pods_of(users: &[ProgramUser]) -> Vec<String> {
    let ids: BTreeSet<&str> = users.iter().filter_map(ProgramUser::id).collect();
    if ids.is_empty() {
        Vec::new()
    } else {
        names_of(&ids)
    }
}

/// The names of the pods of these sandboxes and containers.
fn names_of(ids: &BTreeSet<&str>) -> Vec<String> {
    let pods = of_node::pods(None).unwrap_or_else(|error| {
        print_remark(format_args!("the names of pods are not known: {error:#}"));
        Pods::default()
    });
    let meant = pods
        .containers
        .iter()
        .filter(|container| ids.contains(container.id.as_str()));
    let names: BTreeSet<String> = meant
        .filter_map(|container| container.pod.display_name())
        .collect();
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
