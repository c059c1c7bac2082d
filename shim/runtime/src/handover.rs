//! The end of the guard's work: its messages, its answer to the shim, and the real runtime, which
//! this process becomes.

use std::env;
use std::error::Error;
use std::ffi::{CString, OsString};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write, stderr};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};

use bindguard_config::Config;
use bindguard_core::error_chain;
use bindguard_core::handover::{ATTEMPT_VARIABLE, GuardAnswer, PIPE_VARIABLE, RUNTIME_VARIABLE};
use bindguard_core::report::Report;
use bindguard_core::text::{cut, one_line};
use bindguard_guard::{
    Handle, inherited_pipe, leave_room, restore_inherited_state, with_size_errors,
};
use nix::libc::O_NONBLOCK;
use nix::unistd::{execv, execve};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::argv::{Invocation, Log};

// The messages.
//
// Under a shim, stderr is the container's own. Messages then go to the runtime's log file, which
// shims read, at levels that are never mistaken for the runtime's last error. Without a log file
// they go to stderr. A problem that stops the guard (for example a broken config.json) goes to
// both, unless bindguard's own shim is the caller: it passes the log file on to containerd's log,
// and the container's log stays clean. On a full disk such a message is lost: on stderr it would
// look like the runtime's error.

/// The limit of a remark, in bytes: two paths and the text about them.
const MAX_REMARK: usize = 16 << 10;
/// With its prefix less than 4096 bytes, `PIPE_BUF`: a writable pipe takes that much at once
/// (pipe(7)).
const MAX_LINE: usize = 2048;
/// The limit of all lines on stderr together: an eighth of a pipe.
const MAX_OUTPUT: usize = 8192;

static WRITTEN: AtomicUsize = AtomicUsize::new(0);

#[derive(Debug, Default)]
pub struct Messages {
    log: Log,
    log_is_forwarded: bool,
}

impl Messages {
    /// For a call that creates a container. `log_is_forwarded`: the caller shows the log file's
    /// content, whatever the result of the call.
    pub fn for_invocation(invocation: &Invocation, log_is_forwarded: bool) -> Self {
        Self {
            log: invocation.log.clone(),
            log_is_forwarded,
        }
    }

    /// Reports the findings and the actions.
    pub fn report_findings(&self, report: &Report) {
        for problem in &report.problems {
            match &report.bundle {
                Some(bundle) => self.problem(&format!("bundle {}: {problem}", bundle.display())),
                None => self.problem(problem),
            }
        }
        for bind in &report.binds {
            match bind.log_message() {
                None => {}
                Some(remark) if bind.is_repaired() => {
                    self.append("info", &remark);
                }
                Some(remark) => self.remark(&remark),
            }
        }
    }

    /// Reports a mistake of the node's config, or a finding. A container's own stderr gets it only
    /// without a log file.
    pub fn remark(&self, remark: &str) {
        if !self.append("warning", remark) && !self.log_is_forwarded {
            write_line(remark);
        }
    }

    /// Reports a problem that stopped the guard.
    pub fn problem(&self, problem: &str) {
        self.append("warning", problem);
        if !self.log_is_forwarded {
            write_line(problem);
        }
    }

    /// Writes a line of the journal, if the node has a journal, or reports why there is no line. It
    /// belongs to the node's root.
    pub fn record<E: Error>(&self, config: &Config, write: impl FnOnce(&Path) -> Result<(), E>) {
        if let Some(journal) = config.journal()
            && let Err(problem) = write(journal)
            && is_root_of_node()
        {
            self.problem(&error_chain(&problem));
        }
    }

    /// Reports why the real runtime cannot run.
    pub fn fatal(&self, problem: &str) {
        if !self.append("error", problem) || !self.log_is_forwarded {
            write_line(problem);
        }
    }

