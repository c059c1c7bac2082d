//! Changes by other tools since the last installation: of a runtime's files, or of bindguard's
//! programs.
//!
//! It is reported and never repaired here: that would fight with the tool that made the change.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;

use anyhow::Result;
use bindguard_config::DEFAULT_PATH;
use bindguard_core::handover::{AGENT, CLI, SHIM, WRAPPER};
use bindguard_operator::root_program::DRIFT_COUNT;
use bindguard_operator::terminal::print_remark;

use crate::change;
use crate::change::Owner;
use crate::own_files::check_starts;
use crate::record::{Entry, Installed, Record, hash};
use crate::running::is_gone;
use crate::runtimes::{self, recorded};

/// A part of an installation that is no longer as `install` left it.
#[derive(Debug)]
pub struct Drift {
    /// The changed part, and its effect.
    pub what: String,
    /// True if a new pod would not start.
    pub breaks_pods: bool,
    /// True if new pods may have no guard.
    pub unguards: bool,
    /// The command that installs again.
    pub command: String,
}

impl Drift {
    fn of(what: String, command: String) -> Self {
        Self {
            what,
            breaks_pods: false,
            unguards: false,
            command,
        }
    }
}

/// The changed parts of the node's installation, and the reasons why other parts are not checked.
pub fn drift() -> (Vec<Drift>, Vec<String>) {
    let record = match recorded() {
        Ok(record) => record,
        Err(error) => return (Vec::new(), vec![format!("{error:#}")]),
    };
    let mut problems = record.refused();
    let mut found = broken_programs(&record);
    if let Some(wanted) = &record.node_config {
        match change::read(Path::new(DEFAULT_PATH)) {
            Ok(Some(present)) if hash(&present) == *wanted => {}
            Ok(_) => found.push(Drift::of(
                format!("{DEFAULT_PATH} is not the config that install was given"),
                "bindguard install --node-config FILE --force-node-config".to_owned(),
            )),
            Err(error) => problems.push(format!("{error:#}")),
        }
    }
    for installed in &record.installed {
        match changed_files(installed, &record) {
            Ok(changed) => found.extend(changed),
            Err(error) => problems.push(format!("{error:#}")),
        }
    }
    (found, problems)
}

/// The files of a runtime that a new installation would change.
fn changed_files(installed: &Installed, record: &Record) -> Result<Vec<Drift>> {
    let mut drift = Vec::new();
    if let Some(program) = installed.needs_programs.iter().find(|it| is_gone(it)) {
        let what = format!(
            "{} of the runtime that bindguard guards cannot be run: no pod that needs it starts",
            program.display()
        );
        drift.push(Drift {
            breaks_pods: true,
            ..Drift::of(what, command(installed))
        });
        return Ok(drift);
    }
    let (_, plan) = runtimes::plan(installed.owner, &installed.options, record)?;
    if plan.advice.is_some() {
        let what = "containerd has no handler, and a template of the distribution has to name it: new pods may be unguarded";
        drift.push(Drift::of(what.to_owned(), command(installed)));
    }
    for change in plan.changes.iter().filter(|change| !change.is_none()) {
        let is_as_written = match (record.entry(&change.path), &change.before) {
            (Some(entry), Some(present)) => entry.is_as_written(present),
            _ => false,
        };
        let what = match is_as_written {
            true => "is as install left it, but the runtime or another of its files changed",
            false => "is not as install left it",
        };
        let path = change.path.display();
        let what = format!("{path} {what}: new pods may be unguarded");
        drift.push(Drift::of(what, command(installed)));
    }
    Ok(drift)
}

/// Prints the changes by other tools that are not in `reported`, and counts the changes for the
/// agent's figures.
pub fn report(reported: &mut Vec<String>) {
    let (drift, mut problems) = drift();
    // parts that cannot be checked may have changed
    if problems.is_empty() || !drift.is_empty() {
        let count = format!("{}\n", drift.len());
        let written = change::write(Path::new(DRIFT_COUNT), count.as_bytes(), 0o600, None);
        if let Err(error) = written {
            problems.push(format!("{error:#}"));
        }
    }
    let mut now: Vec<String> = Vec::new();
    for drift in drift {
        now.push(format!("{}; {}", drift.what, drift.command));
    }
    for problem in problems {
        now.push(format!("check for changes by other tools: {problem}"));
    }
    for line in &now {
        if !reported.contains(line) {
            print_remark(line);
        }
    }
    if now.is_empty() && !reported.is_empty() {
        print_remark("the installation is as install left it");
    }
    *reported = now;
}

