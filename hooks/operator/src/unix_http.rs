//! A single GET over a unix socket: HTTP/1.0, so that the answer ends with the connection.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

const TIME_LIMIT: Duration = Duration::from_secs(5);

/// The body of the answer.
pub fn get(socket: &Path, path: &str) -> Result<String> {
    let doing = || format!("query {}{path}", socket.display());
    let mut stream = UnixStream::connect(socket).with_context(doing)?;
    stream
        .set_read_timeout(Some(TIME_LIMIT))
        .with_context(doing)?;
    stream
        .set_write_timeout(Some(TIME_LIMIT))
        .with_context(doing)?;
    write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n").with_context(doing)?;
    let mut answer = String::new();
    match stream.read_to_string(&mut answer) {
        Err(error) if error.kind() == ErrorKind::WouldBlock => {
            bail!("{}: no answer within {TIME_LIMIT:?}", doing())
        }
        read => read.with_context(doing)?,
    };
    body(&answer).with_context(doing)
}

fn body(answer: &str) -> Result<String> {
    let (head, body) = answer
        .split_once("\r\n\r\n")
        .context("the answer ends within its headers")?;
    let status = head.lines().next().unwrap_or_default();
    ensure!(
        status.split(' ').nth(1) == Some("200"),
        "the answer is {status:?}"
    );
    Ok(body.to_owned())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::*;

    #[test]
    fn only_a_whole_answer_of_200_has_a_body() {
        assert_eq!(body("HTTP/1.0 200 OK\r\nA: b\r\n\r\n{}\n").unwrap(), "{}\n");
        assert!(
            body("HTTP/1.1 404 Not Found\r\n\r\n")
                .unwrap_err()
                .to_string()
                .contains("404")
        );
        assert!(body("HTTP/1.0 200 OK\r\nA: b").is_err());
    }
}
