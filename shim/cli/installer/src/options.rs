//! The operator's options, the changes that they require, and the report of both verbs: for people, and
//! as JSON.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use bindguard_core::text::one_line;
use bindguard_operator::terminal::print_text;
use clap::Args;
use serde::{Deserialize, Serialize};

use crate::change::{self, Change, Content, name};

/// Arguments of both verbs.
#[derive(Debug, Args)]
pub struct CommonOptions {
    /// Print the planned changes and do nothing. The exit code is 1 if there is something to do.
    #[arg(long)]
    pub dry_run: bool,
    /// Work in another root file system: of an image, or of a node as a pod sees it. All other
    /// paths are below this folder.
    #[arg(long, value_name = "DIR")]
    pub root: Option<PathBuf>,
    /// Run the command that activates the changes, if there were any.
    #[arg(long)]
    pub restart: bool,
    /// Restart only while this command grants a slot, such as `bindguard-agent restart-slot`: it
    /// limits the nodes that restart at the same time.
    #[arg(long, value_name = "COMMAND", requires = "restart")]
    pub restart_slot: Option<String>,
    /// Label this node by this command while pods of the handler start, such as `bindguard-agent
    /// node-label`.
    #[arg(long, value_name = "COMMAND")]
    pub node_label: Option<String>,
    /// Label this node by this file of node-feature-discovery.
    #[arg(long, value_name = "FILE", conflicts_with = "node_label")]
    pub node_feature: Option<PathBuf>,
    /// Print the changes as JSON.
    #[arg(long)]
    pub json: bool,
    /// Wait for SIGTERM afterwards, which changes nothing: for the pod of a DaemonSet. Unfinished
    /// work is tried again.
    #[arg(long, conflicts_with = "dry_run")]
    pub stay: bool,
}

/// The owner of a file.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum,
)]
#[serde(rename_all = "lowercase")]
pub enum Owner {
    /// containerd's config.toml, or a file that it imports.
    Containerd,
    /// Docker's daemon.json.
    Docker,
    /// A drop-in of Podman's containers.conf.
    Podman,
    /// A drop-in of CRI-O's.
    #[value(name = "crio")]
    Crio,
    /// The unit of the node agent.
    #[value(skip)]
    Agent,
    /// The programs and the settings of bindguard itself.
    #[value(skip)]
    Bindguard,
}

impl Owner {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Containerd => "containerd",
            Self::Docker => "docker",
            Self::Podman => "podman",
            Self::Crio => "crio",
            Self::Agent => "agent",
            Self::Bindguard => "bindguard",
        }
    }
}

/// The OCI runtime that bindguard-runtime calls if its config names none.
pub const USUAL_RUNTIME: &str = "runc";

/// The options of the command line, with their defaults filled in.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstallOptions {
    /// The folder in which services find the programs.
    pub prefix: PathBuf,
    /// Guard every container, not only containers that request the handler.
    pub default: bool,
    /// Keep containerd's own shim.
    pub wrapper: bool,
    /// The containerd program.
    pub containerd: Option<PathBuf>,
    /// containerd's main file, if the operator names it.
    pub containerd_config: Option<PathBuf>,
}

/// The changes to the files of a runtime.
#[derive(Debug, Default)]
pub struct TargetPlan {
    /// A change for each file; a change may be empty.
    pub changes: Vec<Change>,
    /// Notes for the operator.
    pub notes: Vec<String>,
    /// The OCI runtime that bindguard-runtime must call; `None` if bindguard's shim names it.
    pub needs_runtime: Option<PathBuf>,
    /// Other programs without which no container would start.
    pub needs_programs: Vec<PathBuf>,
    /// The command that activates the changes.
    pub command: Option<String>,
    /// The operator's own steps, if no file that lasts can be changed.
    pub advice: Option<String>,
    /// True if the files as they are guard new containers as well, in the way of another version of
    /// the runtime.
    pub guards_already: bool,
}

/// The edits after which a runtime's default starts containers.
#[derive(Debug, Default)]
pub struct Healing {
    /// The default that was replaced, for the operator.
    pub notes: Vec<String>,
    /// Files and their new texts.
    pub edits: Vec<(PathBuf, String)>,
}

/// A planned change.
#[derive(Debug)]
pub struct PlannedChange {
    /// The file's owner.
    pub owner: Owner,
    /// The change.
    pub change: Change,
    /// The command that activates it.
    pub command: Option<String>,
}

impl TargetPlan {
    /// Adds the edits after which the default starts containers.
    pub fn take(&mut self, healing: Healing) -> Result<()> {
        self.notes.extend(healing.notes);
        for (path, text) in healing.edits {
            let change = Change::of(&path, Some(text.into_bytes()), 0o644)?;
            self.changes.push(change);
        }
        Ok(())
    }

    /// The plan's steps for a runtime.
    pub fn into_steps(self, owner: Owner) -> impl Iterator<Item = PlannedChange> {
        let command = self.command;
        self.changes.into_iter().map(move |change| PlannedChange {
            owner,
            change,
            command: command.clone(),
        })
    }
}

impl PlannedChange {
    /// A change of bindguard's own files, which no service reads.
    pub fn own(change: Change) -> Self {
        Self {
            owner: Owner::Bindguard,
            change,
            command: None,
        }
    }
}

/// The content that a file has after `steps`; `None` if the file is missing then.
pub fn bytes_after(path: &Path, steps: &[PlannedChange]) -> Result<Option<Vec<u8>>> {
    for step in steps {
        if step.change.path == path {
            let after = step.change.after.as_ref();
            return Ok(after.and_then(Content::bytes).map(<[u8]>::to_vec));
        }
    }
    change::read(path)
}

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
