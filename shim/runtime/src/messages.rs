//! The guard's messages, and their destinations.
//!
//! Under a shim, stderr is the container's own. Messages then go to the runtime's log file, which
//! shims read, at levels that are never mistaken for the runtime's last error. Without a log file
//! they go to stderr. A problem that stops the guard (for example a broken config.json) goes to
//! both, unless bindguard's own shim is the caller: it passes the log file on to containerd's log,
//! and the container's log stays clean. On a full disk such a message is lost: on stderr it would
//! look like the runtime's error.

use std::error::Error;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use bindguard_core::error_chain;
use bindguard_core::report::{BindReport, Report, Severity};
use bindguard_core::text::cut;
use bindguard_guard::{leave_room, with_size_errors};
use nix::libc::O_NONBLOCK;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::argv::Invocation;
use crate::privilege;
use crate::stderr;

/// The limit of a remark, in bytes: two paths and the text about them.
const MAX_REMARK: usize = 16 << 10;

/// The destinations of messages.
#[derive(Debug)]
pub struct Messages {
    log: Option<RuntimeLog>,
    log_is_forwarded: bool,
}

#[derive(Debug)]
struct RuntimeLog {
    path: PathBuf,
    json: bool,
}

impl Messages {
    /// For a call that creates a container. `log_is_forwarded`: the caller shows the log file's
    /// content, whatever the result of the call.
    pub fn for_invocation(invocation: &Invocation, log_is_forwarded: bool) -> Self {
        let log = invocation.log.clone().map(|path| RuntimeLog {
            path,
            json: invocation.log_is_json,
        });
        Self {
            log,
            log_is_forwarded,
        }
    }

    /// For a call that is not checked.
    pub fn on_stderr() -> Self {
        Self {
            log: None,
            log_is_forwarded: false,
        }
    }

    /// Reports the findings and the actions.
    pub fn report_findings(&self, report: &Report) {
        for problem in &report.problems {
            self.problem(&in_bundle(report, problem));
        }
        for (severity, remark) in report.binds.iter().filter_map(BindReport::log_message) {
            let written = self
                .log
                .as_ref()
                .is_some_and(|log| log.append(level(severity), &remark).is_ok());
            if !written && !self.log_is_forwarded && severity == Severity::Warning {
                stderr::write_line(&remark);
            }
        }
    }

    /// Reports a mistake of the node's config. A container's own stderr gets it only without a log
    /// file.
    pub fn remark(&self, mistake: &str) {
        let written = self
            .log
            .as_ref()
            .is_some_and(|log| log.append("warning", mistake).is_ok());
        if !written && !self.log_is_forwarded {
            stderr::write_line(mistake);
        }
    }

    /// Reports a problem that stopped the guard.
    pub fn problem(&self, problem: &str) {
        self.write("warning", problem, self.log_is_forwarded);
    }

    /// Reports why the journal has no line. It belongs to the node's root.
    pub fn recorded<E: Error>(&self, recorded: Result<(), E>) {
        if let Err(problem) = recorded
            && privilege::is_root_of_node()
        {
            self.problem(&error_chain(&problem));
        }
    }

    /// Reports why the real runtime cannot run.
    pub fn fatal(&self, problem: &str) {
        self.write("error", problem, false);
    }

    fn write(&self, level: &str, text: &str, may_be_lost: bool) {
        let written = self
            .log
            .as_ref()
            .is_some_and(|log| log.append(level, text).is_ok());
        if !(may_be_lost || written && self.log_is_forwarded) {
            stderr::write_line(text);
        }
    }
}

impl RuntimeLog {
    /// Appends a line in the format of runc's own lines.
    fn append(&self, level: &str, text: &str) -> io::Result<()> {
        let time = OffsetDateTime::now_utc()
            .format(&Rfc3339)
            .unwrap_or_default();
        let msg = format!("bindguard: {}", cut(text, MAX_REMARK));
        let line = if self.json {
            format!(
                "{}\n",
                serde_json::json!({ "level": level, "msg": msg, "time": time })
            )
        } else {
            format!("time=\"{time}\" level={level} msg={msg:?}\n")
        };
        // A fifo without a reader is an error, not a wait.
        let mut file = OpenOptions::new()
            .append(true)
            .create(true)
            .mode(0o644)
            .custom_flags(O_NONBLOCK)
            .open(&self.path)?;
        leave_room(&file)?;
        with_size_errors(|| file.write_all(line.as_bytes()))
    }
}

fn in_bundle(report: &Report, problem: &str) -> String {
    match &report.bundle {
        Some(bundle) => format!("bundle {}: {problem}", bundle.display()),
        None => problem.to_owned(),
    }
}

fn level(severity: Severity) -> &'static str {
    match severity {
        Severity::Info => "info",
        Severity::Warning => "warning",
    }
}
