//! Makes text that a pod wrote safe to print: cut to a length for logs and pipes, escaped for a
//! terminal, quoted for a shell.

use std::borrow::Cow;
use std::error::Error;
use std::path::{Path, PathBuf};

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
