//! Where the guard's remarks go.
//!
//! Under a shim, stderr is the container's own: remarks go to the runtime's log file then, which shims read, at levels
//! that are never mistaken for the runtime's last error. Without a log file they go to stderr. What keeps the guard from
//! its work (a broken config.json, say) is said in both places.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::PathBuf;

use bindguard_core::report::{BindReport, Loudness, Report};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::argv::Invocation;

/// The places to say something.
#[derive(Debug)]
pub struct Remarks {
    log: Option<Log>,
}

#[derive(Debug)]
struct Log {
    path: PathBuf,
    json: bool,
}

impl Remarks {
    /// For a call that creates a container.
    pub fn for_invocation(invocation: &Invocation) -> Self {
        let log = invocation.log.clone().map(|path| Log { path, json: invocation.log_is_json });
        Self { log }
    }

    /// For a call that is not looked at.
    pub fn on_stderr() -> Self {
        Self { log: None }
    }

    /// Says what was found and done.
    pub fn tell(&self, report: &Report) {
        for problem in &report.problems {
            self.problem(&in_bundle(report, problem));
        }
        for (loudness, remark) in report.binds.iter().filter_map(BindReport::remark) {
            let written = self.log.as_ref().is_some_and(|log| log.append(level(loudness), &remark).is_ok());
            if !written && loudness == Loudness::Warning {
                on_stderr(&remark);
            }
        }
    }

    /// Says what kept the guard from its work.
    pub fn problem(&self, problem: &str) {
        self.say("warning", problem);
    }

    /// Says why the real runtime cannot run.
    pub fn fatal(&self, problem: &str) {
        self.say("error", problem);
    }

    fn say(&self, level: &str, text: &str) {
        if let Some(log) = &self.log {
            // Stderr is next.
            let _ = log.append(level, text);
        }
        on_stderr(text);
    }
}

impl Log {
    /// Appends a line in the form that runc's own lines have.
    fn append(&self, level: &str, text: &str) -> io::Result<()> {
        let time = OffsetDateTime::now_utc().format(&Rfc3339).unwrap_or_default();
        let msg = format!("bindguard: {text}");
        let line = if self.json {
            format!("{}\n", serde_json::json!({ "level": level, "msg": msg, "time": time }))
        } else {
            format!("time=\"{time}\" level={level} msg={msg:?}\n")
        };
        OpenOptions::new().append(true).create(true).open(&self.path)?.write_all(line.as_bytes())
    }
}

fn in_bundle(report: &Report, problem: &str) -> String {
    match &report.bundle {
        Some(bundle) => format!("bundle {}: {problem}", bundle.display()),
        None => problem.to_owned(),
    }
}

fn level(loudness: Loudness) -> &'static str {
    match loudness {
        Loudness::Info => "info",
        Loudness::Warning => "warning",
    }
}

fn on_stderr(text: &str) {
    // There is no third place to complain in.
    let _ = writeln!(io::stderr(), "bindguard: {}", in_one_line(text));
}

/// Paths and annotations are the pod's: they begin no line of their own, and do nothing to a terminal.
fn in_one_line(text: &str) -> String {
    let shown = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.to_string() };
    text.chars().map(shown).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_shown_and_not_done() {
        assert_eq!(in_one_line("a\nb\u{1b}[2J \u{e9}"), "a\\nb\\u{1b}[2J \u{e9}");
    }
}
