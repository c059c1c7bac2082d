//! The lines about repairs between creates: of a volume's subpaths on the host, and of a running
//! container, whose mounts are refreshed or released.

use std::path::Path;

use bindguard_core::report::{RebindLine, RefreshLine, ReleaseLine};
use bindguard_sys::journal::append;
use serde::Serialize;

use super::{MAX_LINE, RecordError, cut_all, fitting, now};

/// Appends a line about the subpaths of a volume, with the time in UTC.
///
/// # Errors
/// If the line cannot be written.
pub fn record_rebind(journal: &Path, mut line: RebindLine) -> Result<(), RecordError> {
    line.time = now();
    append_short(journal, line, |mut line| {
        let all = line.binds.len();
        line.binds = fitting(line.binds);
        line.omitted_binds = Some(all - line.binds.len());
        line.problems = cut_all(&line.problems);
        line
    })
}

/// Appends a line about a running container, with the time in UTC.
///
/// # Errors
/// If the line cannot be written.
pub fn record_refresh(journal: &Path, mut line: RefreshLine) -> Result<(), RecordError> {
    line.time = now();
    append_short(journal, line, |mut line| {
        let all = line.mounts.len();
        line.mounts = fitting(line.mounts);
        line.omitted_mounts = Some(all - line.mounts.len());
        line.problems = cut_all(&line.problems);
        line
    })
}

/// Appends a line about the copies that a running container was to release, with the time in UTC.
///
/// # Errors
/// If the line cannot be written.
pub fn record_release(journal: &Path, mut line: ReleaseLine) -> Result<(), RecordError> {
    line.time = now();
    append_short(journal, line, |mut line| {
        let all = line.copies.len();
        line.copies = fitting(line.copies);
        line.omitted_copies = Some(all - line.copies.len());
        line
    })
}

fn append_short<L: Serialize>(
    journal: &Path,
    line: L,
    shorten: impl FnOnce(L) -> L,
) -> Result<(), RecordError> {
    let mut text = serde_json::to_string(&line)?;
    if text.len() > MAX_LINE {
        text = serde_json::to_string(&shorten(line))?;
    }
    Ok(append(journal, &text)?)
}
