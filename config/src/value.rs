//! The kinds of values in a config file: how each is read, and how each is shown.

use std::net::SocketAddr;
use std::ops::Range;
use std::path::PathBuf;

use bindguard_core::policy::{
    Alarm, BelowEmptyDirs, FailedRepair, Mode, ReadOnlyBinds, Scope, Vanished,
};
use bindguard_core::refresh_request::RefreshMode;
use toml::Spanned;
use toml::Value;
use toml::de::DeValue;

/// A mistake in a value: its place in the text, and what is expected there.
#[derive(Debug)]
pub(crate) struct Mistake {
    pub(crate) place: Range<usize>,
    pub(crate) expected: String,
}

/// A kind of value.
pub(crate) trait Setting: Clone {
    /// Reads a value. `None` if it is unreadable; a list may also be read without its unreadable
    /// elements.
    fn read(value: &Spanned<DeValue<'_>>, mistakes: &mut Vec<Mistake>) -> Option<Self>;

    /// The value as the file would state it.
    fn shown(&self) -> Value;
}

/// A value from a fixed list of words.
pub(crate) trait Choice: Copy + PartialEq + 'static {
    const WORDS: &'static [(&'static str, Self)];

    fn from_word(word: &str) -> Option<Self> {
        let mut words = Self::WORDS.iter();
        words
            .find(|(name, _)| *name == word)
            .map(|(_, choice)| *choice)
    }

    /// `"a", "b" or "c"`
    fn words() -> String {
        let quoted: Vec<String> = Self::WORDS
            .iter()
            .map(|(word, _)| format!("{word:?}"))
            .collect();
        match quoted.split_last() {
            Some((last, [])) => last.clone(),
            Some((last, others)) => format!("{} or {last}", others.join(", ")),
            None => String::new(),
        }
    }
}

impl<T: Choice> Setting for T {
    fn read(value: &Spanned<DeValue<'_>>, mistakes: &mut Vec<Mistake>) -> Option<Self> {
        from_text(value, mistakes, &Self::words(), Self::from_word)
    }

    fn shown(&self) -> Value {
        let word = Self::WORDS
            .iter()
            .find(|(_, choice)| choice == self)
            .map(|(name, _)| *name);
        Value::String(word.unwrap_or_default().to_owned())
    }
}

impl Choice for Mode {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("repair", Self::Repair),
        ("report", Self::Report),
        ("off", Self::Off),
    ];
}

impl Choice for Alarm {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("report", Self::Report),
        ("refuse", Self::Refuse),
        ("off", Self::Off),
    ];
}

impl Choice for Vanished {
    const WORDS: &'static [(&'static str, Self)] =
        &[("leave", Self::Leave), ("remake", Self::Remake)];
}

impl Choice for BelowEmptyDirs {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("report", Self::Report),
        ("detach", Self::Detach),
        ("off", Self::Off),
    ];
}

impl Choice for FailedRepair {
    const WORDS: &'static [(&'static str, Self)] =
        &[("pass", Self::Pass), ("refuse", Self::Refuse)];
}

impl Choice for Scope {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("host-root", Self::HostRoot),
        ("runtime-dirs", Self::RuntimeDirectories),
        ("any-submounts", Self::AnySubmounts),
    ];
}

impl Choice for ReadOnlyBinds {
    const WORDS: &'static [(&'static str, Self)] =
        &[("rslave", Self::MakeRslave), ("keep", Self::Keep)];
}

impl Choice for RefreshMode {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("annotated", Self::Annotated),
        ("all", Self::All),
        ("off", Self::Off),
    ];
}

impl Setting for bool {
    fn read(value: &Spanned<DeValue<'_>>, mistakes: &mut Vec<Mistake>) -> Option<Self> {
        value
            .get_ref()
            .as_bool()
            .or_else(|| mistake(value, mistakes, "true or false"))
    }

    fn shown(&self) -> Value {
        Value::Boolean(*self)
    }
}

/// A whole number from `MIN` to `MAX`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Number<const MIN: u32, const MAX: u32>(pub(crate) u32);

impl<const MIN: u32, const MAX: u32> Setting for Number<MIN, MAX> {
    fn read(value: &Spanned<DeValue<'_>>, mistakes: &mut Vec<Mistake>) -> Option<Self> {
        let digits = value.get_ref().as_integer();
        let number =
            digits.and_then(|number| u32::from_str_radix(number.as_str(), number.radix()).ok());
        let number = number
            .filter(|number| (MIN..=MAX).contains(number))
            .map(Self);
        let expected = || format!("a number from {MIN} to {MAX}");
        number.or_else(|| mistake(value, mistakes, &expected()))
    }

