//! One bind mount of a spec: what it says, and where in the bytes it says so.

use std::borrow::Cow;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde_json::value::RawValue;

use super::object::{RawObject, Text, place};
use super::propagation::AskedPropagation;

/// A mount of the spec that runc would bind.
///
/// runc and crun treat an entry as a bind when its type is `bind`, or when its options hold `bind` or `rbind`
/// whatever the type says (`none` is common).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bind {
    index: usize,
    source: PathBuf,
    destination: PathBuf,
    propagation: AskedPropagation,
    is_recursive: bool,
    places: Places,
}

/// Byte ranges within the spec.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Places {
    pub(super) source: Range<usize>,
    pub(super) options: OptionsPlace,
}

/// Where a bind's options stand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum OptionsPlace {
    /// The entry has no `options` key.
    Missing,
    /// `null` or an empty array.
    Empty(Range<usize>),
    /// An array; each propagation option that keeps host mounts alive, and the end of the last element.
    Array { lowering: Vec<Range<usize>>, last: usize },
}

impl Bind {
    /// Reads the entry at `index` of `mounts`; `None` when it is no bind.
    pub(super) fn from_raw(whole: &[u8], index: usize, raw: &RawValue) -> serde_json::Result<Option<Self>> {
        if raw.get() == "null" {
            return Ok(None);
        }
        let entry: RawObject<'_> = serde_json::from_str(raw.get())?;
        let kind = text(&entry, "type")?.unwrap_or_default();
        let written: Vec<&RawValue> = match entry.value("options") {
            Some(raw) => serde_json::from_str(raw.get())?,
            None => Vec::new(),
        };
        let options = written.iter().map(|raw| decoded(raw)).collect::<Result<Vec<_>, _>>()?;
        let is_bind = kind == "bind" || options.iter().any(|o| o == "bind" || o == "rbind");
        let (Some(source), Some(source_raw)) = (text(&entry, "source")?, entry.value("source")) else {
            return Ok(None);
        };
        if !is_bind {
            return Ok(None);
        }
        let options_place = match (entry.written("options"), written.last()) {
            (None, _) => OptionsPlace::Missing,
            (Some(array), None) => OptionsPlace::Empty(place(whole, array)),
            (Some(_), Some(last)) => OptionsPlace::Array {
                lowering: written
                    .iter()
                    .zip(&options)
                    .filter(|(_, option)| {
                        AskedPropagation::from_option(option).is_some_and(|p| p.keeps_host_mounts_alive())
                    })
                    .map(|(raw, _)| place(whole, raw))
                    .collect(),
                last: place(whole, last).end,
            },
        };
        Ok(Some(Self {
            index,
            source: source.into_owned().into(),
            destination: text(&entry, "destination")?.unwrap_or_default().into_owned().into(),
            is_recursive: options.iter().any(|option| option == "rbind"),
            propagation: AskedPropagation::from_options(options.iter().map(|option| &**option)),
            places: Places { source: place(whole, source_raw), options: options_place },
        }))
    }

    /// Its position in the spec's `mounts`.
    pub fn index(&self) -> usize {
        self.index
    }

    /// What is bound: a path on the host; a relative one is relative to the bundle.
    pub fn source(&self) -> &Path {
        &self.source
    }

    /// Where it appears in the container.
    pub fn destination(&self) -> &Path {
        &self.destination
    }

    /// The propagation that its options ask for.
    pub fn propagation(&self) -> AskedPropagation {
        self.propagation
    }

    /// Whether it takes along what is mounted below its source.
    pub fn is_recursive(&self) -> bool {
        self.is_recursive
    }

    pub(super) fn places(&self) -> &Places {
        &self.places
    }
}

fn text<'a>(entry: &RawObject<'a>, key: &str) -> serde_json::Result<Option<Cow<'a, str>>> {
    entry.value(key).map(decoded).transpose()
}

fn decoded(raw: &RawValue) -> serde_json::Result<Cow<'_, str>> {
    // For Go, a string that is null is empty.
    if raw.get() == "null" {
        return Ok("".into());
    }
    // Nearly every string is what stands between its quotes.
    let quoted = raw.get().strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
    match quoted.filter(|text| !text.contains('\\')) {
        Some(text) => Ok(text.into()),
        None => serde_json::from_str(raw.get()).map(|Text(text)| text),
    }
}
