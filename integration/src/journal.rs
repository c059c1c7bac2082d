//! The journal of a node's guards, as a story fills and reads it.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

pub const JOURNAL: &str = "/run/bindguard/journal.jsonl";
/// The path of the rotated journal.
pub const ROTATED: &str = "/run/bindguard/journal.jsonl.1";

/// The size from which it is moved away, as docs/journal.md says.
const FULL: usize = 4 << 20;

/// Puts lines in its place: the next line makes it full. Returns how many.
pub fn fill() -> Result<usize> {
    let line = format!("{{\"filler\":\"{}\"}}\n", "x".repeat(1000));
    let lines = FULL / line.len();
    let missing = FULL - 1 - lines * line.len();
    // white space between two values of a line has no owner
    let text = line.repeat(lines - 1) + &line.replace(':', &format!(":{}", " ".repeat(missing)));
    fs::create_dir_all("/run/bindguard").context("make the journal's folder")?;
    fs::write(JOURNAL, text).context("fill the journal")?;
    Ok(lines)
}

/// The complete lines of a journal file; empty without the file.
pub fn lines(file: impl AsRef<Path>) -> Result<Vec<Value>> {
    let file = file.as_ref();
    if !file.exists() {
        return Ok(Vec::new());
    }
    let text = fs::read_to_string(file).with_context(|| format!("read {}", file.display()))?;
    ensure!(
        text.is_empty() || text.ends_with('\n'),
        "the last line of {} is cut off",
        file.display()
    );
    let whole = |line: &str| {
        serde_json::from_str(line).with_context(|| format!("parse the line {line:.200?}"))
    };
    text.lines().map(whole).collect()
}
