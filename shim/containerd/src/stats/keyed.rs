//! The forms a cgroup's files have: one number, or a word and a number a line.

use std::{collections::HashMap, fs, path::Path};

/// `name value` lines.
#[derive(Debug, Default)]
pub(super) struct Keyed(HashMap<String, u64>);

impl Keyed {
    /// Reads a file; None where there is none.
    pub(super) fn read(directory: &Path, file: &str) -> Option<Self> {
        fs::read_to_string(directory.join(file)).ok().map(|text| Self::parse(&text))
    }

    fn parse(text: &str) -> Self {
        let pairs = text.lines().filter_map(|line| {
            let (name, value) = line.split_once(' ')?;
            Some((name.to_owned(), number(value)?))
        });
        Self(pairs.collect())
    }

    /// A line's number; 0 where the kernel has no such line, which is how the message says that, too.
    pub(super) fn of(&self, name: &str) -> u64 {
        self.0.get(name).copied().unwrap_or(0)
    }
}

/// The one number in a file; None where there is none.
pub(super) fn single(directory: &Path, file: &str) -> Option<u64> {
    number(&fs::read_to_string(directory.join(file)).ok()?)
}

/// `max` is no limit, the largest number in Go's library.
fn number(text: &str) -> Option<u64> {
    match text.trim() {
        "max" => Some(u64::MAX),
        digits => digits.parse().ok(),
    }
}

/// Fills a message's fields from the lines of the same, or the given, name.
macro_rules! fill {
    ($message:ident from $keyed:expr; $($field:ident $(= $name:literal)?),+ $(,)?) => {
        $( $message.$field = $keyed.of(fill!(@name $field $($name)?)); )+
    };
    (@name $field:ident $name:literal) => { $name };
    (@name $field:ident) => { stringify!($field) };
}
pub(super) use fill;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_and_numbers() {
        let keyed = Keyed::parse("usage_usec 12\nlimit max\nodd\n");
        assert_eq!((keyed.of("usage_usec"), keyed.of("limit"), keyed.of("odd")), (12, u64::MAX, 0));
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("pids.max"), "max\n").unwrap();
        assert_eq!(single(dir.path(), "pids.max"), Some(u64::MAX));
        assert_eq!(single(dir.path(), "nothing"), None);
    }
}
