//! Lines of two columns: a coloured word, and what there is to say of it.

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
        let _ = writeln!(self.0, "{style}{word:<WIDTH$}{style:#}{text}");
    }

    /// A line below one that began with a word.
    pub fn below(&mut self, text: &str) {
        let _ = writeln!(self.0, "{:WIDTH$}{text}", "");
    }

    /// A line that says what to run.
    pub fn run(&mut self, command: &str) {
        let style = AnsiColor::Cyan.on_default();
        let _ = writeln!(self.0, "{:WIDTH$}run: {style}{command}{style:#}", "");
    }

    /// A line of its own.
    pub fn line(&mut self, text: &str) {
        let _ = writeln!(self.0, "{text}");
    }

    /// The whole.
    pub fn text(&self) -> &str {
        &self.0
    }
}

/// Well, not well, or nobody knows.
pub fn verdict_style(verdict: &str) -> Style {
    match verdict {
        "current" | "good" => AnsiColor::Green.on_default(),
        "foreign" => Style::new().dimmed(),
        "unknown" | "problem" | "no answer" => AnsiColor::Yellow.on_default().bold(),
        _ => AnsiColor::Red.on_default().bold(),
    }
}
