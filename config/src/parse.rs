//! Reads the text of a config file, key by key: a mistake in one key changes no other key.
//!
//! An invalid value is replaced by a safe value. An unknown key may be a misspelt or misplaced key,
//! about any check: while a text has one, no check repairs. Exempt are values that no check has,
//! such as numbers: after a rollback, an older version meets keys of a newer version. Both mistakes
//! cause a warning with the line number. Only a text that is not TOML is an error, because it has no
//! keys.

use std::fmt;
use std::ops::Range;

use bindguard_core::text::cut;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::keys::{Mistake, Setting, Settings, Visitor};

/// The limit of warnings about a file: each create records all warnings.
const MAX_WARNINGS: usize = 16;
/// The quoted length of a key or value, in bytes.
const MAX_QUOTED: usize = 64;

/// The effect of a key that may mean a check.
const ONLY_REPORTS: &str = "; until it is corrected no check repairs, and nothing is refreshed";

/// The settings of a text, and its mistakes.
#[derive(Debug)]
pub(crate) struct ParsedSettings {
    pub(crate) settings: Settings,
    pub(crate) warnings: Vec<Warning>,
    /// The keys that the text sets.
    pub(crate) set: Vec<&'static str>,
    /// An unknown key keeps every check from a repair.
    pub(crate) only_reports: bool,
}

/// A part of a config file that is not used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warning {
    /// The line, counted from 1.
    pub line: usize,
    /// The mistake, and what applies instead.
    pub message: String,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.message)
    }
}

/// The reason why a text is not TOML.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct InvalidToml {
    /// The line, counted from 1.
    pub line: usize,
    /// The parser's message, in one line.
    pub message: String,
}

pub(crate) fn parse(text: &str) -> Result<ParsedSettings, InvalidToml> {
    let table = DeTable::parse(text).map_err(|error| InvalidToml::of(&error, text))?;
    Ok(Reader::read(text, table.get_ref()))
}

/// The runtime that a text names which is not TOML as a whole.
pub(crate) fn salvaged_runtime(text: &str) -> Settings {
    let (table, _) = DeTable::parse_recoverable(text);
    Settings {
        runtime: Reader::read(text, table.get_ref()).settings.runtime,
        ..Settings::default().only_report()
    }
}

impl InvalidToml {
    fn of(error: &toml::de::Error, text: &str) -> Self {
        let place = error.span().unwrap_or_default();
        let mut message = error.message().trim_end().replace('\n', " ");
        if message == "duplicate key" {
            message = format!("{message} {}: the file sets it twice", quoted(text, &place));
        }
        Self {
            line: line_of(text, place.start),
            message,
        }
    }
}

/// Reads the keys that a visit names.
struct Reader<'t> {
    text: &'t str,
    table: &'t DeTable<'t>,
    known: Vec<&'static str>,
    set: Vec<&'static str>,
    only_reports: bool,
    /// Warnings with their places, the key of their order.
    warnings: Vec<(Range<usize>, String)>,
}

/// The place of a key in a text.
enum Found<'t> {
    Absent,
    Value(&'t Spanned<DeValue<'t>>),
    /// A part of the key's name is no table.
    NoTable(&'t Spanned<DeValue<'t>>, &'static str),
}

impl<'t> Reader<'t> {
    fn read(text: &'t str, table: &'t DeTable<'t>) -> ParsedSettings {
        let mut reader = Self {
            text,
            table,
            known: Vec::new(),
            set: Vec::new(),
            only_reports: false,
            warnings: Vec::new(),
        };
        let mut settings = Settings::default();
        settings.visit(&mut reader);
        reader.find_unknown_keys(table, "");
        if reader.only_reports {
            settings = settings.only_report();
        }
        ParsedSettings {
            settings,
            set: std::mem::take(&mut reader.set),
            only_reports: reader.only_reports,
            warnings: reader.sorted_warnings(),
        }
    }

