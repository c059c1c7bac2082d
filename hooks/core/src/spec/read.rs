//! Reads the few values that the guard needs in a single pass over a spec's text.
//!
//! The reader follows runc, which uses Go's `encoding/json`: annotations are merged, and `null` is
//! no value. Where runc and crun read different binds from a text, the spec is not read: a spelling
//! of a key that Go alone accepts, a second key, a NUL in a string.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use serde::de::{
    Deserialize, DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor,
};
use serde_json::value::RawValue;

use crate::spec::{Bind, RawMount, SpecError};

/// The maximum number of binds that the guard checks. A pod has tens of binds; a hundred thousand
/// would delay the create and fill the journal.
pub const MAX_BINDS: usize = 2_000;

/// The values read from a spec.
#[derive(Debug, Default)]
pub(super) struct Values<'a> {
    pub(super) binds: Vec<Bind<'a>>,
    /// The destinations of all mounts, binds or not; empty where an entry has none.
    pub(super) destinations: Vec<Cow<'a, str>>,
    /// The number of mounts beyond the maximum, which are not checked.
    pub(super) overlooked: usize,
    pub(super) masked_paths: Vec<Cow<'a, str>>,
    pub(super) annotations: Vec<(Cow<'a, str>, Cow<'a, str>)>,
    pub(super) rootfs_propagation: Option<Cow<'a, str>>,
}

impl<'a> Values<'a> {
    pub(super) fn from_text(text: &'a str) -> Result<Self, SpecError> {
        // A fold over all bytes, because the compiler makes it several times as fast as a search
        // that can stop early.
        if text
            .bytes()
            .fold(false, |found, byte| found | (byte < b' '))
        {
            // Such characters are nearly always line breaks. But `Text` also accepts them inside a
            // string, where JSON forbids them.
            serde_json::from_str::<IgnoredAny>(text).map_err(SpecError::NotAnObject)?;
        }
        let (mut values, mut place) = (Self::default(), Position::Elsewhere);
        let mut json = serde_json::Deserializer::from_str(text);
        let read = json
            .deserialize_map(Spec {
                values: &mut values,
                place: &mut place,
            })
            .and_then(|()| json.end());
        match (read, place.field()) {
            (Ok(()), _) => Ok(values),
            (Err(source), Some(field)) if source.is_data() => {
                Err(SpecError::Field { field, source })
            }
            (Err(source), _) => Err(SpecError::NotAnObject(source)),
        }
    }
}

/// The reader's position in the spec.
enum Position {
    Elsewhere,
    Key,
    Mounts,
    Mount(usize),
    Annotations,
    Linux,
}

impl Position {
    /// The field, as a dotted path.
    fn field(&self) -> Option<String> {
        match self {
            Self::Elsewhere => None,
            Self::Key => Some("the keys".to_owned()),
            Self::Mounts => Some("mounts".to_owned()),
            Self::Mount(index) => Some(format!("mounts[{index}]")),
            Self::Annotations => Some("annotations".to_owned()),
            Self::Linux => Some("linux.rootfsPropagation".to_owned()),
        }
    }
}

struct Spec<'s, 'a> {
    values: &'s mut Values<'a>,
    place: &'s mut Position,
}

impl<'de> Visitor<'de> for Spec<'_, 'de> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a spec, as an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut spec: A) -> Result<(), A::Error> {
        let Self { values, place } = self;
        let mut has_mounts = false;
        while let Some(Text(key)) = spec.next_key()? {
            match &*key {
                "mounts" => {
                    *place = Position::Mounts;
                    reject_second(&key, has_mounts)?;
                    has_mounts = true;
                    spec.next_value_seed(Mounts {
                        values: &mut *values,
                        place: &mut *place,
                    })?;
                }
                "annotations" => {
                    *place = Position::Annotations;
                    match spec.next_value::<Option<Annotations<'de>>>()? {
                        Some(Annotations(more)) => values.annotations.extend(more),
                        None => values.annotations.clear(),
                    }
                }
                "linux" => {
                    *place = Position::Linux;
                    match spec.next_value::<Option<Linux<'de>>>()? {
                        Some(linux) => {
                            if linux.rootfs_propagation.is_some() {
                                values.rootfs_propagation = linux.rootfs_propagation;
                            }
                            if let Some(masked) = linux.masked_paths {
                                values.masked_paths = masked;
                            }
                        }
                        None => {
                            values.rootfs_propagation = None;
                            values.masked_paths.clear();
                        }
                    }
                }
                _ => {
                    *place = Position::Key;
                    reject_other_spelling(&key, &["mounts", "annotations", "linux"])?;
                    *place = Position::Elsewhere;
                    spec.next_value::<IgnoredAny>()?;
                }
            }
            *place = Position::Elsewhere;
        }
        Ok(())
    }
}

