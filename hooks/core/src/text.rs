//! Text that a pod writes: cut to a length that a log, a journal and a pipe can take, and quoted
//! for a shell.

use std::borrow::Cow;
use std::path::Path;

/// The text, or at most its first `most` bytes followed by three dots.
pub fn cut(text: &str, most: usize) -> Cow<'_, str> {
    if text.len() <= most {
        return Cow::Borrowed(text);
    }
    let end = (0..=most)
        .rev()
        .find(|end| text.is_char_boundary(*end))
        .unwrap_or(0);
    Cow::Owned(format!("{}...", &text[..end]))
}

/// A path as one word of a command that is advised. A pod names its mount points: `/a;reboot` ends
/// no command.
pub fn shell_word(path: &Path) -> String {
    let text = path.to_string_lossy();
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-+:,@%=~".contains(c);
    match text.starts_with('/') && text.chars().all(is_plain) {
        true => text.into_owned(),
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
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
    fn a_cut_does_not_part_a_character() {
        assert_eq!(cut("abc", 3), "abc");
        assert_eq!(cut("abcd", 3), "abc...");
        assert_eq!(cut("a\u{e9}\u{e9}", 2), "a...");
    }
}
