//! A stream as containerd names it: nothing, a path, or a URI.
//!
//! ```text
//!   /run/containerd/fifo/1/web-stdout     a path, nearly always of a fifo
//!   file:///var/log/web.log               a file that the shim makes
//!   binary:///usr/bin/logger?tag=web      a program that reads stdout and stderr; its arguments are `tag web`
//!   binary-v2:///usr/bin/logger           the same, and it must report that it is ready
//! ```
//! The parser follows Go's net/url, because clients test against that: a host is ignored, `%20` is a blank in a path, and `+`
//! is one in a query. The first value of a repeated key is used.

use std::path::PathBuf;

/// A stream's other end.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Stream {
    /// No stream.
    Nowhere,
    /// An existing file.
    Path(PathBuf),
    /// A log file to create.
    File(PathBuf),
    /// A program to start.
    Logger(Program),
}

/// A logging program.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Program {
    /// The executable.
    pub(super) path: PathBuf,
    /// Keys and values of the query, in order.
    pub(super) arguments: Vec<String>,
    /// True if an end without output counts as a failure: otherwise it counts as ready.
    pub(super) must_signal_ready: bool,
}

/// A URI with an unknown scheme.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct UnknownScheme;

impl Stream {
    /// Parses the kind of stream.
    pub(super) fn parse(name: &str) -> Result<Self, UnknownScheme> {
        if name.is_empty() {
            return Ok(Self::Nowhere);
        }
        let Some((scheme, rest)) = name.split_once("://").filter(|(scheme, _)| !scheme.contains('/')) else {
            return Ok(Self::Path(name.into()));
        };
        let rest = rest.split_once('#').map_or(rest, |(before, _fragment)| before);
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        let path = || PathBuf::from(decoded(place.find('/').map_or("", |slash| &place[slash..])));
        match scheme {
            "fifo" => Ok(Self::Path(path())),
            "file" => Ok(Self::File(path())),
            "binary" | "binary-v2" => Ok(Self::Logger(Program {
                path: path(),
                arguments: arguments(query),
                must_signal_ready: scheme == "binary-v2",
            })),
            _ => Err(UnknownScheme),
        }
    }
}

fn arguments(query: &str) -> Vec<String> {
    let mut pairs: Vec<(String, String)> = Vec::new();
    for word in query.split('&').filter(|word| !word.is_empty()) {
        let (key, value) = word.split_once('=').unwrap_or((word, ""));
        let [key, value] = [key, value].map(|text| decoded(&text.replace('+', " ")));
        if pairs.iter().all(|(known, _)| *known != key) {
            pairs.push((key, value));
        }
    }
    pairs.into_iter().flat_map(|(key, value)| [key, value]).collect()
}

/// Percent-decoding; a `%` without two hexadecimal digits stays as it is.
fn decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [byte, after @ ..] = rest {
        match (byte, after.split_at_checked(2).and_then(|(digits, after)| Some((hex(digits)?, after)))) {
            (b'%', Some((value, after))) => {
                bytes.push(value);
                rest = after;
            }
            _ => {
                bytes.push(*byte);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn hex(digits: &[u8]) -> Option<u8> {
    let text = std::str::from_utf8(digits).ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_hexdigit()))?;
    u8::from_str_radix(text, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logger(name: &str) -> Program {
        match Stream::parse(name) {
            Ok(Stream::Logger(program)) => program,
            other => panic!("{name}: {other:?}"),
        }
    }

    #[test]
    fn paths_and_files() {
        assert_eq!(Stream::parse(""), Ok(Stream::Nowhere));
        assert_eq!(Stream::parse("/run/a b%20"), Ok(Stream::Path("/run/a b%20".into())));
        assert_eq!(Stream::parse("/run/odd://name"), Ok(Stream::Path("/run/odd://name".into())));
        assert_eq!(Stream::parse("file:///var/log/a%20b?x=y"), Ok(Stream::File("/var/log/a b".into())));
        assert_eq!(Stream::parse("npipe:////./pipe/x"), Err(UnknownScheme));
    }

    #[test]
    fn a_query_becomes_arguments() {
        let program = logger("binary://host/bin/log?tag=web+1&to=a%2Fb&flag&tag=again#end");
        assert_eq!(program.path, PathBuf::from("/bin/log"));
        assert_eq!(program.arguments, ["tag", "web 1", "to", "a/b", "flag", ""]);
        assert!(!program.must_signal_ready);
        assert!(logger("binary-v2:///bin/log").must_signal_ready);
    }

    #[test]
    fn a_percent_sign_alone_stays() {
        assert_eq!(decoded("100%"), "100%");
        assert_eq!(decoded("%zz%+1%C3%A9"), "%zz%+1é");
    }
}