    fn shown(&self) -> Value {
        Value::Integer(self.0.into())
    }
}

/// A text, which may be empty.
impl Setting for String {
    fn read(value: &Spanned<DeValue<'_>>, mistakes: &mut Vec<Mistake>) -> Option<Self> {
        from_text(value, mistakes, "a text in quotes", |text| {
            Some(text.to_owned())
        })
    }

    fn shown(&self) -> Value {
        Value::String(self.clone())
    }
}

/// A program: a path, or a name to search for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Program(pub(crate) String);

impl Setting for Program {
    fn read(value: &Spanned<DeValue<'_>>, mistakes: &mut Vec<Mistake>) -> Option<Self> {
        from_text(value, mistakes, "a path, or a program's name", |name| {
            let is_name = !name.is_empty() && !name.contains('\0');
            is_name.then(|| Self(name.to_owned()))
        })
    }

    fn shown(&self) -> Value {
        Value::String(self.0.clone())
    }
}

/// An absolute path. A relative path would depend on the directory from which a runtime is called,
/// and match nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Absolute(pub(crate) String);

impl Absolute {
    pub(crate) fn path(&self) -> PathBuf {
        PathBuf::from(&self.0)
    }
}

impl Setting for Absolute {
    fn read(value: &Spanned<DeValue<'_>>, mistakes: &mut Vec<Mistake>) -> Option<Self> {
        from_text(value, mistakes, "an absolute path, \"/...\"", |path| {
            is_absolute(path).then(|| Self(path.to_owned()))
        })
    }

    fn shown(&self) -> Value {
        Value::String(self.0.clone())
    }
}

/// An absolute path; empty for none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct OptionalPath(pub(crate) String);

impl Setting for OptionalPath {
    fn read(value: &Spanned<DeValue<'_>>, mistakes: &mut Vec<Mistake>) -> Option<Self> {
        from_text(
            value,
            mistakes,
            "an absolute path, \"/...\", or \"\"",
            |path| (path.is_empty() || is_absolute(path)).then(|| Self(path.to_owned())),
        )
    }

    fn shown(&self) -> Value {
        Value::String(self.0.clone())
    }
}

/// No file's name has a NUL byte, and a system call with a NUL byte would fail.
fn is_absolute(path: &str) -> bool {
    path.starts_with('/') && !path.contains('\0')
}

/// A list of absolute paths. Invalid elements are skipped; a list that has only invalid elements is
/// unreadable.
impl Setting for Vec<Absolute> {
    fn read(value: &Spanned<DeValue<'_>>, mistakes: &mut Vec<Mistake>) -> Option<Self> {
        let Some(elements) = value.get_ref().as_array() else {
            return mistake(value, mistakes, "a list of absolute paths, [\"/...\"]");
        };
        let read: Self = elements
            .iter()
            .filter_map(|element| Absolute::read(element, mistakes))
            .collect();
        Some(read).filter(|read| elements.is_empty() || !read.is_empty())
    }

    fn shown(&self) -> Value {
        Value::Array(self.iter().map(Setting::shown).collect())
    }
}

impl Setting for SocketAddr {
    fn read(value: &Spanned<DeValue<'_>>, mistakes: &mut Vec<Mistake>) -> Option<Self> {
        from_text(value, mistakes, "an address, \"IP:PORT\"", |text| {
            text.parse().ok()
        })
    }

    fn shown(&self) -> Value {
        Value::String(self.to_string())
    }
}

/// An address, or "off".
impl Setting for Option<SocketAddr> {
    fn read(value: &Spanned<DeValue<'_>>, mistakes: &mut Vec<Mistake>) -> Option<Self> {
        from_text(
            value,
            mistakes,
            "an address, \"IP:PORT\", or \"off\"",
            |text| match text {
                "off" => Some(None),
                address => address.parse().ok().map(Some),
            },
        )
    }

    fn shown(&self) -> Value {
        Value::String(self.map_or_else(|| "off".to_owned(), |address| address.to_string()))
    }
}

/// Reads a value that is a text.
fn from_text<T>(
    value: &Spanned<DeValue<'_>>,
    mistakes: &mut Vec<Mistake>,
    expected: &str,
    read: impl FnOnce(&str) -> Option<T>,
) -> Option<T> {
    let read = value.get_ref().as_str().and_then(read);
    read.or_else(|| mistake(value, mistakes, expected))
}

fn mistake<T>(
    value: &Spanned<DeValue<'_>>,
    mistakes: &mut Vec<Mistake>,
    expected: &str,
) -> Option<T> {
    mistakes.push(Mistake {
        place: value.span(),
        expected: expected.to_owned(),
    });
    None
}
