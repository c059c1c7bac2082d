//! Reports on a terminal, and for programs.
//!
//! Text is coloured on a terminal that supports it (`NO_COLOR` is respected); `--json` is the same
//! report, whole.

mod bundle;
mod ended_pods;
mod node;
mod style;

use std::fmt::Display;
use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::Context;
use bindguard_core::text::one_line;
use serde::Serialize;

pub use bundle::{exit_code, print, print_bind};
pub use ended_pods::{ended_pods_exit_code, print_ended_pods};
pub use node::{node_exit_code, print_node};
pub use style::{DIMMED, FAULTY, HEALTHY, Lines, UNCHECKED, verdict_style};

/// A number and its noun.
pub fn counted<N: PartialEq + From<u8> + Display>(count: N, one: &str, more: &str) -> String {
    let noun = if count == N::from(1) { one } else { more };
    format!("{count} {noun}")
}

/// The exit code of an incomplete check, for scripts.
pub const COULD_NOT_TELL: u8 = 2;

/// Prints a report for programs.
pub fn print_json(report: &impl Serialize) -> anyhow::Result<()> {
    print_text(&(serde_json::to_string_pretty(report).context("write the report as JSON")? + "\n"))
}

/// Prints text, with colours if the terminal supports them.
pub fn print_text(text: &str) -> anyhow::Result<()> {
    print_bytes(text.as_bytes())
}

/// Reports an error or a remark on stderr, in one line: a pod may have chosen part of the text.
pub fn print_remark(remark: impl Display) {
    eprintln!("bindguard: {}", one_line(&remark.to_string()));
}

/// Prints bytes that may not be text.
pub fn print_bytes(bytes: &[u8]) -> anyhow::Result<()> {
    let mut out = anstream::stdout();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        // `bindguard diagnose | head`: the reader closed the pipe.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.context("write to stdout"),
    }
}

/// 2 if the check is incomplete, else 1 if there are findings, else 0.
pub fn code(is_incomplete: bool, has_findings: bool) -> ExitCode {
    match (is_incomplete, has_findings) {
        (true, _) => ExitCode::from(COULD_NOT_TELL),
        (false, true) => ExitCode::FAILURE,
        (false, false) => ExitCode::SUCCESS,
    }
}

/// The example in docs/json.md below a heading.
#[cfg(test)]
pub fn documented(heading: &str) -> &'static str {
    let document = include_str!("../../../../docs/json.md");
    let below = document
        .split_once(&format!("\n## {heading}\n"))
        .map(|(_, below)| below);
    let block = below
        .and_then(|below| below.split_once("```json\n"))
        .and_then(|(_, block)| block.split_once("```"));
    block
        .map(|(block, _)| block)
        .unwrap_or_else(|| panic!("docs/json.md has no JSON below {heading}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_singular() {
        let texts = [0_u32, 1, 2].map(|count| counted(count, "time", "times"));
        assert_eq!(texts, ["0 times", "1 time", "2 times"]);
    }
}
