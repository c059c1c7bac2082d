//! The guard's messages, and their destinations.
//!
//! Under a shim, stderr is the container's own. Messages then go to the runtime's log file, which
//! shims read, at levels that are never mistaken for the runtime's last error. Without a log file
//! they go to stderr. A problem that stops the guard (for example a broken config.json) goes to
//! both, unless bindguard's own shim is the caller: it passes the log file on to containerd's log,
//! and the container's log stays clean. On a full disk such a message is lost: on stderr it would
//! look like the runtime's error.

use std::error::Error;
use std::fs::{self, OpenOptions};
use std::io::{self, Write, stderr};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::{AtomicUsize, Ordering};

use bindguard_core::error_chain;
use bindguard_core::report::{Report, Severity};
use bindguard_core::text::{cut, one_line};
use bindguard_guard::{leave_room, with_size_errors};
use nix::libc::O_NONBLOCK;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::argv::{Invocation, Log};

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
                Some((Severity::Info, remark)) => {
                    self.append("info", &remark);
                }
                Some((Severity::Warning, remark)) => self.remark(&remark),
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

    /// Reports why the journal has no line. It belongs to the node's root.
    pub fn recorded<E: Error>(&self, recorded: Result<(), E>) {
        if let Err(problem) = recorded
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
