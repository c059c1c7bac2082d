//! The line about a create: a report with the time and the container's id.

use std::path::Path;

use super::{MAX_LINE, RecordError, cut, cut_all, fitting, now};
use bindguard_core::identity::{Identity, PodName};
use bindguard_core::report::{BindReport, CreateLine, Report, Unchecked};
use bindguard_sys::journal::append;

use crate::admission::named_report;

/// An entry of the journal.
#[derive(Debug, Clone, Copy)]
pub struct JournalEntry<'a> {
    /// The container's id, as the runtime gets it.
    pub id: Option<&'a str>,
    /// Which create of the container this was, counted from 0.
    pub attempt: u32,
    /// The container's init, in a line about a container that was created.
    pub pid: Option<u32>,
    /// Why policy refused the create, if it did.
    pub refused: Option<&'a str>,
    /// Why no guard checked the create; none if a guard did.
    pub unchecked: Option<Unchecked>,
    /// The findings and outcomes.
    pub report: &'a Report,
}

/// Appends an entry, with the time in UTC.
///
/// # Errors
/// If the line cannot be written.
pub fn record(journal: &Path, entry: &JournalEntry<'_>) -> Result<(), RecordError> {
    record_as(journal, entry, |report| CreateLine::new(report))
}

/// Appends an entry of the NRI plugin. The shim may write its own entry about the same create.
///
/// # Errors
/// If the line cannot be written.
pub fn record_nri_create(journal: &Path, entry: &JournalEntry<'_>) -> Result<(), RecordError> {
    record_as(journal, entry, |report| CreateLine::of_nri_plugin(report))
}

/// Appends an entry about a create whose guard did not come to an end, with the names that the
/// bundle has. `refused`: why policy refused the create.
///
/// # Errors
/// If the line cannot be written.
pub fn record_unchecked(
    journal: &Path,
    (bundle, id): (&Path, Option<&str>),
    attempt: u32,
    (how, why): (Unchecked, &str),
    refused: Option<&str>,
) -> Result<(), RecordError> {
    let mut report = named_report(bundle);
    report
        .problems
        .push(format!("no guard checked this create: {why}"));
    let entry = JournalEntry {
        id,
        attempt,
        pid: None,
        refused,
        unchecked: Some(how),
        report: &report,
    };
    record(journal, &entry)
}

fn record_as(
    journal: &Path,
    entry: &JournalEntry<'_>,
    new: fn(&Report) -> CreateLine<&Report>,
) -> Result<(), RecordError> {
    let mut line = written(entry, new(entry.report), None)?;
    if line.len() > MAX_LINE {
        let (report, omitted_binds) = shortened(entry.report);
        let id = entry.id.map(cut);
        line = written(
            &JournalEntry {
                id: id.as_deref(),
                ..*entry
            },
            new(&report),
            Some(omitted_binds),
        )?;
    }
    Ok(append(journal, &line)?)
}

fn written(
    entry: &JournalEntry<'_>,
    mut line: CreateLine<&Report>,
    omitted_binds: Option<usize>,
) -> Result<String, serde_json::Error> {
    line.time = now();
    line.id = entry.id.map(str::to_owned);
    (line.attempt, line.pid, line.omitted_binds) = (entry.attempt, entry.pid, omitted_binds);
    line.refused = entry.refused.map(cut);
    line.unchecked = entry.unchecked;
    serde_json::to_string(&line)
}

/// The same report in at most half of a line, and the number of binds left out. Healthy binds are
/// left out first.
fn shortened(report: &Report) -> (Report, usize) {
    let (found, well): (Vec<_>, Vec<_>) = report
        .binds
        .iter()
        .partition(|bind| bind.finding.verdict.is_finding());
    let binds: Vec<BindReport> = fitting(found.into_iter().chain(well))
        .into_iter()
        .cloned()
        .collect();
    let shorter = |text: &Option<String>| text.as_deref().map(cut);
    let Identity { container, pod } = &report.container;
    let omitted_binds = report.binds.len() - binds.len();
    let short = Report {
        bundle: report
            .bundle
            .as_deref()
            .map(|path| cut(&path.to_string_lossy()).into()),
        container: Identity {
            container: shorter(container),
            pod: PodName {
                uid: shorter(&pod.uid),
                namespace: shorter(&pod.namespace),
                name: shorter(&pod.name),
            },
        },
        binds,
        foreign: report.foreign,
        unproven: report.unproven,
        problems: cut_all(&report.problems),
        inspection_us: report.inspection_us,
        duration_us: report.duration_us,
    };
    (short, omitted_binds)
}
