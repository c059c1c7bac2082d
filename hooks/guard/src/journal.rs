//! The journal's lines: a report with the time, the door and the container's id.

use std::path::Path;

use bindguard_core::report::Report;
use bindguard_sys::journal::append;
use serde::Serialize;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::causes::in_full;

/// One line of the journal.
#[derive(Debug, Serialize)]
pub struct Entry<'a> {
    /// The container's id, as the runtime gets it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<&'a str>,
    /// Which create of the container this was, counted from 0.
    pub attempt: u32,
    /// The container's init, in a line that tells what was found once it was made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// What was found and done.
    #[serde(flatten)]
    pub report: &'a Report,
}

#[derive(Serialize)]
struct Line<'a> {
    time: Option<String>,
    #[serde(flatten)]
    entry: &'a Entry<'a>,
}

/// Appends an entry, with the time in UTC.
///
/// # Errors
/// What keeps the line out of the journal, in one line.
pub fn record(journal: &Path, entry: &Entry<'_>) -> Result<(), String> {
    let time = OffsetDateTime::now_utc().format(&Rfc3339).ok();
    let line = serde_json::to_string(&Line { time, entry }).map_err(in_full)?;
    append(journal, &line).map_err(in_full)
}
