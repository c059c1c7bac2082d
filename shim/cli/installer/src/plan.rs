//! The operator's options, and the changes that they require.

use std::path::{Path, PathBuf};

use anyhow::Result;
use serde::{Deserialize, Serialize};

use crate::change::{self, Change, Content};
use crate::owner::Owner;

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