    /// Appends a line to the log in the format of runc's own lines. False without a log.
    fn append(&self, level: &str, text: &str) -> bool {
        let Some(log) = &self.log.file else {
            return false;
        };
        let time = OffsetDateTime::now_utc()
            .format(&Rfc3339)
            .unwrap_or_default();
        let msg = format!("bindguard: {}", cut(text, MAX_REMARK));
        let line = if self.log.is_json {
            let line = serde_json::json!({ "level": level, "msg": msg, "time": time });
            format!("{line}\n")
        } else {
            format!("time=\"{time}\" level={level} msg={msg:?}\n")
        };
        let write = || -> io::Result<()> {
            let mut file = OpenOptions::new()
                .append(true)
                .create(true)
                .mode(0o644)
                // A fifo without a reader is an error, not a wait.
                .custom_flags(O_NONBLOCK)
                .open(log)?;
            leave_room(&file)?;
            with_size_errors(|| file.write_all(line.as_bytes()))
        };
        write().is_ok()
    }
}

/// Writes a line on stderr, cut if it is long. The pod chooses paths and annotations.
///
/// Stderr may be the container's own. Under a shim the pipe has no reader before the container
/// exists. A guard that waited for space would be killed at its deadline. A guard that left no space
/// would make the runtime wait for ever when it reports an error. So a line is written only if it
/// fits at once, and only a few KiB of them.
fn write_line(text: &str) {
    let line = format!(
        "bindguard: {}\n",
        cut(&one_line(&cut(text, MAX_LINE)), MAX_LINE)
    );
    let written = WRITTEN.load(Ordering::Relaxed) + line.len();
    let stderr = stderr();
    let mut fds = [PollFd::new(&stderr, PollFlags::OUT)];
    if written <= MAX_OUTPUT
        && matches!(poll(&mut fds, Some(&Timespec::default())), Ok(1..))
        && fds[0].revents().contains(PollFlags::OUT)
        && rustix::io::write(&stderr, line.as_bytes()).is_ok()
    {
        WRITTEN.store(written, Ordering::Relaxed);
    }
}

/// True if the caller may write the journal: rootless engines call the runtime as any user, most
/// often in a user namespace. Root of a separate user namespace need not have access.
fn is_root_of_node() -> bool {
    rustix::process::geteuid().is_root()
        && !fs::read_to_string("/proc/self/uid_map").is_ok_and(|map| maps_some(&map))
}

/// True for a namespace that maps only some users. The node's namespace has the identity map of all
/// users.
fn maps_some(uid_map: &str) -> bool {
    uid_map.split_whitespace().ne(["0", "0", "4294967295"])
}

// The real runtime, and the answer to the shim before.

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
    let runtime = find(configured).ok();
    let opened = runtime.and_then(|runtime| Handle::follow(&runtime).ok());
    let without_links = opened.and_then(|opened| opened.resolved_path().ok());
    let name = without_links.as_deref().and_then(Path::file_name);
    name.unwrap_or_default().to_owned()
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
    pub pipe: Option<File>,
    /// The number of this create of the container, counted from 0; 0 without a shim of bindguard's.
    pub attempt: u32,
}

impl Handover {
    /// From the environment. A value that is not a pipe's number counts as missing.
    pub fn from_environment() -> Self {
        let number = |name| env::var(name).ok()?.parse().ok();
        let pipe = number(PIPE_VARIABLE)
            .and_then(inherited_pipe)
            .map(File::from);
        // A later attempt may end without a container, which only a shim understands.
        let attempt = pipe.as_ref().and(number(ATTEMPT_VARIABLE)).unwrap_or(0);
        Self { pipe, attempt }
    }

    /// Sends the answer. `unrepaired`: the reason for which the runtime may fail.
    pub fn answer(&self, answer: &GuardAnswer, unrepaired: Option<&str>) {
        if let Some(mut pipe) = self.pipe.as_ref() {
            // A shim that no longer reads has given up on the guard, and has ended this process or
            // is about to.
            let _ = pipe.write_all(answer.text(unrepaired).as_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nodes_own_namespace_maps_all_users() {
        assert!(!maps_some("         0          0 4294967295\n"));
        assert!(maps_some(
            "         0       1000          1\n         1     100000      65536\n"
        ));
        assert!(maps_some("         0     100000      65536\n"));
    }
}

#[cfg(test)]
mod runtime_tests {
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
