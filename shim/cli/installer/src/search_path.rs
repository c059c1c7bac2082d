//! Programs as services find them: on `PATH`, or in systemd's default folders.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use bindguard_operator::root_program::{PROGRAM_FOLDERS, RootProgram};

/// True if services search this folder.
pub fn is_searched(folder: &Path) -> bool {
    PROGRAM_FOLDERS
        .iter()
        .any(|searched| folder == Path::new(searched))
}

/// A program of root's on `PATH`, or in a default folder.
pub fn find(name: impl AsRef<OsStr>) -> Option<PathBuf> {
    let found = RootProgram::find(Path::new(name.as_ref()), None).ok()??;
    Some(found.path().to_owned())
}
