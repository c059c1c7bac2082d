//! Lines of two columns: a coloured word, and a text about it.

use std::fmt::Write as _;

use anstyle::{AnsiColor, Style};
use bindguard_core::judge::VerdictName;
use bindguard_core::text::{one_line, shell_word};

use super::NODE_ROOT;

/// The width of the first column: the longest word of a verdict or a point, and a space.
const WIDTH: usize = 11;

/// Text in the making.
#[derive(Debug, Default)]
pub struct Lines(String);

impl Lines {
    /// A line that begins with a word.
    pub fn headed(&mut self, word: &str, style: Style, text: &str) {
        let _ = writeln!(self.0, "{style}{word:<WIDTH$}{style:#}{}", one_line(text));
    }

    /// A line about an error of the check itself.
    pub fn problem(&mut self, text: &str) {
        self.headed("problem", UNCHECKED, text);
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
                command.push_str(&format!(" --root {}", shell_word(root)));
            } else if !command.starts_with("kubectl ") {
                // An image with bindguard has no other program.
                run = "run on the node";
            }
        }
        let command = one_line(&command);
        let _ = writeln!(self.0, "{:WIDTH$}{run}: {style}{command}{style:#}", "");
    }

    /// A line of its own.
    pub fn line(&mut self, text: &str) {
        let _ = writeln!(self.0, "{}", one_line(text));
    }

    /// The whole text.
    pub fn text(&self) -> &str {
        &self.0
    }
}

/// Nothing to do.
pub const HEALTHY: Style = AnsiColor::Green.on_default();
/// A finding.
pub const FAULTY: Style = AnsiColor::Red.on_default().bold();
/// An unchecked point.
pub const UNCHECKED: Style = AnsiColor::Yellow.on_default().bold();
/// Nothing of bindguard's.
pub const DIMMED: Style = Style::new().dimmed();

/// The style of a verdict's name.
pub fn verdict_style(verdict: VerdictName) -> Style {
    match verdict {
        VerdictName::Current => HEALTHY,
        VerdictName::Foreign => DIMMED,
        VerdictName::Unknown => UNCHECKED,
        VerdictName::Stale | VerdictName::Orphaned | VerdictName::Unmounted => FAULTY,
        VerdictName::Pinning | VerdictName::Dead | VerdictName::Wrong => FAULTY,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_cannot_write_lines_of_its_own() {
        let mut lines = Lines::default();
        lines.headed("stale", Style::new(), "/a\ncurrent    /b\u{1b}[2J");
        lines.below("/a\u{202e}fnoc\u{2066}");
        assert_eq!(
            lines.text(),
            "stale      /a\\ncurrent    /b\\u{1b}[2J\n           /a\\u{202e}fnoc\\u{2066}\n"
        );
    }
}
