//! HTTP/1.1, as far as the clients here use it.

use std::io::{BufRead, BufReader, Read, Write};

use serde_json::Value;

#[derive(Debug, Default)]
pub(super) struct Request {
    pub(super) method: String,
    /// Without the query.
    pub(super) path: String,
    pub(super) content_type: String,
    pub(super) authorization: String,
    pub(super) body: Vec<u8>,
}

/// Serves a connection's requests in order. An answer of `None` closes the connection.
pub(super) fn serve(
    stream: impl Read + Write,
    answer: impl Fn(&Request) -> Option<(u16, Value)>,
) -> Option<()> {
    let mut stream = BufReader::new(stream);
    loop {
        let request = read(&mut stream)?;
        let (status, body) = answer(&request)?;
        let text = body.to_string();
        write!(
            stream.get_mut(),
            "HTTP/1.1 {status} x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{text}",
            text.len()
        )
        .ok()?;
        stream.get_mut().flush().ok()?;
    }
}

fn read(stream: &mut impl BufRead) -> Option<Request> {
    let mut line = String::new();
    stream
        .read_line(&mut line)
        .ok()
        .filter(|length| *length > 0)?;
    let mut words = line.split_whitespace();
    let (method, target) = (words.next()?.to_owned(), words.next()?);
    let path = target.split('?').next()?.to_owned();
    let mut request = Request {
        method,
        path,
        ..Request::default()
    };
    let mut length = 0;
    loop {
        let mut header = String::new();
        stream.read_line(&mut header).ok()?;
        let Some((name, value)) = header.split_once(':') else {
            break;
        };
        let value = value.trim();
        match name.to_ascii_lowercase().as_str() {
            "content-length" => length = value.parse().ok()?,
            "content-type" => value.clone_into(&mut request.content_type),
            "authorization" => value.clone_into(&mut request.authorization),
            _ => {}
        }
    }
    request.body = vec![0; length];
    stream.read_exact(&mut request.body).ok()?;
    Some(request)
}
