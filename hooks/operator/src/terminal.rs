//! Output on an operator's terminal.

use std::fmt::Display;
use std::io;
use std::io::Write;

use anyhow::Context;
use bindguard_core::text::{json_for_terminals, one_line};
use serde::Serialize;

/// Prints a report for programs.
pub fn print_json(report: &impl Serialize) -> anyhow::Result<()> {
    print_text(&json_text(report)?)
}

/// A report for programs. Characters that reorder or rewrite a terminal's lines are escaped, as JSON
/// can escape every character.
pub fn json_text(report: &impl Serialize) -> anyhow::Result<String> {
    let json = serde_json::to_string_pretty(report).context("write the report as JSON")?;
    Ok(json_for_terminals(&json).into_owned() + "\n")
}

/// Prints text, with colours if the terminal supports them.
pub fn print_text(text: &str) -> anyhow::Result<()> {
    print_bytes(text.as_bytes())
}

/// Reports an error or a remark on stderr, in a single line: a pod may have chosen part of the
/// text.
pub fn print_remark(remark: impl Display) {
    // `bindguard diagnose 2>&1 | head`: the reader closed the pipe
    let _ = writeln!(io::stderr(), "bindguard: {}", one_line(&remark.to_string()));
}

/// Prints bytes that may not be text.
pub fn print_bytes(bytes: &[u8]) -> anyhow::Result<()> {
    print_while_read(bytes).map(drop)
}

/// The same. False if the reader closed the pipe: `bindguard diagnose | head`.
pub fn print_while_read(bytes: &[u8]) -> anyhow::Result<bool> {
    let mut out = anstream::stdout();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        written => written.context("write to stdout").map(|()| true),
    }
}
