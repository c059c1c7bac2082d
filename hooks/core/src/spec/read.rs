//! Reads the values that the guard needs in a single pass over a spec's text.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

/// The maximum number of binds that the guard checks. A pod has tens of binds; a hundred thousand
/// would delay the create and fill the journal.
pub const MAX_BINDS: usize = 2_000;

/// The parts of a spec that the guard reads, as slices of the spec's text.
#[derive(Default)]
pub(super) struct Parts<'a> {
    pub(super) mounts: Vec<&'a RawValue>,
    pub(super) annotations: RawObject<'a>,
    pub(super) linux: RawObject<'a>,
    /// The field at which the reader is.
    pub(super) field: Option<&'static str>,
}

impl<'de> Visitor<'de> for &mut Parts<'de> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a spec, as an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut spec: A) -> Result<(), A::Error> {
        let mut has_mounts = false;
        while let Some(Text(key)) = spec.next_key()? {
            match &*key {
                "mounts" => {
                    self.field = Some("mounts");
                    reject_second(&key, has_mounts)?;
                    has_mounts = true;
                    let mounts: Option<_> = spec.next_value()?;
                    self.mounts = mounts.unwrap_or_default();
                }
                "annotations" => {
                    self.field = Some("annotations");
                    self.annotations.merge(spec.next_value()?);
                }
                "linux" => {
                    self.field = Some("linux.rootfsPropagation");
                    self.linux.merge(spec.next_value()?);
                }
                _ => {
                    self.field = Some("the keys");
                    reject_other_spelling(&key, &["mounts", "annotations", "linux"])?;
                    self.field = None;
                    spec.next_value::<IgnoredAny>()?;
                }
            }
            self.field = None;
        }
        Ok(())
    }
}

pub(super) fn parsed<'a, T: Deserialize<'a>>(raw: &'a RawValue) -> serde_json::Result<T> {
    serde_json::from_str(raw.get())
}

/// A string; `None` if there is no value, or `null`.
pub(super) fn text_or_null(raw: Option<&RawValue>) -> serde_json::Result<Option<Cow<'_, str>>> {
    let text: Option<Text<'_>> = raw.map_or(Ok(None), parsed)?;
    Ok(text.map(|Text(text)| text))
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
#[derive(Default)]
pub struct RawObject<'a>(pub(super) Vec<(Cow<'a, str>, &'a RawValue)>);

impl<'a> RawObject<'a> {
    /// The entries in the order they were written, duplicate keys included.
    pub fn entries(&self) -> impl Iterator<Item = (&str, &'a RawValue)> {
        self.0.iter().map(|(name, raw)| (&**name, *raw))
    }

    /// The last value of `key`, `null` included: runtimes apply the last value.
    pub(super) fn written(&self, key: &str) -> Option<&'a RawValue> {
        let (_, raw) = self.0.iter().rev().find(|(name, _)| name == key)?;
        Some(*raw)
    }

    /// The values of these keys.
    pub(super) fn values<const N: usize>(
        &self,
        names: [&str; N],
    ) -> serde_json::Result<[Option<&'a RawValue>; N]> {
        let mut values = [None; N];
        for (key, raw) in &self.0 {
            match names.iter().position(|name| name == key) {
                Some(at) => {
                    reject_second(key, values[at].is_some())?;
                    values[at] = Some(*raw);
                }
                None => reject_other_spelling(key, &names)?,
            }
        }
        Ok(values)
    }

    /// Adds the entries of a second object of the same name, as Go does. `null` removes all.
    fn merge(&mut self, other: Option<Self>) {
        match other {
            Some(other) => self.0.extend(other.0),
            None => self.0.clear(),
        }
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for RawObject<'a> {
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

/// crun's strings end at a NUL: crun would read another path, or take the option for another.
pub(super) fn reject_nul(text: &str) -> serde_json::Result<()> {
    match text.contains('\0') {
        true => Err(Error::custom("a string has a NUL, where runtimes differ")),
        false => Ok(()),
    }
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
    }
}
