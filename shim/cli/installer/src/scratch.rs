//! Temporary files: beside a target file before the rename, and private copies.
//!
//! A killed process leaves its scratch files. Their names contain the pid, so a later process
//! removes the files of dead processes.

use std::env;
use std::ffi::OsStr;
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process;

use bindguard_operator::node::is_root;
use tempfile::{Builder, TempDir};

/// The folders for root's private copies. The root of an image may lack the first ones.
const PRIVATE: [&str; 3] = ["/run", "/var/lib", "/"];

const PREFIX: &str = ".bindguard-";

/// The prefix of this process's files.
pub fn prefix() -> String {
    format!("{PREFIX}{}-", process::id())
}

/// Calls `make` with a builder of such files.
pub fn with_builder<T>(make: impl FnOnce(&mut Builder<'_, '_>) -> T) -> T {
    make(Builder::new().prefix(&prefix()))
}

/// A folder of this process for copies of files that may have secrets, which no other user can
/// read. Removes what killed processes left.
///
/// # Errors
/// If no such folder can be made.
pub fn private_folder() -> io::Result<TempDir> {
    let parents = match is_root() {
        true => PRIVATE.map(PathBuf::from).to_vec(),
        false => vec![env::temp_dir()],
    };
    let mut failed = io::ErrorKind::NotFound.into();
    for parent in parents {
        sweep(&parent);
        let mut builder = Builder::new();
        let private = Permissions::from_mode(0o700);
        match builder
            .prefix(&prefix())
            .permissions(private)
            .tempdir_in(parent)
        {
            Ok(folder) => return Ok(folder),
            Err(error) => failed = error,
        }
    }
    Err(failed)
}

/// Removes the private copies of processes that have ended.
pub fn sweep_private() {
    PRIVATE.iter().for_each(|folder| sweep(Path::new(folder)));
}

/// Removes the files and private folders of processes that have ended from a folder.
pub fn sweep(folder: &Path) {
    let entries = folder.read_dir().into_iter().flatten().flatten();
    for entry in entries.filter(|entry| is_abandoned(&entry.file_name())) {
        let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
        // the next sweep tries again
        let _ = match is_folder {
            true => fs::remove_dir_all(entry.path()),
            false => fs::remove_file(entry.path()),
        };
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
