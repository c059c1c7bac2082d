//! Reads the text of a config file, key by key: a mistake in one key changes no other key.
//!
//! An invalid value is replaced by a safe value: a mistake never makes bindguard do more than the
//! value could have meant. An unknown key may be a misspelt or misplaced key, about any check: while
//! a text has one, no check repairs. Exempt are values that no check has, such as numbers: after a
//! rollback, an older version meets keys of a newer version. Both mistakes cause a warning with the
//! line number. Only a text that is not TOML is an error, because it has no keys.

use std::fmt;
use std::net::SocketAddr;
use std::ops::Range;
use std::path::PathBuf;

use bindguard_core::text::cut;
use strum::IntoEnumIterator;
use toml::de::{DeTable, DeValue};
use toml::{Spanned, Value};

use crate::Config;

/// The limit of warnings about a file: each create records all warnings.
const MAX_WARNINGS: usize = 16;
/// The quoted length of a key or value, in bytes.
const MAX_QUOTED: usize = 64;

const ABSOLUTE_PATH: &str = "an absolute path, \"/...\"";

/// The value of a key, in a config.
pub(crate) enum Slot<'c> {
    Flag(&'c mut bool),
    /// A number from 1 to this limit.
    Number(&'c mut u32, u32),
    /// A program: a path, or a name to search for.
    Program(&'c mut String),
    /// An empty text means none.
    TextOrNone(&'c mut Option<String>),
    Path(&'c mut PathBuf),
    /// An empty text means none.
    PathOrNone(&'c mut Option<PathBuf>),
    Paths(&'c mut Vec<PathBuf>),
    Address(&'c mut SocketAddr),
    AddressOrOff(&'c mut Option<SocketAddr>),
    /// A word, and the word that applies where the file's is unreadable: checks report, and optional
    /// features are off.
    Word(&'c mut dyn Choice, &'static str),
}

/// A value from a fixed list of words.
pub(crate) trait Choice {
    fn words(&self) -> Vec<&'static str>;
    fn word(&self) -> &'static str;
    /// `None` for an unknown word.
    fn set(&mut self, word: &str) -> Option<()>;
}

impl<T: IntoEnumIterator + Into<&'static str> + Copy> Choice for T {
    fn words(&self) -> Vec<&'static str> {
        T::iter().map(T::into).collect()
    }

    fn word(&self) -> &'static str {
        (*self).into()
    }

    fn set(&mut self, word: &str) -> Option<()> {
        *self = T::iter().find(|choice| choice.word() == word)?;
        Some(())
    }
}

impl Slot<'_> {
    /// Reads a value. `None` if it is unreadable; a list is also read without its unreadable
    /// elements.
    fn read(&mut self, value: &DeValue<'_>, mistakes: &mut Vec<Mistake>) -> Option<()> {
        match self {
            Self::Flag(flag) => **flag = value.as_bool()?,
            Self::Number(number, max) => {
                let integer = value.as_integer()?;
                let read = u32::from_str_radix(integer.as_str(), integer.radix()).ok()?;
                **number = Some(read).filter(|read| (1..=*max).contains(read))?;
            }
            Self::Program(program) => {
                let is_name = |name: &&str| !name.is_empty() && !name.contains('\0');
                **program = value.as_str().filter(is_name)?.to_owned();
            }
            Self::TextOrNone(text) => {
                **text = Some(value.as_str()?.to_owned()).filter(|text| !text.is_empty());
            }
            Self::Path(path) => **path = absolute_path(value)?,
            Self::PathOrNone(path) => {
                **path = match value.as_str()? {
                    "" => None,
                    _ => Some(absolute_path(value)?),
                }
            }
            Self::Paths(paths) => {
                let elements = value.as_array()?;
                let mut read = Vec::new();
                for element in elements {
                    match absolute_path(element.get_ref()) {
                        Some(path) => read.push(path),
                        None => mistakes.push((element.span(), ABSOLUTE_PATH.to_owned())),
                    }
                }
                if read.is_empty() && !elements.is_empty() {
                    return None;
                }
                **paths = read;
            }
            Self::Address(address) => **address = value.as_str()?.parse().ok()?,
            Self::AddressOrOff(address) => {
                **address = match value.as_str()? {
                    "off" => None,
                    text => Some(text.parse().ok()?),
                }
            }
            Self::Word(choice, _) => choice.set(value.as_str()?)?,
        }
        Some(())
    }

    /// The value where the file's is unreadable. Most values then keep their defaults.
    fn make_safe(&mut self) {
        match self {
            Self::AddressOrOff(address) => **address = None,
            Self::Word(choice, safe) => {
                choice.set(safe);
            }
            _ => {}
        }
    }

    /// The valid values, in words.
    pub(crate) fn expected(&self) -> String {
        let expected = match self {
            Self::Flag(_) => "true or false",
            Self::Number(_, max) => return format!("a number from 1 to {max}"),
            Self::Program(_) => "a path, or a program's name",
            Self::TextOrNone(_) => "a text in quotes",
            Self::Path(_) => ABSOLUTE_PATH,
            Self::PathOrNone(_) => return format!("{ABSOLUTE_PATH}, or \"\""),
            Self::Paths(_) => "a list of absolute paths, [\"/...\"]",
            Self::Address(_) => "an address, \"IP:PORT\"",
            Self::AddressOrOff(_) => "an address, \"IP:PORT\", or \"off\"",
            // `"a", "b" or "c"`
            Self::Word(choice, _) => {
                let words = format!("{:?}", choice.words());
                let words = words.trim_matches(['[', ']']);
                return match words.rsplit_once(", ") {
                    Some((words, last)) => format!("{words} or {last}"),
                    None => words.to_owned(),
                };
            }
        };
        expected.to_owned()
    }

    /// The value as the file would state it.
    pub(crate) fn shown(&self) -> Value {
        let text = match self {
            Self::Flag(flag) => return Value::from(**flag),
            Self::Number(number, _) => return Value::from(**number),
            Self::Paths(paths) => {
                let mut shown = Vec::new();
                for path in paths.iter() {
                    shown.push(Value::from(path.to_string_lossy().into_owned()));
                }
                return Value::Array(shown);
            }
            Self::Program(program) => program.to_string(),
            Self::TextOrNone(text) => text.as_deref().unwrap_or_default().to_owned(),
            Self::Path(path) => path.to_string_lossy().into_owned(),
            Self::PathOrNone(path) => match path {
                Some(path) => path.to_string_lossy().into_owned(),
                None => String::new(),
            },
            Self::Address(address) => address.to_string(),
            Self::AddressOrOff(address) => match address {
                Some(address) => address.to_string(),
                None => "off".to_owned(),
            },
            Self::Word(choice, _) => choice.word().to_owned(),
        };
        Value::String(text)
    }
}

/// A relative path would depend on the directory from which a runtime is called, and match nothing.
/// No file's name has a NUL byte, and a system call with a NUL byte would fail.
fn absolute_path(value: &DeValue<'_>) -> Option<PathBuf> {
    let path = value.as_str()?;
    (path.starts_with('/') && !path.contains('\0')).then(|| path.into())
}

/// The settings of a text, and its mistakes.
#[derive(Debug)]
pub(crate) struct Parsed {
    pub(crate) config: Config,
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

pub(crate) fn parse(text: &str) -> Result<Parsed, InvalidToml> {
    let table = DeTable::parse(text).map_err(|error| {
        let place = error.span().unwrap_or_default();
        let mut message = error.message().trim_end().replace('\n', " ");
        if message == "duplicate key" {
            message = format!("{message} {}: the file sets it twice", quoted(text, &place));
        }
        let line = line_of(text, place.start);
        InvalidToml { line, message }
    })?;
    Ok(read(text, table.get_ref()))
}

/// A config that only reports, with the runtime that a text names which is not TOML as a whole.
pub(crate) fn salvaged(text: &str) -> Config {
    let (table, _) = DeTable::parse_recoverable(text);
    Config {
        runtime: read(text, table.get_ref()).config.runtime,
        ..Config::default().only_report()
    }
}

fn read(text: &str, table: &DeTable<'_>) -> Parsed {
    let mut config = Config::default();
    let mut mistakes = Mistakes {
        text,
        known: config.slots().map(|(name, _)| name),
        only_reports: false,
        warnings: Vec::new(),
    };
    let mut set = Vec::new();
    for (name, slot) in config.slots() {
        if let Some((value, found)) = find(table, name) {
            mistakes.read_value(slot, name, value, found);
            set.push(name);
        }
    }
    mistakes.find_unknown_keys(table, "");
    config = config.finished();
    if mistakes.only_reports {
        config = config.only_report();
    }
    Parsed {
        config,
        set,
        only_reports: mistakes.only_reports,
        warnings: mistakes.sorted_warnings(),
    }
}

/// The value of a key, and the key's name; or the value of a table's name that is no table.
fn find<'t>(
    mut table: &'t DeTable<'t>,
    name: &'static str,
) -> Option<(&'t Spanned<DeValue<'t>>, &'static str)> {
    let mut start = 0;
    loop {
        let end = name[start..]
            .find('.')
            .map_or(name.len(), |dot| start + dot);
        let value = table.get(&name[start..end])?;
        match value.get_ref() {
            DeValue::Table(inner) if end < name.len() => table = inner,
            _ => return Some((value, &name[..end])),
        }
        start = end + 1;
    }
}

/// The place of a mistake in a value, and what is expected there.
type Mistake = (Range<usize>, String);

/// The mistakes of a text.
struct Mistakes<'t> {
    text: &'t str,
    known: [&'static str; 30],
    only_reports: bool,
    /// Warnings with their places, the key of their order.
    warnings: Vec<(Range<usize>, String)>,
}

impl Mistakes<'_> {
    fn read_value(
        &mut self,
        mut slot: Slot<'_>,
        name: &'static str,
        value: &Spanned<DeValue<'_>>,
        found: &'static str,
    ) {
        if found != name {
            slot.make_safe();
            let message = format!("`{found}` is no table{}", self.tables_of(found));
            let effect = self.effect_on_checks(value.get_ref()).unwrap_or_default();
            self.warnings.push((value.span(), message + effect));
            return;
        }
        let mut mistakes = Vec::new();
        let mut effect = ", left out".to_owned();
        if slot.read(value.get_ref(), &mut mistakes).is_none() {
            if mistakes.is_empty() {
                mistakes.push((value.span(), slot.expected()));
            }
            slot.make_safe();
            effect = format!(", using {}", slot.shown());
            // `mode = "report"` is no value of [annotations], and a mode of the checks
            if name.starts_with("annotations.") {
                effect += self.effect_on_checks(value.get_ref()).unwrap_or_default();
            }
        }
        for (place, expected) in mistakes {
            let written = quoted(self.text, &place);
            let message = format!("`{name}`: {written} is not {expected}{effect}");
            self.warnings.push((place, message));
        }
    }

    fn find_unknown_keys(&mut self, table: &DeTable<'_>, path: &str) {
        for (key, value) in table {
            let word = key.get_ref();
            let name = format!("{path}{word}");
            let inner_path = format!("{name}.");
            // "checks.proof" in quotes is one key, and not the key of the table [checks]
            let is_one_word = !word.contains('.');
            let is_key = is_one_word && self.known.contains(&name.as_str());
            let mut known = self.known.iter();
            let is_table = is_one_word && known.any(|known| known.starts_with(&inner_path));
            match value.get_ref() {
                DeValue::Table(inner) if is_table => self.find_unknown_keys(inner, &inner_path),
                // `read_value` has reported a table's name whose value is not a table
                _ if is_key || is_table => {}
                value => {
                    let effect = self.effect_on_checks(value).unwrap_or(" is skipped");
                    let mut tables = self.tables_of(word);
                    if tables.is_empty()
                        && let Some(similar) = self.similar_key(&name)
                    {
                        tables = format!(", similar to `{similar}`");
                    }
                    let name = shortened(&name);
                    let message = format!("unknown key `{name}`{tables}{effect}");
                    self.warnings.push((key.span(), message));
                }
            }
        }
    }

    /// The effect of a value that a person may have meant as the mode of a check.
    fn effect_on_checks(&mut self, value: &DeValue<'_>) -> Option<&'static str> {
        let may_mean_a_check = may_mean_a_check(value);
        self.only_reports |= may_mean_a_check;
        may_mean_a_check
            .then_some("; until it is corrected no check repairs, and nothing is refreshed")
    }

    /// The known key that a misspelt key resembles, in its own table before any other.
    fn similar_key(&self, name: &str) -> Option<&'static str> {
        let mut best = (0.9, None);
        for known in self.known {
            let likeness = strsim::jaro_winkler(known, name);
            if likeness > best.0 {
                best = (likeness, Some(known));
            }
        }
        best.1
    }

    /// The tables that have a key of this name.
    fn tables_of(&self, key: &str) -> String {
        let mut tables = String::new();
        for known in self.known {
            if let Some((table, name)) = known.rsplit_once('.')
                && name == key
            {
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
            last.message += &format!("; {more} more mistakes follow");
        }
        warnings
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
    text.bytes().take(at).filter(|byte| *byte == b'\n').count() + 1
}