/// Programs that are gone, are damaged or do not run. A link to a program of a version that is gone
/// leads nowhere.
fn broken_programs(record: &Record) -> Vec<Drift> {
    let command = match record.installed.first() {
        Some(installed) => command(installed),
        None => "bindguard install".to_owned(),
    };
    // a file of a runtime that names the wrapper, or cannot be read
    let is_a_runtime = record.files.iter().any(|entry| {
        ![Owner::Bindguard, Owner::Agent].contains(&entry.owner)
            && fs::read(&entry.path).map_or(true, |bytes| {
                String::from_utf8_lossy(&bytes).contains(WRAPPER)
            })
    });
    let mut found = Vec::new();
    for entry in &record.files {
        let program = entry.path.file_name().and_then(OsStr::to_str);
        let Some(program) = program.filter(|_| entry.owner == Owner::Bindguard) else {
            continue;
        };
        let Some(why) = why_broken(entry, program) else {
            continue;
        };
        // bindguard's shim creates containers without the guard; to every other shim it is the runtime
        let unguards = program == WRAPPER && !is_a_runtime;
        let breaks_pods = [SHIM, WRAPPER].contains(&program) && !unguards;
        let effect = match (breaks_pods, unguards) {
            (true, _) => ": a pod that needs it does not start",
            (false, true) => ": creates may go on without a check",
            (false, false) => "",
        };
        found.push(Drift {
            what: format!("{} {why}{effect}", entry.path.display()),
            breaks_pods,
            unguards,
            command: command.clone(),
        });
    }
    found
}

fn why_broken(entry: &Entry, program: &str) -> Option<String> {
    if fs::metadata(&entry.path).is_err() {
        return Some("is gone".to_owned());
    }
    if ![SHIM, WRAPPER, CLI, AGENT].contains(&program) || entry.is_link() {
        return None;
    }
    match change::content(&entry.path) {
        Ok(Some(content)) if entry.is_as_written(&content) => {}
        Ok(_) => return Some("is damaged: it has other bytes than install wrote".to_owned()),
        Err(error) => return Some(format!("cannot be read: {error:#}")),
    }
    let error = check_starts(program, &entry.path).err()?;
    Some(format!("does not run: {error:#}"))
}

/// The call of `install` with the same options.
fn command(installed: &Installed) -> String {
    let mut command = "bindguard install".to_owned();
    match installed.owner {
        Owner::Docker | Owner::Podman | Owner::Crio => {
            command += " ";
            command += &installed.owner.to_string();
        }
        Owner::Containerd | Owner::Agent | Owner::Bindguard => {}
    }
    for (is_set, flag) in [
        (installed.options.default, " --default"),
        (installed.options.wrapper, " --wrapper"),
        (installed.owner == Owner::Agent, " --agent"),
    ] {
        if is_set {
            command += flag;
        }
    }
    command + " --dry-run"
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::os::unix::fs::PermissionsExt;

    use serde_json::json;

    use super::*;

    /// An upgrade keeps the programs of an older version while pods need them.
    #[test]
    fn a_program_that_does_not_know_the_self_test_is_not_broken() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIPPED: not root");
            return;
        }
        let folder = tempfile::tempdir_in("/run").unwrap();
        let path = folder.path().join(WRAPPER);
        for (text, mode, broken) in [
            (
                "#!/bin/sh\necho 'flag provided but not defined' >&2\nexit 1\n",
                0o755,
                None,
            ),
            ("#!/bin/sh\necho runc\n", 0o755, None),
            ("#!/nowhere/sh\n", 0o755, Some("No such file")),
            ("\x7fELF", 0o755, Some("Exec format error")),
            ("#!/bin/sh\n", 0o644, Some("Permission denied")),
            ("#!/bin/sh\nkill -KILL $$\n", 0o755, Some("signal: 9")),
        ] {
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let record = json!({ "version": 1, "files": [{
                "owner": "bindguard", "path": path, "original": null, "written": hash(text.as_bytes()),
            }] });
            let found = broken_programs(&serde_json::from_value(record).unwrap());
            let what: Vec<&str> = found.iter().map(|drift| drift.what.as_str()).collect();
            match broken {
                None => assert!(what.is_empty(), "{text:?}: {what:?}"),
                Some(why) => assert!(what[0].contains(why), "{text:?}: {what:?}"),
            }
        }
    }

    #[test]
    fn only_a_missing_shim_keeps_pods_of_the_shim_from_starting() {
        let file =
            |path| json!({ "owner": "bindguard", "path": path, "original": null, "written": "1f" });
        let record = json!({ "version": 1, "files": [
            file("/nowhere/bindguard-agent"),
            file("/nowhere/containerd-shim-bindguard-v2"),
            file("/nowhere/bindguard-runtime"),
        ] });
        let found = broken_programs(&serde_json::from_value(record).unwrap());
        assert_eq!(found[0].what, "/nowhere/bindguard-agent is gone");
        let effects = |drift: &Drift| (drift.breaks_pods, drift.unguards);
        let effects: Vec<_> = found.iter().map(effects).collect();
        assert_eq!(effects, [(false, false), (true, false), (false, true)]);
    }
}