    fn find(&self, name: &'static str) -> Found<'t> {
        let mut table = self.table;
        let mut from = 0;
        loop {
            let end = name[from..].find('.').map_or(name.len(), |dot| from + dot);
            let Some(value) = table.get(&name[from..end]) else {
                return Found::Absent;
            };
            match value.get_ref() {
                _ if end == name.len() => return Found::Value(value),
                DeValue::Table(inner) => table = inner,
                _ => return Found::NoTable(value, &name[..end]),
            }
            from = end + 1;
        }
    }

    fn find_unknown_keys(&mut self, table: &'t DeTable<'t>, path: &str) {
        for (key, value) in table {
            let name = if path.is_empty() {
                key.get_ref().to_string()
            } else {
                format!("{path}.{}", key.get_ref())
            };
            // "checks.proof" in quotes is one key, and not the key of the table [checks]
            let is_one_word = !key.get_ref().contains('.');
            let is_table = |known: &&str| {
                is_one_word
                    && known
                        .strip_prefix(name.as_str())
                        .is_some_and(|rest| rest.starts_with('.'))
            };
            match value.get_ref() {
                _ if is_one_word && self.known.contains(&name.as_str()) => {}
                DeValue::Table(inner) if self.known.iter().any(is_table) => {
                    self.find_unknown_keys(inner, &name)
                }
                // `key` has reported a table's name whose value is not a table
                _ if self.known.iter().any(is_table) => {}
                value => {
                    let mut message = format!("unknown key `{}`", shortened(&name));
                    message.push_str(&self.tables_of(key.get_ref()));
                    if may_mean_a_check(value) {
                        self.only_reports = true;
                        message.push_str(ONLY_REPORTS);
                    } else {
                        message.push_str(" is skipped");
                    }
                    self.warnings.push((key.span(), message));
                }
            }
        }
    }

    /// The tables that have a key of this name.
    fn tables_of(&self, key: &str) -> String {
        let mut tables = String::new();
        for known in &self.known {
            let Some((table, name)) = known.rsplit_once('.') else {
                continue;
            };
            if name == key {
                let before = if tables.is_empty() {
                    ", a key of"
                } else {
                    " and"
                };
                tables.push_str(&format!("{before} [{table}]"));
            }
        }
        tables
    }

    fn sorted_warnings(mut self) -> Vec<Warning> {
        self.warnings.sort_by_key(|(place, _)| place.start);
        self.warnings.dedup();
        let more = self.warnings.len().saturating_sub(MAX_WARNINGS);
        let mut warnings = Vec::new();
        for (place, message) in self.warnings.into_iter().take(MAX_WARNINGS) {
            let line = line_of(self.text, place.start);
            warnings.push(Warning { line, message });
        }
        if more > 0
            && let Some(last) = warnings.last_mut()
        {
            last.message
                .push_str(&format!("; {more} more mistakes follow"));
        }
        warnings
    }
}

impl Visitor for Reader<'_> {
    fn key<T: Setting>(&mut self, name: &'static str, value: &mut T, if_unreadable: T) {
        self.known.push(name);
        match self.find(name) {
            Found::Absent => return,
            Found::NoTable(place, table) => {
                *value = if_unreadable;
                let mut message = format!("`{table}` is no table{}", self.tables_of(table));
                if may_mean_a_check(place.get_ref()) {
                    self.only_reports = true;
                    message.push_str(ONLY_REPORTS);
                }
                self.warnings.push((place.span(), message));
            }
            Found::Value(found) => {
                let mut mistakes = Vec::new();
                let read = T::read(found, &mut mistakes);
                let mut using = match read {
                    Some(_) => ", left out".to_owned(),
                    None => format!(", using {}", if_unreadable.shown()),
                };
                // `mode = "report"` is no value of [annotations], and a mode of the checks
                if read.is_none()
                    && name.starts_with("annotations.")
                    && may_mean_a_check(found.get_ref())
                {
                    self.only_reports = true;
                    using.push_str(ONLY_REPORTS);
                }
                *value = read.unwrap_or(if_unreadable);
                for Mistake { place, expected } in mistakes {
                    let written = quoted(self.text, &place);
                    let message = format!("`{name}`: {written} is not {expected}{using}");
                    self.warnings.push((place, message));
                }
            }
        }
        self.set.push(name);
    }
}

/// True if a person may have meant the mode of a check. No check has a number, a date or a path, and
/// an empty table sets nothing.
fn may_mean_a_check(value: &DeValue<'_>) -> bool {
    match value {
        DeValue::String(text) => !text.starts_with('/'),
        DeValue::Boolean(_) => true,
        DeValue::Integer(_) | DeValue::Float(_) | DeValue::Datetime(_) => false,
        DeValue::Array(values) => values.iter().any(|value| may_mean_a_check(value.get_ref())),
        DeValue::Table(keys) => keys.values().any(|value| may_mean_a_check(value.get_ref())),
    }
}

/// A part of the text, in a short line.
fn quoted(text: &str, place: &Range<usize>) -> String {
    shortened(text.get(place.clone()).unwrap_or_default())
}

fn shortened(text: &str) -> String {
    cut(text, MAX_QUOTED)
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
}

fn line_of(text: &str, at: usize) -> usize {
    text.as_bytes()
        .iter()
        .take(at)
        .filter(|byte| **byte == b'\n')
        .count()
        + 1
}
