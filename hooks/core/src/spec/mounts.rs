//! The binds in a spec's list of mounts.

use std::fmt;

use serde::de::{Deserializer, Error, IgnoredAny, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::bind::{Bind, Entry};
use super::view::SpecError;

/// Binds behind the first so many are not looked at. A pod's have some tens; what somebody gets by asking for a hundred
/// thousand is a guard that is late, and a journal that is full of them.
pub(super) const MOST_BINDS: usize = 2_000;

/// The binds of a list of mounts, and how many mounts behind them were not looked at.
#[derive(Debug, Default)]
pub(super) struct Binds<'a> {
    pub(super) seen: Vec<Bind<'a>>,
    pub(super) overlooked: usize,
}

impl<'a> Binds<'a> {
    pub(super) fn from_mounts(mounts: &'a RawValue) -> Result<Self, SpecError> {
        let mut reader = Reader { binds: Self::default(), entry: None };
        match serde_json::Deserializer::from_str(mounts.get()).deserialize_seq(&mut reader) {
            Ok(()) => Ok(reader.binds),
            Err(source) => {
                let field = reader.entry.map_or("mounts".to_owned(), |index| format!("mounts[{index}]"));
                Err(SpecError::Field { field, source })
            }
        }
    }
}

/// Reads entry by entry, and knows at which one it is.
struct Reader<'a> {
    binds: Binds<'a>,
    entry: Option<usize>,
}

impl<'de> Visitor<'de> for &mut Reader<'de> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of mounts")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut mounts: A) -> Result<(), A::Error> {
        let Binds { seen, overlooked } = &mut self.binds;
        for index in 0.. {
            self.entry = Some(index);
            if seen.len() == MOST_BINDS {
                break;
            }
            match mounts.next_element::<Option<Entry<'de>>>()? {
                Some(entry) => {
                    seen.extend(Bind::from_entry(index, entry.unwrap_or_default()).map_err(A::Error::custom)?);
                }
                None => return Ok(()),
            }
        }
        while mounts.next_element::<IgnoredAny>()?.is_some() {
            *overlooked += 1;
        }
        Ok(())
    }
}
