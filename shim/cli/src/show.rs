//! Reports on a terminal, and for programs.
//!
//! Text is coloured on a terminal that supports it (`NO_COLOR` is respected); JSON and YAML are the
//! same report, whole.

use std::fmt::{Display, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::OnceLock;

use anstyle::{AnsiColor, Style};
use anyhow::Context;
use bindguard_core::error_chain;
use bindguard_core::judge::VerdictName;
use bindguard_core::report::{BindRecord, ReleaseResult, ReleasedCopy};
use bindguard_core::text::{one_line, shell_word};
use bindguard_operator::node_report::NodeReport;
use bindguard_operator::pods::PodContainer;
use bindguard_sys::Failure;
use clap::{Args, ValueEnum};
use serde::Serialize;

pub use bindguard_operator::terminal::{
    json_text, print_bytes, print_remark, print_text, print_while_read,
};

/// The form of a report.
#[derive(Debug, Clone, Copy, Args)]
pub struct Output {
    /// Print the report as JSON, as with `-o json`.
    #[arg(long, conflicts_with = "output")]
    pub json: bool,
    /// Print the report in this format.
    #[arg(short, long, value_enum, value_name = "FORMAT", default_value_t = Format::Text)]
    output: Format,
    /// Print no report; the exit status is the answer.
    #[arg(short, long, conflicts_with_all = ["json", "output"])]
    quiet: bool,
}

/// A format of reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    Text,
    Json,
    Yaml,
}

impl Output {
    pub fn is_text(self) -> bool {
        !self.json && self.output == Format::Text
    }

    /// The same, for another `bindguard`.
    pub fn arguments(self) -> &'static [&'static str] {
        match self.output {
            _ if self.quiet => &["--quiet"],
            Format::Text if !self.json => &[],
            Format::Text | Format::Json => &["--json"],
            Format::Yaml => &["--output", "yaml"],
        }
    }

    /// Prints a report. False if its reader left.
    pub fn print(self, report: &impl Serialize, text: &str) -> anyhow::Result<bool> {
        if self.quiet {
            return Ok(true);
        }
        if self.is_text() {
            return print_while_read(text.as_bytes());
        }
        let mut formatted = json_text(report)?;
        // YAML has no escape for a character that reorders a terminal's line outside of quotes. A
        // report with such a character is printed as JSON, which is YAML as well.
        if self.output == Format::Yaml && !formatted.contains("\\u") {
            // By its JSON: the journal's lines are JSON texts.
            let value: serde_norway::Value =
                serde_norway::from_str(&formatted).context("read the JSON")?;
            formatted = serde_norway::to_string(&value).context("write the report as YAML")?;
        }
        print_while_read(formatted.as_bytes())
    }
}

/// Prints a report, and returns the exit code.
pub fn finish(
    report: &impl Serialize,
    output: Output,
    text: Lines,
    is_incomplete: bool,
    has_findings: bool,
) -> anyhow::Result<ExitCode> {
    output.print(report, &text.0)?;
    Ok(code(is_incomplete, has_findings))
}

/// 2 if the check is incomplete, else 1 if there are findings, else 0.
pub fn code(is_incomplete: bool, has_findings: bool) -> ExitCode {
    let findings = u8::from(has_findings);
    ExitCode::from(if is_incomplete {
        COULD_NOT_TELL
    } else {
        findings
    })
}

/// The known names of a container's pod and of the container.
pub fn joined_names(container: &PodContainer, separator: &str) -> String {
    let names = [container.pod.display_name(), container.name.clone()];
    Vec::from_iter(names.into_iter().flatten()).join(separator)
}

/// The problem of a line that the journal did not get.
pub fn unrecorded(what: &str, recorded: Result<(), Failure>) -> Option<String> {
    let error = recorded.err()?;
    Some(format!("journal {what}: {}", error_chain(&error)))
}

/// A number and its noun.
pub fn counted<N: PartialEq + From<u8> + Display>(count: N, one: &str, more: &str) -> String {
    let noun = if count == N::from(1) { one } else { more };
    format!("{count} {noun}")
}

/// The node's root, as the pod sees it in which this program runs.
pub static NODE_ROOT: OnceLock<PathBuf> = OnceLock::new();

/// The exit code of an incomplete check, for scripts.
pub const COULD_NOT_TELL: u8 = 2;

// Lines of two columns: a coloured word, and a text about it.

/// The width of the first column: the longest word of a verdict or a point, and a space.
const WIDTH: usize = 11;

/// Text in the making.
#[derive(Debug, Default)]
pub struct Lines(String);

impl Lines {
    /// Lines about errors of the check itself.
    pub fn of_problems(problems: &[String]) -> Self {
        let mut lines = Self::default();
        lines.problems(problems);
        lines
    }

