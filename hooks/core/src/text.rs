//! Paths and other text: paths are compared by their names alone, and text that a pod wrote is made
//! safe to print. The text is cut to a length for logs and pipes, escaped for a terminal, quoted for
//! a shell.
//!
//! Comparisons give the results of the standard library, but every bind of a spec is compared with
//! every directory of the node. The first byte in which two paths differ nearly always decides. With
//! `Path::strip_prefix`, an admission of 30 binds takes 1.3 times as long (161 instead of 126 µs,
//! `cargo bench -p bindguard-guard`).

use std::borrow::Cow;
use std::error::Error;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use serde::{Serialize, Serializer};

/// The text, or at most its first `most` bytes followed by three dots.
pub fn cut(text: &str, most: usize) -> Cow<'_, str> {
    if text.len() <= most {
        return Cow::Borrowed(text);
    }
    let mut end = most;
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    Cow::Owned(format!("{}...", &text[..end]))
}

/// Escapes control characters, so that the text stays on a single line. A pod chooses names and
/// paths. These must not begin a line, move the cursor or change the order of characters in a
/// terminal.
pub fn one_line(text: &str) -> Cow<'_, str> {
    escaped(text, is_misleading, |c| c.escape_default().to_string())
}

/// Escapes the same characters inside the strings of a JSON text. Line breaks between values stay.
pub fn json_for_terminals(json: &str) -> Cow<'_, str> {
    let is_escaped = |c: char| is_misleading(c) && c != '\n';
    // All of these characters are a single unit of UTF-16.
    escaped(json, is_escaped, |c| format!("\\u{:04x}", u32::from(c)))
}

fn escaped(
    text: &str,
    is_escaped: impl Fn(char) -> bool,
    escape: fn(char) -> String,
) -> Cow<'_, str> {
    if !text.contains(&is_escaped) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 64);
    for c in text.chars() {
        match is_escaped(c) {
            true => out += &escape(c),
            false => out.push(c),
        }
    }
    Cow::Owned(out)
}

/// True for controls of ASCII and C1, for the separators of lines and paragraphs, and for the
/// Bidi_Control characters of Unicode's UAX 9.
fn is_misleading(c: char) -> bool {
    c.is_control()
        || matches!(
            c,
            '\u{61c}'
                | '\u{200e}'
                | '\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2066}'..='\u{2069}'
        )
}

/// Quotes a path as a single word for a command line in advice to the operator. A pod names its
/// mount points: `/a;reboot` must not end the command.
pub fn shell_word(path: &Path) -> String {
    let text = path.to_string_lossy();
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-+:,@%=~".contains(c);
    match text.starts_with('/') && text.chars().all(is_plain) {
        true => text.into_owned(),
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

/// Serializes a path that need not be UTF-8. A container chooses names of files and mount points,
/// and a name that is not UTF-8 must not cost an operator the whole report.
///
/// # Errors
/// The serializer's.
pub fn serialize_path<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    path.to_string_lossy().serialize(serializer)
}

/// The same for several paths.
///
/// # Errors
/// The serializer's.
pub fn serialize_paths<S: Serializer>(paths: &[PathBuf], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(paths.iter().map(|path| path.to_string_lossy()))
}

// Prints an error with its causes in a single line.

/// Example: `bind a over b: device or resource busy`. An error's text names the action and its
/// object; the error's source is the cause.
pub fn error_chain(error: &dyn Error) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let why = error.to_string();
        // Some libraries repeat the source in their own text.
        if !line.contains(&why) {
            line.push_str(": ");
            line.push_str(&why);
        }
        cause = error.source();
    }
    line
}

// Paths compared by their names alone.

/// True if `path` is `directory` or is below `directory`.
pub fn lies_in(path: &Path, directory: &Path) -> bool {
    below(path, directory).is_some()
}

/// True if `path` is below `directory`, and not `directory` itself.
pub fn lies_below(path: &Path, directory: &Path) -> bool {
    below(path, directory).is_some_and(|rest| !rest.as_os_str().is_empty())
}

