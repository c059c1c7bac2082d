//! Text that a pod writes, cut to a length that a log, a journal and a pipe can take.

use std::borrow::Cow;

/// The text, or at most its first `most` bytes followed by three dots.
pub fn cut(text: &str, most: usize) -> Cow<'_, str> {
    if text.len() <= most {
        return Cow::Borrowed(text);
    }
    let end = (0..=most).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    Cow::Owned(format!("{}...", &text[..end]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_does_not_part_a_character() {
        assert_eq!(cut("abc", 3), "abc");
        assert_eq!(cut("abcd", 3), "abc...");
        assert_eq!(cut("a\u{e9}\u{e9}", 2), "a...");
    }
}
