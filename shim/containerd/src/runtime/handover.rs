//! The line in which the guard reports its result.
//!
//! One line, once, on a pipe whose other end closes when the guard becomes the runtime. Only its first word is checked, so that
//! a later guard may add more. A second line, `unrepaired REASON`, names a bind that the guard left as it was and on which a
//! runtime can fail. It is read if the runtime failed.

use std::time::Duration;

use tokio::{io::AsyncReadExt, net::unix::pipe};

/// A longer reason is cut.
const LONGEST_LINE: usize = 4096;

/// For the second line, which is written together with the first: the pipe closes when the runtime begins.
const REST: Duration = Duration::from_millis(500);

/// The guard's first line.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Word {
    /// From here on the process is the runtime.
    Handover {
        /// True if the container that it makes must be checked.
        verify: bool,
    },
    /// Refused by policy, for this reason.
    Refused(String),
    /// Nothing was stale, and no runtime ran.
    Unchanged,
    /// Not a word of the protocol.
    Garbled,
}

/// Reads up to the end of the first line, or of the pipe.
pub(super) async fn hear(line: &mut pipe::Receiver, said: &mut Vec<u8>) {
    read_while(line, said, |said| !said.contains(&b'\n')).await;
}

/// Reads the rest, and returns a reason for which the runtime can have failed.
pub(super) async fn hear_reason(line: &mut pipe::Receiver, said: &mut Vec<u8>) -> Option<String> {
    let _ = tokio::time::timeout(REST, read_while(line, said, |_| true)).await;
    let text = String::from_utf8_lossy(said);
    let reason = text.lines().skip(1).find_map(|line| line.strip_prefix("unrepaired "));
    reason.map(str::to_owned)
}

async fn read_while(line: &mut pipe::Receiver, said: &mut Vec<u8>, wants_more: impl Fn(&[u8]) -> bool) {
    while said.len() < LONGEST_LINE && wants_more(said) {
        match line.read_buf(said).await {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(%error, "cannot read the guard's answer");
                return;
            }
        }
    }
}

/// The word in the received bytes; None while there are none.
pub(super) fn word(said: &[u8]) -> Option<Word> {
    let end = said.iter().position(|byte| *byte == b'\n').unwrap_or(said.len());
    let line = String::from_utf8_lossy(&said[..end]);
    match line.split_once(' ').unwrap_or((&line, "")) {
        ("", _) => None,
        ("handover", more) => Some(Word::Handover { verify: more == "verify" }),
        ("unchanged", _) => Some(Word::Unchanged),
        ("refused", reason) => Some(Word::Refused(reason.to_owned())),
        _ => Some(Word::Garbled),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_lines_of_the_protocol() {
        assert_eq!(word(b"handover\n"), Some(Word::Handover { verify: false }));
        assert_eq!(word(b"handover verify\n"), Some(Word::Handover { verify: true }));
        assert_eq!(word(b"handover at once\n"), Some(Word::Handover { verify: false }));
        assert_eq!(word(b"unchanged\n"), Some(Word::Unchanged));
        assert_eq!(word(b"refused /mnt is not mounted\nmore"), Some(Word::Refused("/mnt is not mounted".into())));
        assert_eq!(word(b""), None);
        assert_eq!(word(b"panic at"), Some(Word::Garbled));
    }

    #[tokio::test]
    async fn a_second_line_is_the_reason() {
        for (said, reason) in [
            ("handover\n", None),
            ("handover verify\nunrepaired app.conf is gone\n", Some("app.conf is gone")),
            ("unchanged\nof a later guard\nunrepaired why\n", Some("why")),
            ("unrepaired is no first line\n", None),
        ] {
            let (read, write) = std::io::pipe().unwrap();
            let mut line = pipe::Receiver::from_owned_fd(read.into()).unwrap();
            std::io::Write::write_all(&mut { write }, said.as_bytes()).unwrap();
            let mut heard = Vec::new();
            hear(&mut line, &mut heard).await;
            assert_eq!(hear_reason(&mut line, &mut heard).await.as_deref(), reason, "{said:?}");
        }
    }
}
