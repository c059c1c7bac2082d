//! A single GET over a unix socket: HTTP/1.0, so that the answer ends with the connection.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::geteuid;

/// Time limit of a query.
const QUERY_TIMEOUT: Duration = Duration::from_secs(5);

/// Limit of an answer: Docker's list of a thousand containers has about 2 MiB.
const MAX_ANSWER: usize = 16 << 20;

/// The body of the answer. It waits, for at most [`QUERY_TIMEOUT`].
pub fn get(socket: &Path, path: &str) -> Result<String> {
    get_within(QUERY_TIMEOUT, socket, path)
}

fn get_within(limit: Duration, socket: &Path, path: &str) -> Result<String> {
    answer(Instant::now() + limit, socket, path)
        .map_err(|error| match error.kind() {
            ErrorKind::WouldBlock => anyhow::anyhow!("no answer within {limit:?}"),
            _ => error.into(),
        })
        .and_then(body)
        .with_context(|| format!("query {}{path}", socket.display()))
}

fn answer(until: Instant, socket: &Path, path: &str) -> io::Result<String> {
    let family = AddressFamily::UNIX;
    let stream = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // unix(7): a connect waits for room in the server's queue, as long as a write.
    set_socket_timeout(&stream, Timeout::Send, Some(time_until(until)?))?;
    connect(&stream, &SocketAddrUnix::new(socket)?)?;
    refuse_server_of_user(&stream)?;
    let mut stream = UnixStream::from(stream);
    write!(stream, "GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n")?;
    let mut answer = Vec::new();
    let mut buffer = vec![0; 64 << 10];
    loop {
        stream.set_read_timeout(Some(time_until(until)?))?;
        match stream.read(&mut buffer) {
            Ok(0) => return String::from_utf8(answer).map_err(io::Error::other),
            Ok(read) => answer.extend_from_slice(&buffer[..read]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        if answer.len() > MAX_ANSWER {
            return Err(ErrorKind::FileTooLarge.into());
        }
    }
}

/// Refuses the server of a unix socket that belongs to another user: a socket's path does not name
/// its server.
///
/// # Errors
/// If the server's user is neither root nor this process's user.
pub fn refuse_server_of_user(socket: impl AsFd) -> io::Result<()> {
    let server = socket_peercred(socket)?.uid;
    if server.is_root() || server == geteuid() {
        return Ok(());
    }
    let why = format!("its server is a process of user {}", server.as_raw());
    Err(io::Error::new(ErrorKind::PermissionDenied, why))
}

/// The time that is left. As the kernel's, the error of no time is `WouldBlock`.
fn time_until(until: Instant) -> io::Result<Duration> {
    let left = until.checked_duration_since(Instant::now());
    left.filter(|left| !left.is_zero())
        .ok_or_else(|| ErrorKind::WouldBlock.into())
}

fn body(mut answer: String) -> Result<String> {
    let (head, body) = answer
        .split_once("\r\n\r\n")
        .context("the answer ends within its headers")?;
    let status = head.lines().next().unwrap_or_default();
    ensure!(
        status.split(' ').nth(1) == Some("200"),
        "the answer is {status:?}"
    );
    // No copy of a list with megabytes.
    let head = answer.len() - body.len();
    answer.drain(..head);
    Ok(answer)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::os::unix::net::UnixListener;
    use std::path::PathBuf;
    use std::thread;

    use super::*;

    #[test]
    fn only_a_whole_answer_of_200_has_a_body() {
        assert_eq!(
            body("HTTP/1.0 200 OK\r\nA: b\r\n\r\n{}\n".to_owned()).unwrap(),
            "{}\n"
        );
        assert!(
            body("HTTP/1.1 404 Not Found\r\n\r\n".to_owned())
                .unwrap_err()
                .to_string()
                .contains("404")
        );
        assert!(body("HTTP/1.0 200 OK\r\nA: b".to_owned()).is_err());
    }

    /// A server that sends this part again and again.
    fn endless(part: &'static [u8], pause: Duration) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let listener = UnixListener::bind(&socket).unwrap();
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            while stream.write_all(part).is_ok() {
                thread::sleep(pause);
            }
        });
        (folder, socket)
    }

    #[test]
    fn a_server_that_sends_byte_by_byte_ends_a_query() {
        let (_folder, socket) = endless(b" ", Duration::from_millis(10));
        let limit = Duration::from_millis(200);
        let error = format!("{:#}", get_within(limit, &socket, "/").unwrap_err());
        assert!(error.ends_with("no answer within 200ms"), "{error}");
    }

    #[test]
    fn a_server_that_sends_without_an_end_ends_a_query() {
        let (_folder, socket) = endless(&[b' '; 1 << 20], Duration::ZERO);
        let limit = Duration::from_secs(60);
        let error = format!("{:#}", get_within(limit, &socket, "/").unwrap_err());
        assert!(error.ends_with("file too large"), "{error}");
    }
}
