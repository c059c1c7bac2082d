//! Paths compared by their names alone.
//!
//! As the standard library does, but for every bind of a spec with every directory that policy knows: the first byte in
//! which two paths differ nearly always settles it.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Whether `path` is `directory`, or lies in it.
pub fn lies_in(path: &Path, directory: &Path) -> bool {
    below(path, directory).is_some()
}

/// What of `path` comes behind `directory`; `None` when it does not lie in it.
pub fn below<'p>(path: &'p Path, directory: &Path) -> Option<&'p Path> {
    match part(path, directory) {
        true => None,
        false => path.strip_prefix(directory).ok(),
    }
}

/// The two differ within a name: neither lies in the other. Where a slash or a dot is involved, names may be the same although
/// bytes differ, as in `a//b` and `a/./b`; then this says nothing.
fn part(one: &Path, other: &Path) -> bool {
    let bytes = |path| Path::as_os_str(path).as_bytes().iter();
    let difference = bytes(one).zip(bytes(other)).find(|(a, b)| a != b);
    difference.is_some_and(|(a, b)| !b"/.".contains(a) && !b"/.".contains(b))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn names_are_compared_as_the_standard_library_does(path in "[/.ab]{0,8}", directory in "[/.ab]{0,8}") {
            let (path, directory) = (Path::new(&path), Path::new(&directory));
            prop_assert_eq!(lies_in(path, directory), path.starts_with(directory));
            prop_assert_eq!(below(path, directory), path.strip_prefix(directory).ok());
        }
    }
}
