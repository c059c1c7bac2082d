//! The versions of the programs on a node, side by side, and the link that selects a version.
//!
//! ```text
//! /usr/local/bin/containerd-shim-bindguard-v2 ──► /usr/local/lib/bindguard/current/containerd-shim-bindguard-v2
//! /usr/local/lib/bindguard/current            ──► 0.2.0
//! ```
//!
//! Configurations name the link in the prefix. Replacing `current` is a single rename(2), which
//! switches all programs at once. A running shim was started from its version's folder and takes
//! the guard from this folder: an upgrade does not mix versions.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

use crate::own_program::OwnProgram;
use crate::program_users::users_of;
use crate::record::{Entry, Record, there_or_not};
use crate::running::daemon_that_names;

const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The name of the link that selects a version.
pub const CURRENT: &str = "current";

/// The folder of all versions: beside a prefix `bin`, or below any other prefix.
pub fn store(prefix: &Path) -> PathBuf {
    let above = if prefix.file_name() == Some(OsStr::new("bin")) {
        prefix.parent()
    } else {
        None
    };
    above.unwrap_or(prefix).join("lib/bindguard")
}

/// The link that selects a version.
pub fn current(prefix: &Path) -> PathBuf {
    store(prefix).join(CURRENT)
}

/// The folder for programs with these contents. A build that differs from the present one of its
/// version gets its own folder: the files of a running shim are never replaced.
pub fn folder_for(prefix: &Path, files: &[&OwnProgram]) -> Result<PathBuf> {
    let usual = store(prefix).join(VERSION);
    let is_other = |program: &&OwnProgram| {
        let path = usual.join(program.name());
        path.symlink_metadata().is_ok() && !program.is_at(&path)
    };
    if !files.iter().any(is_other) {
        return Ok(usual);
    }
    // the selected version first, without a hash of every program
    let selected = fs::read_link(current(prefix)).map(|version| store(prefix).join(version));
    if let Some(selected) = selected
        .ok()
        .filter(|folder| files.iter().all(|one| one.is_at(&folder.join(one.name()))))
    {
        return Ok(selected);
    }
    let mut hash = Sha256::new();
    for program in files {
        hash.update(program.bytes()?);
    }
    let digits: String = hash
        .finalize()
        .iter()
        .take(4)
        .map(|byte| format!("{byte:02x}"))
        .collect();
    Ok(store(prefix).join(format!("{VERSION}-{digits}")))
}

/// The prefix of an installed version, whose programs are in `folder`.
pub fn prefix_of(folder: &Path) -> Option<PathBuf> {
    let above = folder.parent()?.parent()?.parent()?;
    let candidates = [above.join("bin"), above.to_owned()];
    candidates
        .into_iter()
        .find(|prefix| folder.starts_with(store(prefix)) && is_linked(prefix))
}

fn is_linked(prefix: &Path) -> bool {
    fs::read_link(prefix.join(bindguard_core::program_names::CLI))
        .is_ok_and(|to| to.starts_with(current(prefix)))
}

/// Removes the versions that are not selected, and that no process and no running runtime's
/// configuration needs.
pub fn remove_unneeded(record: &mut Record, prefix: &Path) -> Result<()> {
    let store = store(prefix);
    let Ok(selected) = fs::read_link(store.join(CURRENT)) else {
        return Ok(());
    };
    let is_old = |entry: &&Entry| {
        let folder = entry
            .path
            .parent()
            .filter(|folder| folder.parent() == Some(&store));
        folder.is_some_and(|folder| folder.file_name() != Some(selected.as_os_str()))
    };
    let old: Vec<Entry> = record.files().iter().filter(is_old).cloned().collect();
    let folder_of = |entry: &Entry| entry.path.parent().map(Path::to_owned);
    let is_needed = |folder: Option<PathBuf>| {
        let files = old.iter().filter(|entry| folder_of(entry) == folder);
        let files: Vec<PathBuf> = files.map(|entry| entry.path.clone()).collect();
        !users_of(&files).is_empty() || daemon_that_names(&files).map_or(true, |it| it.is_some())
    };
    for entry in old.iter().filter(|entry| !is_needed(folder_of(entry))) {
        there_or_not(fs::remove_file(&entry.path))
            .with_context(|| format!("remove {}", entry.path.display()))?;
        record.forget(&entry.path)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::*;

    fn folder(prefix: &Path, program: &OwnProgram) -> PathBuf {
        folder_for(prefix, &[program]).unwrap()
    }

    #[test]
    fn versions_are_beside_bin_or_below_another_prefix() {
        assert_eq!(
            store(Path::new("/usr/local/bin")),
            Path::new("/usr/local/lib/bindguard")
        );
        assert_eq!(
            store(Path::new("/opt/guard")),
            Path::new("/opt/guard/lib/bindguard")
        );
    }

    #[test]
    fn another_build_of_a_version_gets_its_own_folder() {
        let prefix = tempfile::tempdir().unwrap();
        let build = tempfile::tempdir().unwrap();
        let program = |text: &str| {
            let path = build.path().join(text);
            fs::write(&path, text).unwrap();
            OwnProgram::open("bindguard", &path).unwrap()
        };
        let first = folder(prefix.path(), &program("one"));
        assert_eq!(first.file_name().unwrap(), VERSION);
        fs::create_dir_all(&first).unwrap();
        fs::write(first.join("bindguard"), "one").unwrap();
        assert_eq!(folder(prefix.path(), &program("one")), first);
        let second = folder(prefix.path(), &program("two"));
        assert_ne!(second, first);
        assert!(
            second
                .file_name()
                .unwrap()
                .to_str()
                .unwrap()
                .starts_with(&format!("{VERSION}-"))
        );
    }
}