    /// A line that begins with a word.
    pub fn headed(&mut self, word: &str, style: Style, text: &str) {
        let _ = writeln!(self.0, "{style}{word:<WIDTH$}{style:#}{}", one_line(text));
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// A line about something healthy or faulty.
    pub fn marked(&mut self, word: &str, is_healthy: bool, text: &str) {
        self.headed(word, if is_healthy { HEALTHY } else { FAULTY }, text);
    }

    /// A line about the result for a mount, and the reason if it stays.
    pub fn result(&mut self, word: &str, is_good: bool, mount: &str, why: Option<&str>) {
        let text = why.map(|why| format!("{mount}: {why}"));
        self.marked(word, is_good, text.as_deref().unwrap_or(mount));
    }

    /// A line about a copy of an unmounted mount.
    pub fn copy(&mut self, copy: &ReleasedCopy, place: &str) {
        let is_released = copy.result == ReleaseResult::Released;
        let word = copy.result.into_str();
        self.result(word, is_released, place, copy.error.as_deref());
    }

    pub fn problems(&mut self, problems: &[String]) {
        for problem in problems {
            self.headed("problem", UNCHECKED, problem);
        }
    }

    /// A line below a line that began with a word.
    pub fn below(&mut self, text: &str) {
        let _ = writeln!(self.0, "{:WIDTH$}{}", "", one_line(text));
    }

    /// Adds a command for the operator.
    pub fn run(&mut self, command: &str) {
        let style = AnsiColor::Cyan.on_default();
        let (mut run, mut command) = ("run", command.to_owned());
        if let Some(root) = NODE_ROOT.get() {
            if command.starts_with("bindguard ") {
                command += &format!(" --root {}", shell_word(root));
            } else if !command.starts_with("kubectl ") {
                // An image with bindguard has no other program.
                run = "run on the node";
            }
        }
        let command = one_line(&command);
        let _ = writeln!(self.0, "{:WIDTH$}{run}: {style}{command}{style:#}", "");
    }

    /// A line whose begin has a style.
    pub fn styled(&mut self, style: Style, begin: &str, rest: &str) {
        let _ = writeln!(self.0, "{style}{begin}{style:#}{rest}");
    }

    /// A line of its own.
    pub fn line(&mut self, text: &str) {
        let _ = writeln!(self.0, "{}", one_line(text));
    }

    /// The verdict, the bind, the reason, and the outcome.
    pub fn bind(&mut self, bind: &BindRecord) {
        let mut place = bind.source.clone();
        if let Some(destination) = &bind.destination {
            place += &format!(" at {destination}");
        }
        self.headed(bind.verdict.as_str(), style_of(bind.verdict), &place);
        let outcome = bind.outcome.as_ref().map(ToString::to_string);
        for text in bind.reason.iter().chain(&outcome) {
            self.below(text);
        }
    }
}

pub fn style_of(verdict: VerdictName) -> Style {
    match verdict {
        VerdictName::Current => HEALTHY,
        VerdictName::Foreign => DIMMED,
        VerdictName::Unknown => UNCHECKED,
        VerdictName::Stale | VerdictName::Orphaned | VerdictName::Unmounted => FAULTY,
        VerdictName::Pinning | VerdictName::Dead | VerdictName::Wrong => FAULTY,
    }
}

/// Nothing to do.
pub const HEALTHY: Style = AnsiColor::Green.on_default();
pub const FAULTY: Style = AnsiColor::Red.on_default().bold();
pub const UNCHECKED: Style = AnsiColor::Yellow.on_default().bold();
/// Nothing of bindguard's.
pub const DIMMED: Style = Style::new().dimmed();

/// Running containers that read old files.
#[derive(Debug, Default, Serialize)]
pub struct OldFilesCount {
    /// All of them.
    pub containers: usize,
    /// The containers that opted in to live refresh.
    pub opted_in: usize,
}

impl OldFilesCount {
    pub fn of(report: &NodeReport) -> Self {
        let opted_in = report.old_files.iter().filter(|old| old.is_finding());
        Self {
            containers: report.old_files.len(),
            opted_in: opted_in.count(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_singular() {
        let texts = [0_u32, 1, 2].map(|count| counted(count, "time", "times"));
        assert_eq!(texts, ["0 times", "1 time", "2 times"]);
    }

    #[test]
    fn a_name_cannot_write_lines_of_its_own() {
        let mut lines = Lines::default();
        lines.headed("stale", Style::new(), "/a\ncurrent    /b\u{1b}[2J");
        lines.below("/a\u{202e}fnoc\u{2066}");
        assert_eq!(
            lines.0,
            "stale      /a\\ncurrent    /b\\u{1b}[2J\n           /a\\u{202e}fnoc\\u{2066}\n"
        );
    }
}
