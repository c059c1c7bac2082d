//! Writes the journal's lines: a report or a refresh, with the time, in at most [`MAX_LINE`] bytes.

use std::path::Path;

use bindguard_core::identity::Identity;
use bindguard_core::report::{CreateLine, RebindLine, RefreshLine, ReleaseLine, Report, Unchecked};
use bindguard_core::text;
use bindguard_sys::Failure;
use bindguard_sys::journal::append;
use serde::Serialize;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::inspect::named_report;

/// Why an entry was not recorded.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// It has no JSON form.
    #[error("write a line of the journal as JSON")]
    Json(#[from] serde_json::Error),
    /// The file could not be written.
    #[error(transparent)]
    Append(#[from] Failure),
}

/// The size limit of a line, in bytes: a journal is rotated only after a line, so a line must not
/// exceed the journal's limit.
const MAX_LINE: usize = 256 << 10;

/// The size limit of a text, in bytes, when a line would be too long. A path is no longer than
/// this.
const MAX_TEXT: usize = 4096;

/// The number of problems that are kept when a line would be too long.
const MAX_PROBLEMS: usize = 16;

/// The time in UTC; none if the clock shows a year past 9999.
fn now() -> Option<String> {
    OffsetDateTime::now_utc().format(&Rfc3339).ok()
}

/// Keeps the first items that fit into half of a line. Returns the number of left-out items.
fn shorten<T: Serialize>(items: &mut Vec<T>) -> Option<usize> {
    let (all, mut room) = (items.len(), MAX_LINE / 2);
    items.retain(|item| {
        let size = serde_json::to_string(item).map_or(usize::MAX, |text| text.len() + 1);
        let fits = size <= room;
        room -= if fits { size } else { 0 };
        fits
    });
    Some(all - items.len())
}

fn cut(text: &str) -> String {
    text::cut(text, MAX_TEXT).into_owned()
}

fn cut_all(problems: &mut Vec<String>) {
    problems.truncate(MAX_PROBLEMS);
    for problem in problems {
        *problem = cut(problem);
    }
}

// The line about a create: a report with the time and the container's id.

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
    pub report: &'a Report,
}

impl<'a> JournalEntry<'a> {
    /// An entry about a create that a guard checked and admitted.
    pub fn of(report: &'a Report) -> Self {
        Self {
            id: None,
            attempt: 0,
            pid: None,
            refused: None,
            unchecked: None,
            report,
        }
    }
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
        refused,
        unchecked: Some(how),
        ..JournalEntry::of(&report)
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
        let entry = JournalEntry {
            id: id.as_deref(),
            ..*entry
        };
        line = written(&entry, new(&report), omitted_binds)?;
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
    line.attempt = entry.attempt;
    line.pid = entry.pid;
    line.omitted_binds = omitted_binds;
    line.refused = entry.refused.map(cut);
    line.unchecked = entry.unchecked;
    serde_json::to_string(&line)
}

/// The same report in at most half of a line, and the number of binds left out. Healthy binds are
/// left out first.
fn shortened(report: &Report) -> (Report, Option<usize>) {
    let mut short = report.clone();
    short
        .binds
        .sort_by_key(|bind| !bind.finding.verdict.is_finding());
    let omitted_binds = shorten(&mut short.binds);
    let bundle = report.bundle.as_deref();
    short.bundle = bundle.map(|path| cut(&path.to_string_lossy()).into());
    let Identity { container, pod } = &mut short.container;
    for name in [container, &mut pod.uid, &mut pod.namespace, &mut pod.name] {
        *name = name.as_deref().map(cut);
    }
    cut_all(&mut short.problems);
    (short, omitted_binds)
}

// The lines about repairs between creates: of a volume's subpaths on the host, and of a running
// container, whose mounts are refreshed or released.

/// Appends a line about the subpaths of a volume, with the time in UTC.
///
/// # Errors
/// If the line cannot be written.
pub fn record_rebind(journal: &Path, mut line: RebindLine) -> Result<(), RecordError> {
    line.time = now();
    append_short(journal, line, |line| {
        line.omitted_binds = shorten(&mut line.binds);
        cut_all(&mut line.problems);
    })
}

/// Appends a line about a running container, with the time in UTC.
///
/// # Errors
/// If the line cannot be written.
pub fn record_refresh(journal: &Path, mut line: RefreshLine) -> Result<(), RecordError> {
    line.time = now();
    append_short(journal, line, |line| {
        line.omitted_mounts = shorten(&mut line.mounts);
        cut_all(&mut line.problems);
    })
}

/// Appends a line about the copies that a running container was to release, with the time in UTC.
///
/// # Errors
/// If the line cannot be written.
pub fn record_release(journal: &Path, mut line: ReleaseLine) -> Result<(), RecordError> {
    line.time = now();
    append_short(journal, line, |line| {
        line.omitted_copies = shorten(&mut line.copies);
    })
}

fn append_short<L: Serialize>(
    journal: &Path,
    mut line: L,
    shorten: impl FnOnce(&mut L),
) -> Result<(), RecordError> {
    let mut text = serde_json::to_string(&line)?;
    if text.len() > MAX_LINE {
        shorten(&mut line);
        text = serde_json::to_string(&line)?;
    }
    Ok(append(journal, &text)?)
}
