//! Writes the journal's lines: a report or a refresh, with the time, in at most [`MAX_LINE`] bytes.

mod between_creates;
mod create;

use bindguard_core::text;
use bindguard_sys::journal::JournalError;
use serde::Serialize;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

pub use between_creates::{record_rebind, record_refresh, record_release};
pub use create::{JournalEntry, record, record_nri_create, record_unchecked};

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

/// Keeps the first items that fit into half of a line.
fn fitting<T: Serialize>(items: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut room = MAX_LINE / 2;
    let mut fits = |item: &T| {
        let size = serde_json::to_string(item).map_or(usize::MAX, |text| text.len() + 1);
        let fits = size <= room;
        room -= if fits { size } else { 0 };
        fits
    };
    items.into_iter().filter(&mut fits).collect()
}

fn cut(text: &str) -> String {
    text::cut(text, MAX_TEXT).into_owned()
}

fn cut_all(problems: &[String]) -> Vec<String> {
    problems
        .iter()
        .take(MAX_PROBLEMS)
        .map(|problem| cut(problem))
        .collect()
}
