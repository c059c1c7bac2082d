//! The parser's positions of tables and keys in a TOML text: an edit splices there, and keeps every
//! other byte.

use std::ops::Range;

use toml_edit::{Document, Item, Key, Table};

/// A text and the places in it.
#[derive(Debug)]
pub struct TextLayout<'t> {
    /// The text.
    pub text: &'t str,
    /// Its content.
    pub document: &'t Document<&'t str>,
    /// The root and the tables with a header, in the order of the text.
    pub sections: Vec<Section>,
    /// The keys outside of inline tables, in the order of the text.
    pub entries: Vec<EntryText>,
    /// The end of a line.
    pub eol: &'static str,
}

/// The root, or a table with a header.
#[derive(Debug, Clone)]
pub struct Section {
    /// The names of the table.
    pub path: Vec<String>,
    /// The same as the text spells them, quotes included.
    pub spelled: Vec<String>,
    /// The begin of the header's line.
    pub start: usize,
    /// The end of the header's line.
    pub header_end: usize,
    /// The end of the last key's line; what follows up to the next header belongs to that.
    pub end: usize,
}

/// A key and its value.
#[derive(Debug, Clone)]
pub struct EntryText {
    /// The names of the tables and of the key.
    pub path: Vec<String>,
    /// The begin of its line.
    pub start: usize,
    /// The place of its value.
    pub value: Range<usize>,
    /// The end of the value's line.
    pub end: usize,
}

impl<'t> TextLayout<'t> {
    /// Finds the places.
    pub fn of(document: &'t Document<&'t str>) -> Self {
        let text = document.raw();
        let eol = if text.find('\n').is_some_and(|at| text[..at].ends_with('\r')) {
            "\r\n"
        } else {
            "\n"
        };
        let begin = if text.starts_with('\u{feff}') {
            '\u{feff}'.len_utf8()
        } else {
            0
        };
        let root = Section {
            path: Vec::new(),
            spelled: Vec::new(),
            start: begin,
            header_end: begin,
            end: begin,
        };
        let mut layout = Self {
            text,
            document,
            sections: vec![root],
            entries: Vec::new(),
            eol,
        };
        layout.add_table(document.as_table(), &mut Vec::new());
        layout.sections.sort_by_key(|section| section.start);
        layout.entries.sort_by_key(|entry| entry.value.start);
        for entry in &layout.entries {
            let section = layout
                .sections
                .iter_mut()
                .rfind(|section| section.start <= entry.start);
            if let Some(section) = section {
                section.end = section.end.max(entry.end);
            }
        }
        layout
    }

    fn add_table(&mut self, table: &Table, path: &mut Vec<String>) {
        self.add_header(table, path);
        for (name, item) in table {
            path.push(name.to_owned());
            match item {
                Item::Table(inner) => self.add_table(inner, path),
                Item::ArrayOfTables(tables) => {
                    tables.iter().for_each(|inner| self.add_table(inner, path))
                }
                Item::Value(_) | Item::None => self.add_entry(table.key(name), item, path),
            }
            path.pop();
        }
    }

    /// The span of a table without a header is that of a key.
    fn add_header(&mut self, table: &Table, path: &[String]) {
        let Some(span) = table
            .span()
            .filter(|span| self.text[span.start..].starts_with('[') && !path.is_empty())
        else {
            return;
        };
        let names = self.text[span.clone()].trim_matches(['[', ']']);
        let keys = Key::parse(names).unwrap_or_default();
        let header_end = self.line_end(span.end);
        self.sections.push(Section {
            path: path.to_vec(),
            spelled: keys
                .iter()
                .map(|key| key.display_repr().into_owned())
                .collect(),
            start: self.line_start(span.start),
            header_end,
            end: header_end,
        });
    }

    fn add_entry(&mut self, key: Option<&Key>, item: &Item, path: &[String]) {
        let (Some(key), Some(value)) = (key.and_then(Key::span), item.span()) else {
            return;
        };
        let (start, end) = (self.line_start(key.start), self.line_end(value.end));
        self.entries.push(EntryText {
            path: path.to_vec(),
            start,
            value,
            end,
        });
    }

    /// The begin of the line of a place, without a byte order mark.
    pub fn line_start(&self, at: usize) -> usize {
        let start = self.text[..at].rfind('\n').map_or(0, |newline| newline + 1);
        if self.text[start..].starts_with('\u{feff}') {
            start + '\u{feff}'.len_utf8()
        } else {
            start
        }
    }

    /// The end of the line of a place, after its line end.
    pub fn line_end(&self, at: usize) -> usize {
        self.text[at..]
            .find('\n')
            .map_or(self.text.len(), |newline| at + newline + 1)
    }

    /// The blanks at the begin of a line.
    pub fn indent_at(&self, start: usize) -> &'t str {
        let line = &self.text[start..];
        &line[..line.len() - line.trim_start_matches([' ', '\t']).len()]
    }

    /// The blanks before the keys of a section, or before the header of a section without keys.
    pub fn indent_of_keys(&self, section: &Section) -> &'t str {
        let first = self
            .entries
            .iter()
            .find(|entry| entry.start >= section.header_end && entry.end <= section.end);
        self.indent_at(first.map_or(section.start, |entry| entry.start))
    }

    /// The item at a path.
    pub fn find(&self, path: &[String]) -> Option<&'t Item> {
        path.iter().try_fold(self.document.as_item(), |item, name| {
            item.as_table_like()?.get(name)
        })
    }
}