struct Mounts<'s, 'a> {
    values: &'s mut Values<'a>,
    place: &'s mut Position,
}

impl<'de> DeserializeSeed<'de> for Mounts<'_, 'de> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_option(self)
    }
}

impl<'de> Visitor<'de> for Mounts<'_, 'de> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of mounts")
    }

    fn visit_none<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut mounts: A) -> Result<(), A::Error> {
        let Self { values, place } = self;
        for index in 0.. {
            if values.binds.len() == MAX_BINDS {
                break;
            }
            *place = Position::Mount(index);
            let Some(entry) = mounts.next_element::<Option<RawMount<'de>>>()? else {
                return Ok(());
            };
            let entry = entry.unwrap_or_default();
            values
                .destinations
                .push(entry.destination.clone().unwrap_or_default());
            values
                .binds
                .extend(Bind::from_entry(index, entry).map_err(A::Error::custom)?);
        }
        while mounts.next_element::<IgnoredAny>()?.is_some() {
            values.overlooked += 1;
        }
        Ok(())
    }
}

struct Annotations<'a>(Vec<(Cow<'a, str>, Cow<'a, str>)>);

impl<'de> Deserialize<'de> for Annotations<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Names;
        impl<'de> Visitor<'de> for Names {
            type Value = Annotations<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("annotations, as an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut annotations = Vec::new();
                while let Some((Text(name), value)) =
                    map.next_entry::<Text<'de>, Option<Text<'de>>>()?
                {
                    // Go reads `null` as an empty string.
                    annotations.push((name, value.unwrap_or_default().0));
                }
                Ok(Annotations(annotations))
            }
        }
        deserializer.deserialize_map(Names)
    }
}

/// The values of `linux` that are set.
#[derive(Default)]
struct Linux<'a> {
    rootfs_propagation: Option<Cow<'a, str>>,
    masked_paths: Option<Vec<Cow<'a, str>>>,
}

impl<'de> Deserialize<'de> for Linux<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Keys;
        impl<'de> Visitor<'de> for Keys {
            type Value = Linux<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("linux, as an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut linux = Linux::default();
                while let Some(Text(key)) = map.next_key()? {
                    match &*key {
                        "rootfsPropagation" => {
                            if let Some(Text(word)) = map.next_value()? {
                                linux.rootfs_propagation = Some(word);
                            }
                        }
                        "maskedPaths" => {
                            let paths: Option<Vec<Option<Text<'de>>>> = map.next_value()?;
                            let paths = paths.unwrap_or_default().into_iter();
                            let paths = paths.map(|path| path.unwrap_or_default().0);
                            linux.masked_paths = Some(paths.collect());
                        }
                        _ => {
                            reject_other_spelling(&key, &["rootfsPropagation", "maskedPaths"])?;
                            map.next_value::<IgnoredAny>()?;
                        }
                    }
                }
                Ok(linux)
            }
        }
        deserializer.deserialize_map(Keys)
    }
}

// A JSON object as the list of its entries: keys are decoded, values unchanged.
//
// Strings are read as leniently as by Go's `encoding/json`, which runc and containerd use: half of
// a surrogate pair becomes U+FFFD. Duplicate keys are kept, and the last key applies. Keys that
// runtimes read in different ways are errors where they concern binds. Every value is a slice of
// the parsed buffer, so its position is known.

/// Capacity for the keys of nearly every object of a spec.
const USUAL_KEYS: usize = 12;

/// Keys and raw values of a JSON object, in the order of the text.
pub struct RawObject<'a>(Vec<(Cow<'a, str>, &'a RawValue)>);

impl<'a> RawObject<'a> {
    /// The entries in the order they were written, duplicate keys included.
    pub fn entries(&self) -> impl Iterator<Item = (&str, &'a RawValue)> {
        self.0.iter().map(|(name, raw)| (&**name, *raw))
    }