/// The part of `path` after `directory`; `None` if `path` is outside of `directory`.
pub fn below<'p>(path: &'p Path, directory: &Path) -> Option<&'p Path> {
    let (whole, above) = (bytes(path), bytes(directory));
    let equal = whole.iter().zip(above).take_while(|(a, b)| a == b);
    let shared = equal.count();
    let ends_in_name = is_in_name(whole[..shared].last());
    match (&whole[shared..], &above[shared..]) {
        ([], []) => return Some(Path::new("")),
        ([b'/', rest @ ..], [])
            if ends_in_name && begins_with_name(rest) && is_in_name(rest.last()) =>
        {
            return Some(Path::new(OsStr::from_bytes(rest)));
        }
        // Redundant slashes and dots may be involved, as in `a//b` and `a/./b`.
        ([b'/', ..], []) => {}
        ([], [b'/', next @ ..]) if !is_in_name(next.first()) => {}
        // A name ends where the other path's name continues, or both names continue differently.
        // After a slash comes a name or the path's end.
        (path, directory)
            if ends_in_name || is_in_name(path.first()) && is_in_name(directory.first()) =>
        {
            return None;
        }
        _ => {}
    }
    path.strip_prefix(directory).ok()
}

/// A path below a directory. `Path::join` of an empty path would leave a slash at the end.
pub fn join(mut directory: PathBuf, path: impl AsRef<Path>) -> PathBuf {
    if !path.as_ref().as_os_str().is_empty() {
        directory.push(path);
    }
    directory
}

/// True if a name of the path is `..`: only a walk shows where such a path leads.
pub fn climbs(path: &Path) -> bool {
    // Nearly every path lacks two successive dots.
    bytes(path).windows(2).any(|pair| pair == b"..")
        && path.components().any(|name| name == Component::ParentDir)
}

/// True if a path is `/`, `//` and `/.` included.
pub fn is_root(path: &Path) -> bool {
    !bytes(path).iter().any(|byte| is_in_name(Some(byte))) && path == Path::new("/")
}

/// A byte that can only belong to a name.
fn is_in_name(byte: Option<&u8>) -> bool {
    byte.is_some_and(|byte| !b"/.".contains(byte))
}

/// `..data` and `..` are names; a single dot is none.
fn begins_with_name(path: &[u8]) -> bool {
    is_in_name(path.first()) || path.starts_with(b"..")
}

fn bytes(path: &Path) -> &[u8] {
    path.as_os_str().as_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_path_is_one_word() {
        let word = |path: &str| shell_word(path.as_ref());
        let plain = "/var/lib/kubelet/pods/u-1/volumes/kubernetes.io~csi/a";
        assert_eq!(word(plain), plain);
        assert_eq!(word("/a;reboot"), "'/a;reboot'");
        assert_eq!(word("/a'$(reboot)"), r"'/a'\''$(reboot)'");
    }

    #[test]
    fn a_name_neither_begins_a_line_nor_reorders_it() {
        assert_eq!(
            one_line("/a\nb\r\u{1b}[2J\u{85}"),
            r"/a\nb\r\u{1b}[2J\u{85}"
        );
        for c in "\u{61c}\u{200e}\u{200f}\u{202a}\u{202e}\u{2028}\u{2066}\u{2069}".chars() {
            let escaped = format!(r"a\u{{{:x}}}b", c as u32);
            assert_eq!(one_line(&format!("a{c}b")), escaped);
        }
        let plain = "/dades/\u{e9}\u{5d0}\u{1f600} \u{200d}";
        assert!(matches!(one_line(plain), Cow::Borrowed(same) if same == plain));
    }

    #[test]
    fn a_cut_does_not_part_a_character() {
        assert_eq!(cut("abc", 3), "abc");
        assert_eq!(cut("abcd", 3), "abc...");
        assert_eq!(cut("a\u{e9}\u{e9}", 2), "a...");
    }
}

#[cfg(test)]
mod error_chain_tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    enum Failed {
        #[error("bind a over b")]
        Bind(#[source] std::io::Error),
        #[error("bind a over b: busy")]
        RepeatsItsCause(#[source] std::io::Error),
    }

    #[test]
    fn each_cause_follows_once() {
        let busy = || std::io::Error::other("busy");
        for error in [Failed::Bind(busy()), Failed::RepeatsItsCause(busy())] {
            assert_eq!(error_chain(&error), "bind a over b: busy");
        }
    }
}

#[cfg(test)]
mod paths_tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn names_are_compared_as_the_standard_library_does(path in "[/.ab]{0,8}", directory in "[/.ab]{0,8}") {
            let (path, directory) = (Path::new(&path), Path::new(&directory));
            prop_assert_eq!(lies_in(path, directory), path.starts_with(directory));
            prop_assert_eq!(below(path, directory), path.strip_prefix(directory).ok());
            prop_assert_eq!(is_root(path), path == Path::new("/"));
            prop_assert_eq!(climbs(path), path.components().any(|name| name == Component::ParentDir));
        }
    }
}
