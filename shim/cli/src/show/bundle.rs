//! The report on a bundle.

use std::borrow::Cow;
use std::process::ExitCode;

use bindguard_core::judge::VerdictName;
use bindguard_core::report::{BindRecord, BindReport, Report};

use super::{Lines, code, print_report, verdict_style};

/// Prints a report, as text or as one JSON object.
pub fn print(report: &Report, json: bool) -> anyhow::Result<()> {
    print_report(report, json, text)
}

/// 2 if there is a problem or an unknown verdict, else 1 if there are findings, else 0.
pub fn exit_code(report: &Report) -> ExitCode {
    let unknown = report
        .binds
        .iter()
        .any(|bind| bind.verdict() == VerdictName::Unknown);
    code(
        !report.problems.is_empty() || unknown,
        report.binds.iter().any(is_finding),
    )
}

fn text(report: &Report) -> Lines {
    let mut lines = Lines::default();
    for problem in &report.problems {
        lines.problem(problem);
    }
    for bind in &report.binds {
        print_bind(&bind.into(), &mut lines);
    }
    let found = report.binds.iter().filter(|bind| is_finding(bind)).count();
    lines.line(&format!(
        "{} checked, {found} with findings, {} foreign",
        report.binds.len(),
        report.foreign
    ));
    lines
}

fn is_finding(bind: &BindReport) -> bool {
    bind.finding.verdict.is_finding()
}

/// The verdict, the bind, the reason, and the outcome.
pub fn print_bind(bind: &BindRecord<'_>, lines: &mut Lines) {
    let destination = bind
        .destination
        .as_ref()
        .map(|path| format!(" at {path}"))
        .unwrap_or_default();
    lines.headed(
        bind.verdict.as_str(),
        verdict_style(bind.verdict),
        &format!("{}{destination}", bind.source),
    );
    let outcome = bind
        .outcome
        .as_ref()
        .map(|outcome| Cow::Owned(outcome.to_string()));
    for line in [bind.reason.as_deref().map(Cow::Borrowed), outcome]
        .into_iter()
        .flatten()
    {
        lines.below(&line);
    }
}
