//! The line in which the guard reports its result.
//!
//! One line, once, on a pipe whose other end closes when the guard becomes the runtime. Only its
//! first word is checked, so that a later guard may add more. A second line, `unrepaired REASON`,
//! names a bind that the guard left as it was and on which a runtime can fail. It is read if the
//! runtime failed.

use std::time::Duration;

use bindguard_core::handover::{HANDOVER, MAX_LINE, PROVE, REFUSED, UNCHANGED, UNREPAIRED};
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;

/// For the second line, which is written together with the first: the pipe closes when the runtime
/// begins.
const REST_LIMIT: Duration = Duration::from_millis(500);

/// The guard's first line.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum GuardAnswer {
    /// From here on the process is the runtime.
    Handover {
        /// True if the mounts of its container must be compared with the record.
        prove: bool,
    },
    /// Refused by policy, for this reason.
    Refused(String),
    /// Nothing was stale, and no runtime ran.
    Unchanged,
    /// Not a line of the protocol.
    Invalid,
}

/// Reads up to the end of the first line, or of the pipe.
pub(super) async fn read_answer(answers: &mut pipe::Receiver, received: &mut Vec<u8>) {
    read_while(answers, received, |received| !received.contains(&b'\n')).await;
}

/// Reads the rest, and returns a reason for which the runtime can have failed.
pub(super) async fn read_unrepaired(
    answers: &mut pipe::Receiver,
    received: &mut Vec<u8>,
) -> Option<String> {
    let _ = tokio::time::timeout(REST_LIMIT, read_while(answers, received, |_| true)).await;
    let text = String::from_utf8_lossy(received);
    let reason = text
        .lines()
        .skip(1)
        .find_map(|line| line.strip_prefix(UNREPAIRED)?.strip_prefix(' '));
    reason.map(str::to_owned)
}

async fn read_while(
    answers: &mut pipe::Receiver,
    received: &mut Vec<u8>,
    wants_more: impl Fn(&[u8]) -> bool,
) {
    while received.len() < MAX_LINE && wants_more(received) {
        match answers.read_buf(received).await {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(%error, "cannot read the guard's answer");
                return;
            }
        }
    }
}

/// The first line of the received bytes; None while there are none.
pub(super) fn parse_answer(received: &[u8]) -> Option<GuardAnswer> {
    let end = received
        .iter()
        .position(|byte| *byte == b'\n')
        .unwrap_or(received.len());
    let line = String::from_utf8_lossy(&received[..end]);
    match line.split_once(' ').unwrap_or((&line, "")) {
        ("", _) => None,
        (HANDOVER, more) => Some(GuardAnswer::Handover {
            prove: more == PROVE,
        }),
        (UNCHANGED, _) => Some(GuardAnswer::Unchanged),
        (REFUSED, reason) => Some(GuardAnswer::Refused(reason.to_owned())),
        _ => Some(GuardAnswer::Invalid),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_lines_of_the_protocol() {
        assert_eq!(
            parse_answer(b"handover\n"),
            Some(GuardAnswer::Handover { prove: false })
        );
        assert_eq!(
            parse_answer(b"handover prove\n"),
            Some(GuardAnswer::Handover { prove: true })
        );
        assert_eq!(
            parse_answer(b"handover at once\n"),
            Some(GuardAnswer::Handover { prove: false })
        );
        assert_eq!(parse_answer(b"unchanged\n"), Some(GuardAnswer::Unchanged));
        assert_eq!(
            parse_answer(b"refused /mnt is not mounted\nmore"),
            Some(GuardAnswer::Refused("/mnt is not mounted".into()))
        );
        assert_eq!(parse_answer(b""), None);
        assert_eq!(parse_answer(b"panic at"), Some(GuardAnswer::Invalid));
    }

    #[tokio::test]
    async fn a_second_line_is_the_reason() {
        for (sent, reason) in [
            ("handover\n", None),
            (
                "handover prove\nunrepaired app.conf is gone\n",
                Some("app.conf is gone"),
            ),
            ("unchanged\nof a later guard\nunrepaired why\n", Some("why")),
            ("unrepaired is no first line\n", None),
        ] {
            let (read, write) = std::io::pipe().unwrap();
            let mut answers = pipe::Receiver::from_owned_fd(read.into()).unwrap();
            std::io::Write::write_all(&mut { write }, sent.as_bytes()).unwrap();
            let mut received = Vec::new();
            read_answer(&mut answers, &mut received).await;
            assert_eq!(
                read_unrepaired(&mut answers, &mut received)
                    .await
                    .as_deref(),
                reason,
                "{sent:?}"
            );
        }
    }
}
