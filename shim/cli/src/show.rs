//! A report on a terminal.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::process::ExitCode;

use anyhow::Context;
use bindguard_core::report::{BindReport, Outcome, Report};

use crate::COULD_NOT_TELL;

/// Prints a report, as text or as one JSON object.
pub fn print(report: &Report, json: bool) -> anyhow::Result<()> {
    let out = if json { serde_json::to_string_pretty(report)? + "\n" } else { text(report) };
    io::stdout().write_all(out.as_bytes()).context("write the report")
}

/// 2 when something could not be told, else 1 when something was found, else 0.
pub fn exit_code(report: &Report) -> ExitCode {
    if !report.problems.is_empty() || report.binds.iter().any(|bind| bind.verdict == "unknown") {
        ExitCode::from(COULD_NOT_TELL)
    } else if report.binds.iter().any(|bind| bind.reason.is_some()) {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    }
}

/// 2 when something could not be told, 1 when something is still not as it should be, else 0.
pub fn exit_code_after_repair(report: &Report) -> ExitCode {
    let is_mended = |bind: &BindReport| matches!(bind.outcome, Some(Outcome::Rebound { .. } | Outcome::AlreadyCurrent));
    if report.problems.is_empty() && report.binds.iter().all(|bind| bind.reason.is_none() || is_mended(bind)) {
        ExitCode::SUCCESS
    } else {
        exit_code(report)
    }
}

fn text(report: &Report) -> String {
    let mut out = String::new();
    for problem in &report.problems {
        let _ = writeln!(out, "problem    {problem}");
    }
    for bind in &report.binds {
        out.push_str(&lines(bind));
    }
    let found = report.binds.iter().filter(|bind| bind.reason.is_some()).count();
    let _ = writeln!(out, "{} looked at, {found} with findings, {} foreign", report.binds.len(), report.foreign);
    out
}

fn lines(bind: &BindReport) -> String {
    let mut out = format!("{:<10} {}", bind.verdict, bind.source.display());
    if let Some(destination) = &bind.destination {
        let _ = write!(out, " at {}", destination.display());
    }
    out.push('\n');
    let outcome = bind.outcome.as_ref().map(|outcome| outcome.in_words());
    for line in [bind.reason.as_ref(), outcome.as_ref()].into_iter().flatten() {
        let _ = writeln!(out, "{:<10} {line}", "");
    }
    out
}
