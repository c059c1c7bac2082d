//! The journal's lines: a report with the time and the container's id.

use std::path::Path;

use bindguard_core::report::{BindReport, Container, JournalLine, Report};
use bindguard_core::text;
use bindguard_sys::journal::{JournalError, append};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// One entry of the journal.
#[derive(Debug, Clone, Copy)]
pub struct JournalEntry<'a> {
    /// The container's id, as the runtime gets it.
    pub id: Option<&'a str>,
    /// Which create of the container this was, counted from 0.
    pub attempt: u32,
    /// The container's init, in a line about a container that was created.
    pub pid: Option<u32>,
    /// The findings and outcomes.
    pub report: &'a Report,
}

/// Why an entry was not recorded.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// It has no JSON form.
    #[error("write a line of the journal as JSON")]
    Json(#[from] serde_json::Error),
    /// The file could not be written.
    #[error(transparent)]
    Append(#[from] JournalError),
}

/// The size limit of a line, in bytes: a journal is rotated only after a line, so one line must not exceed the journal's
/// limit.
const LONGEST: usize = 256 << 10;

/// The size limit of a text, in bytes, when a line would be too long. A path is no longer than this.
const LONGEST_TEXT: usize = 4096;

/// The number of problems that are kept when a line would be too long.
const MOST_PROBLEMS: usize = 16;

/// Appends an entry, with the time in UTC.
///
/// # Errors
/// If the line cannot be written.
pub fn record(journal: &Path, entry: &JournalEntry<'_>) -> Result<(), RecordError> {
    let mut line = written(entry, None)?;
    if line.len() > LONGEST {
        let (report, omitted_binds) = shortened(entry.report);
        let id = entry.id.map(cut);
        line = written(&JournalEntry { id: id.as_deref(), report: &report, ..*entry }, Some(omitted_binds))?;
    }
    Ok(append(journal, &line)?)
}

fn written(entry: &JournalEntry<'_>, omitted_binds: Option<usize>) -> Result<String, serde_json::Error> {
    let mut line = JournalLine::new(entry.report);
    line.time = OffsetDateTime::now_utc().format(&Rfc3339).ok();
    line.id = entry.id.map(str::to_owned);
    (line.attempt, line.pid, line.omitted_binds) = (entry.attempt, entry.pid, omitted_binds);
    serde_json::to_string(&line)
}

/// The same report in at most half of a line, and the number of binds left out. Healthy binds are left out first.
fn shortened(report: &Report) -> (Report, usize) {
    let mut room = LONGEST / 2;
    let mut fits = |bind: &&BindReport| {
        let size = serde_json::to_string(bind).map_or(usize::MAX, |text| text.len() + 1);
        let fits = size <= room;
        room -= if fits { size } else { 0 };
        fits
    };
    let (found, well): (Vec<_>, Vec<_>) = report.binds.iter().partition(|bind| bind.finding.verdict.is_finding());
    let binds: Vec<BindReport> = found.into_iter().chain(well).filter(&mut fits).cloned().collect();
    let Container { name, pod, namespace, uid } = &report.container;
    let [name, pod, namespace, uid] = [name, pod, namespace, uid].map(|text| text.as_deref().map(cut));
    let omitted_binds = report.binds.len() - binds.len();
    let short = Report {
        bundle: report.bundle.as_deref().map(|path| cut(&path.to_string_lossy()).into()),
        container: Container { name, pod, namespace, uid },
        binds,
        foreign: report.foreign,
        problems: report.problems.iter().take(MOST_PROBLEMS).map(|problem| cut(problem)).collect(),
        inspection_us: report.inspection_us,
        duration_us: report.duration_us,
    };
    (short, omitted_binds)
}

fn cut(text: &str) -> String {
    text::cut(text, LONGEST_TEXT).into_owned()
}
