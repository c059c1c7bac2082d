//! The report of an install or uninstall, done or planned: for people, and as JSON.

use std::fmt::Write as _;
use std::process::ExitCode;

use anyhow::Result;
use bindguard_core::text::one_line;
use bindguard_operator::terminal::print_text;
use serde::Serialize;

use crate::change::{Change, name};
use crate::options::CommonOptions;
use crate::owner::Owner;
use crate::plan::{PlannedChange, TargetPlan};

/// The output of both verbs.
#[derive(Debug, Default, Serialize)]
pub struct InstallReport {
    /// Nothing was done.
    dry_run: bool,
    files: Vec<FileReport>,
    /// Notes for the operator.
    notes: Vec<String>,
    /// The operator's own steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    advice: Option<String>,
    /// The commands to run, in order.
    commands: Vec<String>,
    /// True if they were run.
    restarted: bool,
    #[serde(skip)]
    progress: Progress,
}

/// The state of an installation or a removal after a call.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Progress {
    /// Nothing is left to do.
    #[default]
    Done,
    /// A name stays in an engine's file, as that of the real runtime: containers have it.
    NameKept,
    /// The rest has to wait for the end of pods.
    KeptForPods,
    /// Work is left, such as a restart.
    Unfinished,
}

impl Progress {
    /// The exit code. While pods run, a dry run and a timer have nothing to do; a removal is not
    /// complete.
    pub fn exit_code(self, waits_for_pods: bool) -> ExitCode {
        match self {
            Self::Done | Self::NameKept => ExitCode::SUCCESS,
            Self::KeptForPods if waits_for_pods => ExitCode::SUCCESS,
            Self::KeptForPods | Self::Unfinished => ExitCode::FAILURE,
        }
    }
}

#[derive(Debug, Serialize)]
struct FileReport {
    owner: Owner,
    path: String,
    action: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    diff: Option<String>,
}

impl InstallReport {
    /// Adds the notes of a plan. Its command is added only if a change is made.
    pub fn take(&mut self, plan: &TargetPlan) {
        self.notes.extend(plan.notes.iter().cloned());
        if plan.changes.iter().any(|change| !change.is_none()) {
            self.command(plan.command.as_deref());
        }
        if let Some(advice) = &plan.advice {
            self.progress = Progress::Unfinished;
            self.advice = Some(advice.clone());
        }
    }

    /// Adds a command that activates a change.
    pub fn command(&mut self, command: Option<&str>) {
        self.commands.extend(
            command
                .filter(|command| !self.commands.iter().any(|old| old == command))
                .map(str::to_owned),
        );
    }

    /// Adds a command at the head of the list.
    pub fn command_before(&mut self, command: &str) {
        if !self.commands.iter().any(|old| old == command) {
            self.commands.insert(0, command.to_owned());
        }
    }

    /// Adds a note.
    pub fn note(&mut self, note: String) {
        self.notes.push(note);
    }

    /// Adds a note on work that is left.
    pub fn unfinished(&mut self, note: String) {
        self.progress = Progress::Unfinished;
        self.note(note);
    }

    /// Adds a note on a part that stays while pods need it.
    pub fn kept_for_pods(&mut self, note: String) {
        self.progress = self.progress.max(Progress::KeptForPods);
        self.note(note);
    }

    /// Adds a note on a name that stays while containers have it.
    pub fn name_kept(&mut self, note: String) {
        self.progress = self.progress.max(Progress::NameKept);
        self.note(note);
    }

    /// The state of the work so far.
    pub fn progress(&self) -> Progress {
        self.progress
    }

    /// The commands, in order.
    pub fn commands(&self) -> &[String] {
        &self.commands
    }

    /// Records that all commands have run.
    pub fn ran_commands(&mut self) {
        self.restarted = !self.commands.is_empty();
    }

    /// True if the commands have run.
    pub fn has_restarted(&self) -> bool {
        self.restarted
    }

    /// True if a service still uses the former files.
    pub fn waits_for_a_restart(&self) -> bool {
        !self.restarted && !self.commands.is_empty()
    }

    /// Prints the report, and returns the remaining work.
    pub fn finish(mut self, work: &[PlannedChange], common: &CommonOptions) -> Result<Progress> {
        self.dry_run = common.dry_run;
        self.files = work
            .iter()
            .map(|step| FileReport::of(step.owner, &step.change))
            .collect();
        let out = if common.json {
            serde_json::to_string_pretty(&self)? + "\n"
        } else {
            self.text()
        };
        print_text(&out)?;
        Ok(if common.dry_run && !work.is_empty() {
            Progress::Unfinished
        } else {
            self.progress
        })
    }

    fn text(&self) -> String {
        let mut out = String::new();
        for file in &self.files {
            let _ = writeln!(out, "{:<8} {}", file.action, one_line(&file.path));
            if let Some(diff) = &file.diff {
                out.push_str(diff);
            }
        }
        for note in &self.notes {
            let _ = writeln!(out, "{:<8} {}", "note", one_line(note));
        }
        out.push_str(self.advice.as_deref().unwrap_or_default());
        if self.files.is_empty() && self.progress <= Progress::NameKept {
            let _ = writeln!(out, "{:<8} no file has to change", "nothing");
        }
        for command in &self.commands {
            let _ = writeln!(
                out,
                "{:<8} {command}",
                if self.restarted { "ran" } else { "run" }
            );
        }
        if self.dry_run && !self.files.is_empty() {
            let _ = writeln!(out, "{:<8} this was a dry run", "nothing");
        }
        out
    }
}

impl FileReport {
    fn of(owner: Owner, change: &Change) -> Self {
        // a diff of bindguard's own commented config shows nothing new
        let diff = if owner == Owner::Bindguard {
            None
        } else {
            change.diff()
        };
        Self {
            owner,
            path: name(&change.path),
            action: change.word(),
            diff,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bindguard_testing::documented;

    #[test]
    fn json_is_what_the_document_shows() {
        let expected: serde_json::Value =
            serde_json::from_str(documented("`install`, `uninstall`")).unwrap();
        let file = |owner, path: &str, action, diff: Option<&str>| FileReport {
            owner,
            path: path.to_owned(),
            action,
            diff: diff.map(str::to_owned),
        };
        let diff = "--- /etc/containerd/config.toml\n+++ /etc/containerd/config.toml\n...";
        let report = InstallReport {
            files: vec![
                file(
                    Owner::Bindguard,
                    "/usr/local/bin/bindguard-runtime",
                    "create",
                    None,
                ),
                file(
                    Owner::Containerd,
                    "/etc/containerd/config.toml",
                    "change",
                    Some(diff),
                ),
            ],
            commands: vec!["systemctl restart containerd".to_owned()],
            ..InstallReport::default()
        };
        assert_eq!(serde_json::to_value(&report).unwrap(), expected);
    }
}
