//! Writes the journal's lines: a report or a refresh, with the time, in at most [`MAX_LINE`] bytes.

use std::path::{Path, PathBuf};

use bindguard_core::identity::Identity;
use bindguard_core::report::{CreateLine, RebindLine, RefreshLine, ReleaseLine, Report, Unchecked};
use bindguard_core::text;
use bindguard_sys::Failure;
use bindguard_sys::journal::append;
use serde::Serialize;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::bundle::named_report;

/// The size limit of a line, in bytes: a journal is rotated only after a line, so a line must not
/// exceed the journal's limit.
const MAX_LINE: usize = 256 << 10;

/// The size limit of a text, in bytes, when a line would be too long. A path is no longer than
/// this.
const MAX_TEXT: usize = 4096;

/// The number of problems that are kept when a line would be too long.
const MAX_PROBLEMS: usize = 16;

fn json(line: &impl Serialize) -> Result<String, Failure> {
    serde_json::to_string(line).map_err(|error| Failure {
        act: "write a line of the journal as JSON".into(),
        path: PathBuf::new(),
        source: error.into(),
    })
}

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

// The line about a create.

/// Appends a line about a create, with the time in UTC.
///
/// # Errors
/// If the line cannot be written.
pub fn record(journal: &Path, line: CreateLine<&Report>) -> Result<(), Failure> {
    let short;
    let mut line = line;
    line.time = now();
    line.refused = line.refused.as_deref().map(cut);
    let mut text = json(&line)?;
    if text.len() > MAX_LINE {
        (short, line.omitted_binds) = shortened(line.report);
        line.report = &short;
        line.id = line.id.as_deref().map(cut);
        text = json(&line)?;
    }
    append(journal, &text)
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
) -> Result<(), Failure> {
    let mut report = named_report(bundle);
    let problem = format!("no guard checked this create: {why}");
    report.problems.push(problem);
    let mut line = CreateLine::new(&report);
    line.id = id.map(str::to_owned);
    line.attempt = attempt;
    line.unchecked = Some(how);
    line.refused = refused.map(str::to_owned);
    record(journal, line)
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
pub fn record_rebind(journal: &Path, mut line: RebindLine) -> Result<(), Failure> {
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
pub fn record_refresh(journal: &Path, mut line: RefreshLine) -> Result<(), Failure> {
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
pub fn record_release(journal: &Path, mut line: ReleaseLine) -> Result<(), Failure> {
    line.time = now();
    append_short(journal, line, |line| {
        line.omitted_copies = shorten(&mut line.copies);
    })
}

fn append_short<L: Serialize>(
    journal: &Path,
    mut line: L,
    shorten: impl FnOnce(&mut L),
) -> Result<(), Failure> {
    let mut text = json(&line)?;
    if text.len() > MAX_LINE {
        shorten(&mut line);
        text = json(&line)?;
    }
    append(journal, &text)
}
