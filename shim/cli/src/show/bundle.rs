//! The report on a bundle.

use std::process::ExitCode;

use bindguard_core::report::{BindReport, Report};

use super::{Lines, code, print_json, print_text, verdict_style};

/// Prints a report, as text or as one JSON object.
pub fn print(report: &Report, json: bool) -> anyhow::Result<()> {
    if json { print_json(report) } else { print_text(text(report).text()) }
}

/// 2 if there is a problem or an unknown verdict, else 1 if there are findings, else 0.
pub fn exit_code(report: &Report) -> ExitCode {
    let unknown = report.binds.iter().any(|bind| bind.verdict == "unknown");
    code(!report.problems.is_empty() || unknown, report.binds.iter().any(|bind| bind.reason.is_some()))
}

fn text(report: &Report) -> Lines {
    let mut lines = Lines::default();
    for problem in &report.problems {
        lines.headed("problem", verdict_style("problem"), problem);
    }
    for bind in &report.binds {
        tell(bind, &mut lines);
    }
    let found = report.binds.iter().filter(|bind| bind.reason.is_some()).count();
    lines.line(&format!("{} checked, {found} with findings, {} foreign", report.binds.len(), report.foreign));
    lines
}

/// The verdict, the bind, the reason, and the outcome.
pub(super) fn tell(bind: &BindReport, lines: &mut Lines) {
    let destination = bind.destination.as_ref().map(|path| format!(" at {}", path.display())).unwrap_or_default();
    lines.headed(bind.verdict, verdict_style(bind.verdict), &format!("{}{destination}", bind.source.display()));
    let outcome = bind.outcome.as_ref().map(|outcome| outcome.in_words());
    for line in [bind.reason.as_ref(), outcome.as_ref()].into_iter().flatten() {
        lines.below(line);
    }
}
