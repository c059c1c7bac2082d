//! AtomicWriter's names.

use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;

/// The link to the current payload; AtomicWriter's rename of the link swaps the whole payload at
/// once.
pub const DATA_LINK: &str = "..data";

/// The arrangement of the files in a volume's directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VolumeLayout {
    /// Behind `..data`, as AtomicWriter writes them: in the kubelet's own volumes, and in those of
    /// drivers that use its code for secrets, certificates and identities.
    Payload,
    /// Directly in the directory.
    Plain,
}

/// The name of a payload's directory, such as `..2026_11_21_05_10_00.123456789`.
///
/// Go's layout `..2006_01_02_15_04_05.` and then the digits that `os.MkdirTemp` appends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TimestampDirectory(String);

impl TimestampDirectory {
    const LAYOUT: &'static [u8] = b"..dddd_dd_dd_dd_dd_dd.";

    /// Parses the name of a timestamp directory; `None` for any other name.
    pub fn from_name(name: &OsStr) -> Option<Self> {
        let (date, suffix) = name.as_bytes().split_at_checked(Self::LAYOUT.len())?;
        let fits = |(actual, wanted): (&u8, &u8)| {
            if *wanted == b'd' {
                actual.is_ascii_digit()
            } else {
                actual == wanted
            }
        };
        let digits = !suffix.is_empty() && suffix.iter().all(u8::is_ascii_digit);
        (digits && date.iter().zip(Self::LAYOUT).all(fits)).then_some(())?;
        Some(Self(name.to_str()?.to_owned()))
    }

    /// The directory's name.
    pub fn name(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for TimestampDirectory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_atomic_writers_names_are_taken() {
        let taken = |name: &str| TimestampDirectory::from_name(OsStr::new(name)).is_some();
        assert!(taken("..2026_11_21_05_10_00.123456789"));
        assert!(taken("..2026_11_21_06_46_27.7661507"));
        for other in [
            "..data",
            "..2026_11_21_05_10_00.",
            "..2026_11_21_05_10_00.12a",
            "2026_11_21_05_10_00.1",
            "..2026-11-21_05_10_00.1",
            "",
        ] {
            assert!(!taken(other), "{other}");
        }
    }
}
