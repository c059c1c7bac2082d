//! The line on which the guard says what it did.
//!
//! One line, once, on a pipe whose other end closes when the guard becomes the runtime. Only its first word is read, so
//! that a later guard may say more.

use tokio::{io::AsyncReadExt, net::unix::pipe};

/// A reason longer than that is cut.
const LONGEST_LINE: usize = 4096;

/// The guard's one line.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Word {
    /// From here on the process is the runtime.
    Handover {
        /// The container that it makes must be checked.
        verify: bool,
    },
    /// Policy; the reason.
    Refused(String),
    /// Nothing was stale, no runtime ran.
    Unchanged,
    /// No word of the contract.
    Garbled,
}

/// Reads up to the end of the line, or of the pipe.
pub(super) async fn hear(line: &mut pipe::Receiver, said: &mut Vec<u8>) {
    while said.len() < LONGEST_LINE && !said.contains(&b'\n') {
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
    fn the_words_of_the_contract() {
        assert_eq!(word(b"handover\n"), Some(Word::Handover { verify: false }));
        assert_eq!(word(b"handover verify\n"), Some(Word::Handover { verify: true }));
        assert_eq!(word(b"handover at once\n"), Some(Word::Handover { verify: false }));
        assert_eq!(word(b"unchanged\n"), Some(Word::Unchanged));
        assert_eq!(word(b"refused /mnt is not mounted\nmore"), Some(Word::Refused("/mnt is not mounted".into())));
        assert_eq!(word(b""), None);
        assert_eq!(word(b"panic at"), Some(Word::Garbled));
    }
}
