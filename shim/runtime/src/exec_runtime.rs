//! Finds the real runtime and executes it.

use std::env;
use std::ffi::{CString, OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::iter;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use bindguard_core::handover::RUNTIME_VARIABLE;
use bindguard_guard::restore_inherited_state;
use nix::fcntl::OFlag;
use nix::unistd::{execv, execve};

use crate::handover;
use crate::messages::Messages;

/// The exit status of a shell for a command that cannot be run.
const CANNOT_RUN: u8 = 127;

/// The reason why there is no real runtime to execute.
#[derive(Debug, thiserror::Error)]
enum NoRuntime {
    #[error("find the OCI runtime {}: it is not on PATH", .0.display())]
    NotOnPath(PathBuf),
    #[error("find an OCI runtime: {} is bindguard-runtime itself", .0.display())]
    Itself(PathBuf),
}

/// Replaces this process by the real runtime. Returns only if that is impossible.
pub fn exec(args: &[OsString], configured: &Path, messages: &Messages) -> ExitCode {
    let runtime = match find(configured) {
        Ok(runtime) => runtime,
        Err(error) => {
            messages.fatal(&error.to_string());
            return ExitCode::from(CANNOT_RUN);
        }
    };
    let error = execute(&runtime, args);
    messages.fatal(&format!(
        "run the OCI runtime {}: {error}",
        runtime.display()
    ));
    ExitCode::from(CANNOT_RUN)
}

/// The name of the real runtime's file, such as `runc` or `youki-0.7.0`; empty if there is none.
pub fn file_name(configured: &Path) -> OsString {
    let file = find(configured)
        .ok()
        .and_then(|runtime| path_without_links(&runtime).ok());
    let name = file.as_deref().and_then(Path::file_name);
    name.unwrap_or_default().to_owned()
}

fn path_without_links(path: &Path) -> io::Result<PathBuf> {
    let file = File::options()
        .read(true)
        .custom_flags(OFlag::O_PATH.bits())
        .open(path)?;
    fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// [`std::process::Command`] would sort the environment, and drop entries that are not
/// `NAME=VALUE`.
fn execute(runtime: &Path, args: &[OsString]) -> io::Error {
    let Ok(path) = CString::new(runtime.as_os_str().as_bytes()) else {
        return io::ErrorKind::InvalidInput.into();
    };
    // Arguments came through an execve themselves: none contains a NUL.
    let argv = args
        .iter()
        .filter_map(|arg| CString::new(arg.as_bytes()).ok());
    let argv: Vec<CString> = iter::once(path.clone()).chain(argv).collect();
    restore_inherited_state();
    let Err(errno) = if own_variables().any(|name| env::var_os(name).is_some()) {
        execve(&path, &argv, &environment_of_runtime())
    } else {
        execv(&path, &argv)
    };
    errno.into()
}

fn environment_of_runtime() -> Vec<CString> {
    let of_runtime = env::vars_os().filter(|(name, _)| !own_variables().any(|own| name == own));
    of_runtime
        .filter_map(|(name, value)| {
            CString::new([name.as_bytes(), b"=", value.as_bytes()].concat()).ok()
        })
        .collect()
}

/// The variables that configure bindguard, and that the runtime does not need.
fn own_variables() -> impl Iterator<Item = &'static str> {
    iter::once(RUNTIME_VARIABLE).chain(handover::VARIABLES)
}

/// The environment's runtime, else the config's. Either may turn out to be this very program (an
/// installation in runc's place, or a `BinaryName` that names it): then the next `runc` on `PATH`
/// is used.
fn find(configured: &Path) -> Result<PathBuf, NoRuntime> {
    let from_environment = env::var_os(RUNTIME_VARIABLE)
        .filter(|name| !name.is_empty())
        .map(PathBuf::from);
    let candidates = [
        from_environment.as_deref(),
        Some(configured),
        Some(Path::new("runc")),
    ];
    let mut first_error = None;
    for candidate in candidates.into_iter().flatten() {
        match locate(candidate) {
            Ok(runtime) => return Ok(runtime),
            Err(error @ NoRuntime::NotOnPath(_)) if first_error.is_none() => return Err(error),
            Err(error) => first_error = first_error.or(Some(error)),
        }
    }
    Err(first_error.unwrap_or_else(|| NoRuntime::NotOnPath(configured.to_owned())))
}

fn locate(name: &Path) -> Result<PathBuf, NoRuntime> {
    if name.as_os_str().as_encoded_bytes().contains(&b'/') {
        return if is_this_program(name) {
            Err(NoRuntime::Itself(name.to_owned()))
        } else {
            Ok(name.to_owned())
        };
    }
    on_path(name.as_os_str())
}

fn on_path(name: &OsStr) -> Result<PathBuf, NoRuntime> {
    let path = env::var_os("PATH")
        .unwrap_or_else(|| "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".into());
    let mut found_itself = None;
    for program in env::split_paths(&path)
        .map(|folder| folder.join(name))
        .filter(|program| is_program(program))
    {
        if !is_this_program(&program) {
            return Ok(program);
        }
        found_itself = Some(program);
    }
    Err(found_itself.map_or_else(|| NoRuntime::NotOnPath(name.into()), NoRuntime::Itself))
}

fn is_program(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

fn is_this_program(path: &Path) -> bool {
    let identity = |path: &Path| -> io::Result<(u64, u64)> {
        fs::metadata(path).map(|meta| (meta.dev(), meta.ino()))
    };
    matches!((identity(path), identity(Path::new("/proc/self/exe"))), (Ok(a), Ok(b)) if a == b)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn the_name_of_a_runtime_is_that_behind_its_link() {
        let folder = tempfile::tempdir().unwrap();
        let [youki, crun, runc] =
            ["youki-0.7.0", "crun", "runc"].map(|name| folder.path().join(name));
        for program in [&youki, &crun] {
            fs::write(program, "#!/bin/sh\n").unwrap();
            fs::set_permissions(program, fs::Permissions::from_mode(0o755)).unwrap();
        }
        symlink(&youki, &runc).unwrap();
        let found = [&crun, &runc].map(|program| file_name(program));
        assert_eq!(found, ["crun", "youki-0.7.0"]);
    }
}
