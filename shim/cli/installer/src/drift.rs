//! Changes by other tools since the last installation: of a runtime's files, or of bindguard's
//! programs.
//!
//! It is reported and never repaired here: that would fight with the tool that made the change.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;

use anyhow::Result;
use bindguard_config::DEFAULT_PATH;
use bindguard_core::program_names::{AGENT, CLI, SHIM, WRAPPER};
use bindguard_operator::drift_count::DRIFT_COUNT;
use bindguard_operator::terminal::print_remark;

use crate::change::{self, NewAttributes, name};
use crate::options::{InstallOptions, Owner};
use crate::programs::check_starts;
use crate::record::{Entry, Installed, Record, hash};
use crate::runtimes;

/// A part of an installation that is no longer as `install` left it.
#[derive(Debug, Clone, PartialEq, Eq)]
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

/// The changed parts of the node's installation, and the reasons why other parts are not checked.
pub fn drift() -> (Vec<Drift>, Vec<String>) {
    let record = match Record::load(runtimes::may_write) {
        Ok(record) => record,
        Err(error) => return (Vec::new(), vec![format!("{error:#}")]),
    };
    let mut problems: Vec<String> = record.refused().collect();
    let mut found = broken_programs(&record);
    match other_config(&record) {
        Ok(other) => found.extend(other),
        Err(error) => problems.push(format!("{error:#}")),
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
    let (owner, options) = (installed.owner, &installed.options);
    if let Some(program) = installed.gone_program() {
        return Ok(vec![Drift {
            what: format!(
                "{} of the runtime that bindguard guards cannot be run: no pod that needs it starts",
                name(program)
            ),
            breaks_pods: true,
            unguards: false,
            command: command(owner, options),
        }]);
    }
    let plan = runtimes::plan(owner, options, record)?;
    let mut drift = Vec::new();
    if plan.advice.is_some() {
        drift.push(Drift {
            what: "containerd has no handler, and a template of the distribution has to name it: new pods may be unguarded".to_owned(),
            breaks_pods: false,
            unguards: false,
            command: command(owner, options),
        });
    }
    for change in plan.changes.iter().filter(|change| !change.is_none()) {
        let path = name(&change.path);
        let present = change::content(&change.path)?;
        let is_as_written = record
            .entry(&change.path)
            .zip(present)
            .is_some_and(|(entry, present)| entry.is_as_written(&present));
        // An upgrade of containerd 1.6 allows a better handler, and the present handler works.
        if is_as_written && plan.guards_already {
            continue;
        }
        let what = match is_as_written {
            true => format!(
                "{path} is as install left it, but the runtime or another of its files changed: new pods may be unguarded"
            ),
            false => format!("{path} is not as install left it: new pods may be unguarded"),
        };
        drift.push(Drift {
            what,
            breaks_pods: false,
            unguards: false,
            command: command(owner, options),
        });
    }
    Ok(drift)
}

/// The node's config is not the config that the installer was given.
fn other_config(record: &Record) -> Result<Option<Drift>> {
    let Some(wanted) = &record.node_config else {
        return Ok(None);
    };
    let present = change::read(Path::new(DEFAULT_PATH))?;
    let is_wanted = present.is_some_and(|bytes| hash(&bytes) == *wanted);
    Ok((!is_wanted).then(|| Drift {
        what: format!("{DEFAULT_PATH} is not the config that install was given"),
        breaks_pods: false,
        unguards: false,
        command: "bindguard install --node-config FILE --force-node-config".to_owned(),
    }))
}

/// Reports changes by other tools as they come and go.
#[derive(Debug, Default)]
pub struct DriftReporter(Vec<String>);

impl DriftReporter {
    /// Prints what is new since the last call, and counts the changes for the agent's figures.
    pub fn report(&mut self) {
        let (drift, mut problems) = drift();
        // parts that cannot be checked may have changed
        if problems.is_empty() || !drift.is_empty() {
            let count = format!("{}\n", drift.len());
            let attributes = NewAttributes::Present(0o600);
            if let Err(error) = change::write(Path::new(DRIFT_COUNT), count.as_bytes(), &attributes)
            {
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
        now.iter()
            .filter(|line| !self.0.contains(line))
            .for_each(print_remark);
        if now.is_empty() && !self.0.is_empty() {
            print_remark("the installation is as install left it");
        }
        self.0 = now;
    }
}

/// Programs that are gone, are damaged or do not run. A link to a program of a version that is gone
/// leads nowhere.
fn broken_programs(record: &Record) -> Vec<Drift> {
    let options = record
        .installed
        .first()
        .map(|installed| (installed.owner, installed.options.clone()));
    let command = options.map_or_else(
        || "bindguard install".to_owned(),
        |(owner, options)| command(owner, &options),
    );
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
        let unguards = program == WRAPPER && !is_a_runtime(record);
        let breaks_pods = [SHIM, WRAPPER].contains(&program) && !unguards;
        let effect = match (breaks_pods, unguards) {
            (true, _) => ": a pod that needs it does not start",
            (false, true) => ": creates may go on without a check",
            (false, false) => "",
        };
        found.push(Drift {
            what: format!("{} {why}{effect}", name(&entry.path)),
            breaks_pods,
            unguards,
            command: command.clone(),
        });
    }
    found
}

/// True if a file of a runtime names `bindguard-runtime`.
fn is_a_runtime(record: &Record) -> bool {
    let mut files = record.files.iter();
    files.any(|entry| {
        let names_it = |bytes: &[u8]| String::from_utf8_lossy(bytes).contains(WRAPPER);
        let is_of_runtime = ![Owner::Bindguard, Owner::Agent].contains(&entry.owner);
        is_of_runtime && !fs::read(&entry.path).is_ok_and(|bytes| !names_it(&bytes))
    })
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

/// The call of `install` with these options.
fn command(owner: Owner, options: &InstallOptions) -> String {
    let runtime = match owner {
        Owner::Docker | Owner::Podman | Owner::Crio => format!(" {}", owner.name()),
        Owner::Containerd | Owner::Agent | Owner::Bindguard => String::new(),
    };
    let flags = [
        (options.default, " --default"),
        (options.wrapper, " --wrapper"),
        (owner == Owner::Agent, " --agent"),
    ];
    let flags: String = flags
        .iter()
        .filter(|(is_set, _)| *is_set)
        .map(|(_, flag)| *flag)
        .collect();
    format!("bindguard install{runtime}{flags} --dry-run")
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
