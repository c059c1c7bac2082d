//! The line in which the guard reports its result.
//!
//! The guard writes a single line to a pipe, whose write end closes when the guard becomes the
//! runtime. Only the first word is checked, so that a later guard may add more. A second line,
//! `unrepaired REASON`, names an unrepaired bind on which a runtime can fail. The shim reads the
//! second line if the runtime failed.

use std::time::Duration;

use bindguard_core::handover::{GuardAnswer, MAX_ANSWER, unrepaired_in};
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;

/// For the second line, which is written together with the first: the pipe closes when the runtime
/// begins.
const REST_LIMIT: Duration = Duration::from_millis(500);

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
    unrepaired_in(&String::from_utf8_lossy(received)).map(str::to_owned)
}

async fn read_while(
    answers: &mut pipe::Receiver,
    received: &mut Vec<u8>,
    wants_more: impl Fn(&[u8]) -> bool,
) {
    while received.len() < MAX_ANSWER && wants_more(received) {
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

/// The answer in the first line of the received bytes; `None` if there is none.
pub(super) fn parse_answer(received: &[u8]) -> Option<GuardAnswer> {
    let line = received.split(|byte| *byte == b'\n').next()?;
    GuardAnswer::parse(&String::from_utf8_lossy(line))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_is_the_answer() {
        let refused = Some(GuardAnswer::Refused("/mnt is not mounted".into()));
        assert_eq!(parse_answer(b"refused /mnt is not mounted\nmore"), refused);
        assert_eq!(parse_answer(b"unchanged"), Some(GuardAnswer::Unchanged));
        assert_eq!(parse_answer(b""), None);
        assert_eq!(parse_answer(b"\nunchanged\n"), None);
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
