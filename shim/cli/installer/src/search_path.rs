//! Programs as services find them: on `PATH`, or in systemd's default folders.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

/// The default folders in which services find programs; also systemd's own default.
const FOLDERS: [&str; 6] = [
    "/usr/local/sbin",
    "/usr/local/bin",
    "/usr/sbin",
    "/usr/bin",
    "/sbin",
    "/bin",
];

/// True if services search this folder.
pub fn is_searched(folder: &Path) -> bool {
    FOLDERS.iter().any(|searched| folder == Path::new(searched))
}

/// A program on `PATH`, or in a default folder.
pub fn find(name: impl AsRef<OsStr>) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = env::split_paths(&path).chain(FOLDERS.iter().map(PathBuf::from));
    folders
        .map(|folder| folder.join(Path::new(name.as_ref())))
        .find(|program| fs::metadata(program).is_ok_and(|meta| meta.is_file()))
}
