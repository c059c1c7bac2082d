//! A bind mount of a spec: the values, and their places in the spec's bytes.

use std::borrow::Cow;
use std::fmt;
use std::path::Path;

use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::object::{Text, reject_other_spelling, reject_second};
use super::propagation::RequestedPropagation;
use crate::mount_table::MountAttributes;

/// A mount of the spec that runc would bind.
///
/// runc and crun treat an entry as a bind if its type is `bind`, or if its options contain `bind`
/// or `rbind`. In the latter case the type can be any; `none` is common.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bind<'a> {
    index: usize,
    source: Cow<'a, str>,
    destination: Cow<'a, str>,
    propagation: RequestedPropagation,
    denied: MountAttributes,
    denied_below: MountAttributes,
    leaves_flags: bool,
    is_recursive: bool,
    has_recursive_word: bool,
    written: Written<'a>,
}

/// The values that an edit replaces: slices of the spec's own text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Written<'a> {
    pub(super) source: &'a str,
    /// `None` if the entry has no `options`.
    pub(super) options: Option<&'a str>,
}

impl<'a> Bind<'a> {
    /// The entry at `index` of `mounts`; `None` if it is not a bind.
    pub(super) fn from_entry(
        index: usize,
        entry: RawMount<'a>,
    ) -> serde_json::Result<Option<Self>> {
        let Some(source) = entry.source else {
            return Ok(None);
        };
        let written: Vec<Option<Text<'_>>> = match entry.options {
            Some(options) => serde_json::from_str::<Option<_>>(options.get())?.unwrap_or_default(),
            None => Vec::new(),
        };
        let options = || written.iter().flatten().map(|Text(option)| &**option);
        let is_recursive = options().any(|option| option == "rbind");
        for option in options() {
            reject_nul(option)?;
        }
        let is_bind = is_recursive
            || entry.kind.is_some_and(|kind| kind == "bind")
            || options().any(|o| o == "bind");
        let bind = || {
            let (source_path, destination) =
                (decoded(source)?, entry.destination.unwrap_or_default());
            reject_nul(&source_path)?;
            reject_nul(&destination)?;
            Ok(Self {
                index,
                source: source_path,
                destination,
                propagation: RequestedPropagation::from_options(options()),
                denied: MountAttributes::denied_by_spec(options()),
                denied_below: MountAttributes::denied_below_by_spec(options()),
                leaves_flags: !options().any(MountAttributes::is_flag_of_spec),
                is_recursive,
                has_recursive_word: options().any(|option| {
                    option.starts_with('r') && RequestedPropagation::from_option(option).is_some()
                }),
                written: Written {
                    source: source.get(),
                    options: entry.options.map(RawValue::get),
                },
            })
        };
        is_bind.then(bind).transpose()
    }

    /// The bind's position in the spec's `mounts`.
    pub fn index(&self) -> usize {
        self.index
    }

    /// The path on the host to bind. A relative path is relative to the bundle.
    pub fn source(&self) -> &Path {
        Path::new(&*self.source)
    }

    /// The path in the container.
    pub fn destination(&self) -> &Path {
        Path::new(&*self.destination)
    }

    /// The propagation that the options request.
    pub fn propagation(&self) -> RequestedPropagation {
        self.propagation
    }

    /// The permissions that the options deny.
    pub fn denied(&self) -> MountAttributes {
        self.denied
    }

    /// The permissions that the options deny on each mount below the bind.
    pub fn denied_below(&self) -> MountAttributes {
        self.denied_below
    }

    /// True without an option for a flag of the mount: the runtime leaves the flags of the source's
    /// mount. With an option it sets all flags, and clears the others.
    pub fn leaves_flags(&self) -> bool {
        self.leaves_flags
    }

    /// True if the bind includes the mounts below its source with every runtime.
    pub fn is_recursive(&self) -> bool {
        self.is_recursive
    }

    /// True if a propagation word begins with an r, such as `rprivate`.
    pub(crate) fn has_recursive_word(&self) -> bool {
        self.has_recursive_word
    }

    pub(super) fn written(&self) -> Written<'a> {
        self.written
    }
}

/// crun's strings end at a NUL: crun would read another path, or take the option for another.
fn reject_nul(text: &str) -> serde_json::Result<()> {
    match text.contains('\0') {
        true => Err(Error::custom("a string has a NUL, where runtimes differ")),
        false => Ok(()),
    }
}

fn decoded(raw: &RawValue) -> serde_json::Result<Cow<'_, str>> {
    serde_json::from_str(raw.get()).map(|Text(text)| text)
}

/// The values of an entry of `mounts` that concern binds. As for Go's `encoding/json`, a string that
/// is `null` is no string.
#[derive(Debug, Default)]
pub(super) struct RawMount<'a> {
    kind: Option<Cow<'a, str>>,
    source: Option<&'a RawValue>,
    pub(super) destination: Option<Cow<'a, str>>,
    options: Option<&'a RawValue>,
}

impl<'de> Deserialize<'de> for RawMount<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Keys;
        impl<'de> Visitor<'de> for Keys {
            type Value = RawMount<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a mount, as an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                const KEYS: [&str; 4] = ["type", "source", "destination", "options"];
                let (mut entry, mut seen) = (RawMount::default(), [false; KEYS.len()]);
                while let Some(Text(key)) = map.next_key()? {
                    let Some(at) = KEYS.iter().position(|name| *name == key) else {
                        reject_other_spelling(&key, &KEYS)?;
                        map.next_value::<IgnoredAny>()?;
                        continue;
                    };
                    reject_second(&key, seen[at])?;
                    seen[at] = true;
                    match at {
                        0 => entry.kind = text(&mut map)?,
                        1 => entry.source = not_null(map.next_value()?),
                        2 => entry.destination = text(&mut map)?,
                        _ => entry.options = Some(map.next_value()?),
                    }
                }
                Ok(entry)
            }
        }
        deserializer.deserialize_map(Keys)
    }
}

fn text<'de, A: MapAccess<'de>>(map: &mut A) -> Result<Option<Cow<'de, str>>, A::Error> {
    Ok(map
        .next_value::<Option<Text<'de>>>()?
        .map(|Text(text)| text))
}

fn not_null(raw: &RawValue) -> Option<&RawValue> {
    (raw.get() != "null").then_some(raw)
}
