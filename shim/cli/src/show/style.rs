//! Lines of two columns: a coloured word, and a text about it.

use std::fmt::Write as _;

use anstyle::{AnsiColor, Style};

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

    /// A line below one that began with a word.
    pub fn below(&mut self, text: &str) {
        let _ = writeln!(self.0, "{:WIDTH$}{}", "", one_line(text));
    }

    /// A line that says what to run.
    pub fn run(&mut self, command: &str) {
        let style = AnsiColor::Cyan.on_default();
        let _ = writeln!(self.0, "{:WIDTH$}run: {style}{}{style:#}", "", one_line(command));
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

/// A container may have chosen part of the text: a file's name must not move the cursor or begin a line.
fn one_line(text: &str) -> String {
    let shown = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.to_string() };
    text.chars().map(shown).collect()
}

/// Green for healthy, red for a problem, yellow for unknown, dimmed for foreign.
pub fn verdict_style(verdict: &str) -> Style {
    match verdict {
        "current" | "good" => AnsiColor::Green.on_default(),
        "foreign" => Style::new().dimmed(),
        "unknown" | "problem" | "no answer" => AnsiColor::Yellow.on_default().bold(),
        _ => AnsiColor::Red.on_default().bold(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_cannot_write_lines_of_its_own() {
        let mut lines = Lines::default();
        lines.headed("stale", Style::new(), "/a\ncurrent    /b\u{1b}[2J");
        assert_eq!(lines.text(), "stale      /a\\ncurrent    /b\\u{1b}[2J\n");
    }
}
