//! Temporary files beside a target file: contents before the rename, and trials.
//!
//! A killed process leaves its scratch files. Their names contain the pid, so a later process
//! removes the files of dead processes.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::process;

use tempfile::Builder;

const PREFIX: &str = ".bindguard-";

/// The prefix of this process's files.
pub fn prefix() -> String {
    format!("{PREFIX}{}-", process::id())
}

/// Calls `make` with a builder of such files.
pub fn with_builder<T>(make: impl FnOnce(&mut Builder<'_, '_>) -> T) -> T {
    make(Builder::new().prefix(&prefix()))
}

/// Removes the files of processes that have ended from a folder.
pub fn sweep(folder: &Path) {
    let entries = folder.read_dir().into_iter().flatten().flatten();
    for entry in entries.filter(|entry| is_abandoned(&entry.file_name())) {
        // the next sweep tries again
        let _ = fs::remove_file(entry.path());
    }
}

fn is_abandoned(name: &OsStr) -> bool {
    let pid = || {
        name.to_str()?
            .strip_prefix(PREFIX)?
            .split_once('-')?
            .0
            .parse::<u32>()
            .ok()
    };
    pid().is_some_and(|pid| {
        pid != process::id()
            && Path::new("/proc")
                .join(pid.to_string())
                .symlink_metadata()
                .is_err()
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::*;

    #[test]
    fn only_the_files_of_ended_processes_go() {
        let folder = tempfile::tempdir().unwrap();
        let own = format!("{}x", prefix());
        let (ended, other) = (".bindguard-4294967295-x", ".bindguard-notes");
        [own.as_str(), ended, other, "config.toml"]
            .iter()
            .for_each(|name| fs::write(folder.path().join(name), "").unwrap());
        sweep(folder.path());
        let mut left: Vec<_> = folder
            .path()
            .read_dir()
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        left.sort();
        assert_eq!(left, [own.as_str(), other, "config.toml"]);
    }
}
