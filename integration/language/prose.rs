//! Takes the prose out of a file: paragraphs and table cells of a document, comments and messages
//! of code.

use super::sources::{File, Kind};

/// A run of prose that belongs together.
#[derive(Debug, Default)]
pub struct Passage {
    /// Its first line, counted from 1.
    pub line: usize,
    /// A line for each line of the file, without markup, inline code and links' targets.
    pub text: String,
    /// Decides which rules apply.
    pub place: TextKind,
}

/// A passage's place in its file.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub enum TextKind {
    /// A paragraph, list item, heading or table cell of a document.
    #[default]
    Document,
    /// A `///` or `//!` comment.
    DocComment,
    /// A comment that is no doc comment.
    Comment,
    /// A string literal of a program.
    Message,
}

/// The passages of a file, in order.
pub fn passages(file: &File) -> Vec<Passage> {
    match file.kind {
        Kind::Document => document(&file.text),
        Kind::Hash => comments(&file.text, |line| {
            line.strip_prefix('#').map(|rest| (rest, TextKind::Comment))
        }),
        Kind::Test => comments(&file.text, rust_comment),
        Kind::Program => {
            let mut found = comments(&file.text, rust_comment);
            found.extend(messages(&file.text));
            found
        }
    }
}

fn document(text: &str) -> Vec<Passage> {
    let mut found = Passages::default();
    let mut is_code = false;
    for (line, text) in (1..).zip(text.lines()) {
        let text = text.trim();
        if text.starts_with("```") {
            is_code = !is_code;
            found.end();
        } else if is_code || text.is_empty() {
            found.end();
        } else if text.starts_with('|') {
            found.end();
            for cell in text.split('|') {
                found.add(line, cell, TextKind::Document);
                found.end();
            }
        } else {
            if text.starts_with(['#', '*', '-', '+', '>'])
                || text.starts_with(|c: char| c.is_ascii_digit())
            {
                found.end();
            }
            found.add(line, text, TextKind::Document);
        }
    }
    found.all()
}

fn comments(text: &str, comment: impl Fn(&str) -> Option<(&str, TextKind)>) -> Vec<Passage> {
    let mut found = Passages::default();
    for (line, text) in (1..).zip(text.lines()) {
        match comment(text.trim_start()) {
            Some((text, place)) if !text.trim().is_empty() => found.add(line, text, place),
            _ => found.end(),
        }
    }
    found.all()
}

fn rust_comment(line: &str) -> Option<(&str, TextKind)> {
    if let Some(text) = line
        .strip_prefix("///")
        .or_else(|| line.strip_prefix("//!"))
    {
        return Some((text, TextKind::DocComment));
    }
    line.strip_prefix("//")
        .map(|text| (text, TextKind::Comment))
}

/// String literals with at least two spaces, outside of comments and of a file's unit tests.
fn messages(text: &str) -> Vec<Passage> {
    let mut found = Passages::default();
    for (line, text) in (1..).zip(text.lines()) {
        if text.trim_start().starts_with("#[cfg(test)]") {
            break;
        }
        if rust_comment(text.trim_start()).is_some() {
            continue;
        }
        for literal in text.split('"').skip(1).step_by(2) {
            if literal.split_whitespace().count() > 2 {
                found.add(line, literal, TextKind::Message);
                found.end();
            }
        }
    }
    found.all()
}

#[derive(Default)]
struct Passages {
    ended: Vec<Passage>,
    open: Option<Passage>,
}

impl Passages {
    fn add(&mut self, line: usize, text: &str, place: TextKind) {
        if self.open.as_ref().is_some_and(|open| open.place != place) {
            self.end();
        }
        let open = self.open.get_or_insert_with(|| Passage {
            line,
            text: String::new(),
            place,
        });
        open.text.push_str(text);
        open.text.push('\n');
    }

    fn end(&mut self) {
        self.ended.extend(self.open.take().map(|open| Passage {
            text: without_code(&open.text),
            ..open
        }));
    }

    fn all(mut self) -> Vec<Passage> {
        self.end();
        self.ended
    }
}

/// Replaces `inline code` by a word, and removes a link's target.
fn without_code(text: &str) -> String {
    let mut out = String::new();
    for (index, part) in text.split('`').enumerate() {
        if index % 2 == 0 {
            out.push_str(part);
        } else {
            out.push_str("CODE");
            out.extend(part.matches('\n'));
        }
    }
    while let Some(start) = out.find("](") {
        let end = out[start..]
            .find(')')
            .map_or(out.len(), |end| start + end + 1);
        let lines = "\n".repeat(out[start..end].matches('\n').count());
        out.replace_range(start..end, &lines);
    }
    out
}
