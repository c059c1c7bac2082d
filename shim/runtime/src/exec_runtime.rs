//! Finds the real runtime and executes it, and reports the guard's progress to the shim before.

use std::env;
use std::ffi::{CString, OsString};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use bindguard_core::handover::{ATTEMPT_VARIABLE, GuardAnswer, PIPE_VARIABLE, RUNTIME_VARIABLE};
use bindguard_guard::{inherited_pipe, restore_inherited_state};
use nix::fcntl::OFlag;
use nix::unistd::{execv, execve};

use crate::messages::Messages;

/// The exit status of a shell for a command that cannot be run.
const CANNOT_RUN: u8 = 127;

/// The variables that configure bindguard, and that the runtime does not need.
const OWN_VARIABLES: [&str; 3] = [RUNTIME_VARIABLE, PIPE_VARIABLE, ATTEMPT_VARIABLE];

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
    let problem = match find(configured) {
        Ok(runtime) => {
            let error = execute(&runtime, args);
            format!("run the OCI runtime {}: {error}", runtime.display())
        }
        Err(error) => error.to_string(),
    };
    messages.fatal(&problem);
    ExitCode::from(CANNOT_RUN)
}

/// The name of the real runtime's file, such as `runc` or `youki-0.7.0`; empty if there is none.
pub fn file_name(configured: &Path) -> OsString {
    let without_links = |runtime: PathBuf| {
        let mut options = File::options();
        let options = options.read(true).custom_flags(OFlag::O_PATH.bits());
        let file = options.open(runtime)?;
        fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))
    };
    match find(configured).map(without_links) {
        Ok(Ok(file)) => file.file_name().unwrap_or_default().to_owned(),
        _ => OsString::new(),
    }
}

/// [`std::process::Command`] would sort the environment, and drop entries that are not
/// `NAME=VALUE`.
fn execute(runtime: &Path, args: &[OsString]) -> io::Error {
    let Ok(path) = CString::new(runtime.as_os_str().as_bytes()) else {
        return io::ErrorKind::InvalidInput.into();
    };
    let mut argv = vec![path.clone()];
    for arg in args {
        // Arguments came through an execve themselves: none contains a NUL.
        argv.extend(CString::new(arg.as_bytes()));
    }
    restore_inherited_state();
    if !OWN_VARIABLES.iter().any(|own| env::var_os(own).is_some()) {
        let Err(errno) = execv(&path, &argv);
        return errno.into();
    }
    let mut environment = Vec::new();
    for (name, value) in env::vars_os() {
        if !OWN_VARIABLES.iter().any(|own| name == *own) {
            let entry = [name.as_bytes(), b"=", value.as_bytes()].concat();
            environment.extend(CString::new(entry));
        }
    }
    let Err(errno) = execve(&path, &argv, &environment);
    errno.into()
}

/// The environment's runtime, else the config's. Either may turn out to be this very program (an
/// installation in runc's place, or a `BinaryName` that names it): then the next `runc` on `PATH`
/// is used.
fn find(configured: &Path) -> Result<PathBuf, NoRuntime> {
    let of_environment = env::var_os(RUNTIME_VARIABLE).filter(|name| !name.is_empty());
    let first = of_environment.as_deref().map_or(configured, Path::new);
    match locate(first) {
        Err(itself @ NoRuntime::Itself(_)) => {
            let others = [configured, Path::new("runc")];
            let found = others.into_iter().find_map(|other| locate(other).ok());
            found.ok_or(itself)
        }
        found => found,
    }
}

fn locate(name: &Path) -> Result<PathBuf, NoRuntime> {
    if name.as_os_str().as_bytes().contains(&b'/') {
        let name = name.to_owned();
        return match is_this_program(&name) {
            true => Err(NoRuntime::Itself(name)),
            false => Ok(name),
        };
    }
    let path = env::var_os("PATH")
        .unwrap_or_else(|| "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".into());
    let mut none = NoRuntime::NotOnPath(name.to_owned());
    for folder in env::split_paths(&path) {
        let program = folder.join(name);
        let is_program = fs::metadata(&program)
            .is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0);
        if !is_program {
            continue;
        }
        if !is_this_program(&program) {
            return Ok(program);
        }
        none = NoRuntime::Itself(program);
    }
    Err(none)
}

fn is_this_program(path: &Path) -> bool {
    match (fs::metadata(path), fs::metadata("/proc/self/exe")) {
        (Ok(one), Ok(other)) => (one.dev(), one.ino()) == (other.dev(), other.ino()),
        _ => false,
    }
}

/// The pipe to the shim, if the shim passed a pipe, and the attempt.
///
/// The shim gives the guard the write end of a pipe and a deadline. The first line reports that the
/// runtime begins now, or that nothing was repaired; a pipe that closes without a line means that
/// the guard died. A second line, which an older shim does not read, explains a failure of the
/// runtime. Without bindguard's shim the pipe does not exist.
#[derive(Debug)]
pub struct Handover {
    pub pipe: Option<OwnedFd>,
    /// The number of this create of the container, counted from 0; 0 without a shim of bindguard's.
    pub attempt: u32,
}

impl Handover {
    /// From the environment. A value that is not a pipe's number counts as missing.
    pub fn from_environment() -> Self {
        let number = |name| env::var(name).ok()?.parse().ok();
        let pipe = number(PIPE_VARIABLE).and_then(inherited_pipe);
        // A later attempt may end without a container, which only a shim understands.
        let attempt = pipe.as_ref().and(number(ATTEMPT_VARIABLE)).unwrap_or(0);
        Self { pipe, attempt }
    }

    /// Sends the answer. `unrepaired`: the reason for which the runtime may fail.
    pub fn answer(&self, answer: &GuardAnswer, unrepaired: Option<&str>) {
        if let Some(pipe) = &self.pipe
            && let Ok(pipe) = pipe.try_clone()
        {
            // A shim that no longer reads has given up on the guard, and has ended this process or
            // is about to.
            let _ = File::from(pipe).write_all(answer.text(unrepaired).as_bytes());
        }
    }
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