    /// The last value of `key`, `null` included: runtimes apply the last value.
    pub(super) fn written(&self, key: &str) -> Option<&'a RawValue> {
        self.0
            .iter()
            .rev()
            .find(|(name, _)| name == key)
            .map(|&(_, raw)| raw)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl<'de> Deserialize<'de> for RawObject<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = RawObject<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut entries = Vec::with_capacity(USUAL_KEYS);
                while let Some((Text(name), raw)) = map.next_entry::<Text<'de>, &'de RawValue>()? {
                    entries.push((name, raw));
                }
                Ok(RawObject(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// A string, borrowed unless it was written with escapes.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Text<'a>(pub Cow<'a, str>);

impl<'de> Deserialize<'de> for Text<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Words;
        impl<'de> Visitor<'de> for Words {
            type Value = Text<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }

            fn visit_borrowed_bytes<E>(self, text: &'de [u8]) -> Result<Self::Value, E> {
                Ok(Text(str::from_utf8(text).map_or_else(
                    |_| Cow::Owned(repaired(text)),
                    Cow::Borrowed,
                )))
            }

            fn visit_bytes<E>(self, text: &[u8]) -> Result<Self::Value, E> {
                Ok(Text(Cow::Owned(repaired(text))))
            }
        }
        // `deserialize_str` rejects half of a surrogate pair; `deserialize_bytes` passes the half
        // on.
        deserializer.deserialize_bytes(Words)
    }
}

/// Replaces invalid UTF-8 as Go does: half a surrogate pair (three bytes), or any other invalid
/// byte, becomes one U+FFFD.
fn repaired(text: &[u8]) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(chunk) = rest.utf8_chunks().next() {
        out.push_str(chunk.valid());
        rest = &rest[chunk.valid().len()..];
        rest = match rest {
            [0xed, 0xa0..=0xbf, 0x80..=0xbf, behind @ ..] | [_, behind @ ..] => {
                out.push(char::REPLACEMENT_CHARACTER);
                behind
            }
            [] => rest,
        };
    }
    out
}

/// Fails for a key that only some runtimes take for one of `names`. Go's `encoding/json` ignores the
/// case, and takes the long s for an s and the Kelvin sign for a k. crun's strings end at a NUL.
pub(super) fn reject_other_spelling<E: Error>(key: &str, names: &[&str]) -> Result<(), E> {
    let key_of_crun = key.split('\0').next().unwrap_or_default();
    for name in names {
        let folded = key_of_crun.chars().map(|c| match c {
            'ſ' => 's',
            '\u{212a}' => 'k',
            c => c.to_ascii_lowercase(),
        });
        if folded.eq(name.chars().map(|c| c.to_ascii_lowercase())) {
            return Err(E::custom(format_args!(
                "some runtimes take the key {key:?} for {name:?}, and others ignore it"
            )));
        }
    }
    Ok(())
}

/// Fails for the second of two equal keys: runc applies the last key or mixes both values, crun
/// applies the first key or the last key.
pub(super) fn reject_second<E: Error>(key: &str, is_second: bool) -> Result<(), E> {
    match is_second {
        true => Err(E::custom(format_args!(
            "the key {key:?} is there twice, and runtimes differ in the value that they apply"
        ))),
        false => Ok(()),
    }
}

/// The range of `part` within `whole`, the buffer from which `part` was parsed.
pub(super) fn place(whole: &[u8], part: &str) -> Range<usize> {
    let start = part.as_ptr().addr() - whole.as_ptr().addr();
    start..start + part.len()
}

#[cfg(test)]
mod object_tests {
    use super::*;

    #[test]
    fn the_last_of_duplicate_keys_counts_and_escaped_keys_are_decoded() {
        let json = br#"{"a":1,"\u0061":2, "b" : null}"#;
        let object: RawObject<'_> = serde_json::from_slice(json).unwrap();
        assert_eq!(object.written("a").unwrap().get(), "2");
        assert_eq!(object.written("b").unwrap().get(), "null");
        assert!(!object.is_empty());
    }

    #[test]
    fn a_value_knows_its_place() {
        let json = br#"{"a": [1, 2] }"#;
        let object: RawObject<'_> = serde_json::from_slice(json).unwrap();
        assert_eq!(
            &json[place(json, object.written("a").unwrap().get())],
            b"[1, 2]"
        );
    }
}
