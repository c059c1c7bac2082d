//! Programs as services find them: on `PATH`, or in systemd's default folders.

use std::ffi::{OsStr, OsString};
use std::io::ErrorKind::{NotADirectory, NotFound, PermissionDenied};
use std::path::{Path, PathBuf};
use std::{env, fs, io};

use anyhow::{Result, bail};
use bindguard_operator::root_program::{PROGRAM_FOLDERS, RootProgram};
use rustix::fs::{Access, access};

/// A program of root's on `PATH`, or in a default folder.
pub fn find(name: impl AsRef<OsStr>) -> Option<PathBuf> {
    let found = RootProgram::find(Path::new(name.as_ref()), None).ok()??;
    Some(found.path().to_owned())
}

/// The error of a default that is no runtime of its daemon.
pub fn not_configured<T>(runtime: &str) -> Result<T> {
    bail!("the runtime {runtime:?} is not configured")
}

/// The folders in which a daemon and its shims find programs.
#[derive(Debug, Clone)]
pub struct SearchPath {
    folders: Vec<PathBuf>,
    /// False if no daemon runs, or its environment is unreadable: a program that is not found may be
    /// in a folder that is not known.
    is_complete: bool,
}

impl SearchPath {
    /// The folders of the `PATH` of a daemon, or the default folders. `beside`: a program whose
    /// folder is searched, too, as containerd's.
    pub fn of(path: Option<OsString>, beside: Option<&Path>) -> Self {
        let is_complete = path.is_some();
        let path = path.or_else(|| env::var_os("PATH")).unwrap_or_default();
        let mut folders: Vec<PathBuf> = env::split_paths(&path).collect();
        if !is_complete {
            folders.extend(PROGRAM_FOLDERS.map(PathBuf::from));
        }
        folders.extend(beside.and_then(Path::parent).map(Path::to_owned));
        Self {
            folders,
            is_complete,
        }
    }

    /// The file of a runtime's program; `None` if it may be in a folder that is not known.
    ///
    /// # Errors
    /// If the program is missing or not executable. Other errors, such as those of a file system
    /// that does not answer, say nothing about the program.
    pub fn program_of(&self, runtime: &str, name: &str) -> Result<Option<PathBuf>> {
        let path = Path::new(name);
        let source = if path.is_absolute() {
            match runnable(path) {
                Ok(()) => return Ok(Some(path.to_owned())),
                Err(error) => error,
            }
        } else {
            if name.contains('/') {
                return Ok(None);
            }
            for folder in &self.folders {
                let program = folder.join(name);
                if runnable(&program).is_ok() {
                    return Ok(Some(program));
                }
            }
            if !self.is_complete {
                return Ok(None);
            }
            io::Error::new(NotFound, "it is not on the daemon's PATH")
        };
        if !is_definite(&source) {
            return Ok(None);
        }
        bail!("the program {name} of the runtime {runtime:?} cannot be run: {source}")
    }
}

/// True if this program is missing, or cannot be executed.
pub fn is_gone(program: &Path) -> bool {
    runnable(program).is_err_and(|error| is_definite(&error))
}

fn runnable(program: &Path) -> io::Result<()> {
    if !fs::metadata(program)?.is_file() {
        return Err(PermissionDenied.into());
    }
    // refused also on a file system that is mounted noexec
    Ok(access(program, Access::EXEC_OK)?)
}

fn is_definite(error: &io::Error) -> bool {
    matches!(error.kind(), NotFound | NotADirectory | PermissionDenied)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn only_a_known_path_shows_that_a_program_is_missing() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("crun");
        let path = |is_complete| SearchPath {
            folders: vec![folder.path().to_owned()],
            is_complete,
        };
        let found = |path: SearchPath, name: &str| path.program_of("x", name);
        assert_eq!(found(path(false), "crun").unwrap(), None);
        assert!(found(path(true), "crun").is_err());
        let absolute = program.to_str().unwrap();
        assert!(found(path(false), absolute).is_err());
        fs::write(&program, "").unwrap();
        assert!(found(path(false), absolute).is_err(), "not executable");
        fs::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
        for name in ["crun", absolute] {
            assert_eq!(found(path(true), name).unwrap(), Some(program.clone()));
        }
        assert!(found(path(true), folder.path().to_str().unwrap()).is_err());
    }
}
