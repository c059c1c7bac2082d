//! The node's mount table for tests: the number of mounts on a path, and their roots.
//!
//! Deliberately not bindguard's own parser: see proc_pid_mountinfo(5) for the format.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// The fields of a mountinfo line that stories need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// The path inside its filesystem; ends in `//deleted` when what was bound is gone.
    pub root: String,
    pub target: PathBuf,
    /// The optional fields: `shared:1`, `master:1`, …
    pub propagation: Vec<String>,
    pub filesystem: String,
    /// True if this mount refuses to write.
    pub is_read_only: bool,
}

impl Mount {
    /// True if the mounted file was unlinked.
    pub fn is_deleted(&self) -> bool {
        self.root.ends_with("//deleted")
    }

    /// True if mounts and unmounts of a peer group reach it.
    pub fn has_master(&self) -> bool {
        self.propagation
            .iter()
            .any(|field| field.starts_with("master:"))
    }
}

/// The mount table of this thread's namespace.
pub fn table() -> Result<Vec<Mount>> {
    read("/proc/thread-self/mountinfo")
}

/// The mount table of a process.
pub fn table_of(pid: u32) -> Result<Vec<Mount>> {
    read(format!("/proc/{pid}/mountinfo"))
}

/// All mounts of this thread's namespace on exactly `target`, bottom first.
pub fn on(target: &Path) -> Result<Vec<Mount>> {
    Ok(table()?
        .into_iter()
        .filter(|mount| mount.target == target)
        .collect())
}

fn read(path: impl AsRef<Path>) -> Result<Vec<Mount>> {
    let path = path.as_ref();
    let text = fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
    text.lines()
        .map(|line| parse(line).with_context(|| format!("parse the mountinfo line {line:?}")))
        .collect()
}

fn parse(line: &str) -> Option<Mount> {
    let (before, after) = line.split_once(" - ")?;
    let fields: Vec<&str> = before.split(' ').collect();
    Some(Mount {
        root: unescape(fields.get(3)?),
        target: PathBuf::from(unescape(fields.get(4)?)),
        propagation: fields
            .get(6..)?
            .iter()
            .map(|field| (*field).to_owned())
            .collect(),
        filesystem: after.split(' ').next()?.to_owned(),
        is_read_only: fields.get(5)?.split(',').any(|option| option == "ro"),
    })
}

/// The kernel writes space, tab, newline and backslash as three octal digits.
fn unescape(field: &str) -> String {
    field
        .replace("\\040", " ")
        .replace("\\011", "\t")
        .replace("\\012", "\n")
        .replace("\\134", "\\")
}
