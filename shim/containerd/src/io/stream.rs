//! A stream as containerd names it: nothing, a path, or a URI.
//!
//! ```text
//!   /run/containerd/fifo/1/web-stdout     a path, nearly always of a fifo
//!   file:///var/log/web.log               a file that the shim makes
//!   binary:///usr/bin/logger?tag=web      a program that reads stdout and stderr; its arguments are `tag web`
//!   binary-v2:///usr/bin/logger           the same, and it must report that it is ready
//! ```
//! The parser follows Go's net/url, because clients test against net/url: a host is ignored and may
//! be missing (`file:/x`), `%20` is a blank in a path, and `+` is a blank in a query. A path with
//! an invalid escape is refused, a query part with an invalid escape is skipped. The first value of
//! a repeated key is used.

use std::path::PathBuf;

/// The client's end of a stream.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Stream {
    /// No stream.
    Nowhere,
    /// An existing file.
    Path(PathBuf),
    /// A log file to create.
    File(PathBuf),
    /// A program to start.
    Logger(LogProgram),
}

/// A logging program.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct LogProgram {
    /// The executable.
    pub(super) path: PathBuf,
    /// Keys and values of the query, in order.
    pub(super) arguments: Vec<String>,
    /// True if an end without output counts as a failure: otherwise it counts as ready.
    pub(super) must_signal_ready: bool,
}

/// A URI with an unknown scheme, or with an invalid path.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct InvalidUri;

impl Stream {
    /// Parses the kind of stream.
    pub(super) fn parse(name: &str) -> Result<Self, InvalidUri> {
        if name.is_empty() {
            return Ok(Self::Nowhere);
        }
        let Some((scheme, rest)) = name
            .split_once(":/")
            .filter(|(scheme, _)| !scheme.contains('/'))
        else {
            return Ok(Self::Path(name.into()));
        };
        let rest = rest
            .split_once('#')
            .map_or(rest, |(before, _fragment)| before);
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        let path = match place.strip_prefix('/') {
            Some(after_slashes) => after_slashes
                .find('/')
                .map_or("", |slash| &after_slashes[slash..])
                .to_owned(),
            None => format!("/{place}"),
        };
        let path = PathBuf::from(decoded(&path).ok_or(InvalidUri)?);
        match scheme {
            "fifo" => Ok(Self::Path(path)),
            "file" => Ok(Self::File(path)),
            "binary" | "binary-v2" => Ok(Self::Logger(LogProgram {
                path,
                arguments: arguments(query),
                must_signal_ready: scheme == "binary-v2",
            })),
            _ => Err(InvalidUri),
        }
    }
}

fn arguments(query: &str) -> Vec<String> {
    let mut pairs: Vec<(String, String)> = Vec::new();
    for word in query
        .split('&')
        .filter(|word| !word.is_empty() && !word.contains(';'))
    {
        let (key, value) = word.split_once('=').unwrap_or((word, ""));
        let [Some(key), Some(value)] = [key, value].map(|text| decoded(&text.replace('+', " ")))
        else {
            continue;
        };
        if pairs.iter().all(|(known, _)| *known != key) {
            pairs.push((key, value));
        }
    }
    pairs
        .into_iter()
        .flat_map(|(key, value)| [key, value])
        .collect()
}

/// Percent-decoding. None: a `%` without two hexadecimal digits.
fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [byte, after @ ..] = rest {
        let (value, after) = match byte {
            b'%' => after
                .split_at_checked(2)
                .and_then(|(digits, after)| Some((hex(digits)?, after)))?,
            _ => (*byte, after),
        };
        bytes.push(value);
        rest = after;
    }
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

fn hex(digits: &[u8]) -> Option<u8> {
    let text = std::str::from_utf8(digits)
        .ok()
        .filter(|text| text.bytes().all(|byte| byte.is_ascii_hexdigit()))?;
    u8::from_str_radix(text, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logger(name: &str) -> LogProgram {
        match Stream::parse(name) {
            Ok(Stream::Logger(program)) => program,
            other => panic!("{name}: {other:?}"),
        }
    }

    #[test]
    fn paths_and_files() {
        assert_eq!(Stream::parse(""), Ok(Stream::Nowhere));
        assert_eq!(
            Stream::parse("/run/a b%20"),
            Ok(Stream::Path("/run/a b%20".into()))
        );
        assert_eq!(
            Stream::parse("/run/odd://name"),
            Ok(Stream::Path("/run/odd://name".into()))
        );
        assert_eq!(
            Stream::parse("file:///var/log/a%20b?x=y"),
            Ok(Stream::File("/var/log/a b".into()))
        );
        assert_eq!(Stream::parse("npipe:////./pipe/x"), Err(InvalidUri));
    }

    /// As Go's net/url reads them.
    #[test]
    fn uris_without_a_host_and_with_invalid_escapes() {
        assert_eq!(
            Stream::parse("file:/var/log/a"),
            Ok(Stream::File("/var/log/a".into()))
        );
        assert_eq!(
            logger("binary:/bin/log?tag=web").path,
            PathBuf::from("/bin/log")
        );
        assert_eq!(
            Stream::parse("/run/a:/b%zz"),
            Ok(Stream::Path("/run/a:/b%zz".into()))
        );
        for name in ["file:///tmp/%zz", "file:///tmp/100%", "binary:///bin/%2"] {
            assert_eq!(Stream::parse(name), Err(InvalidUri), "{name}");
        }
        assert_eq!(
            logger("binary:///bin/log?a=%zz&b=1;c&d=2").arguments,
            ["d", "2"]
        );
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
    fn percent_decoding() {
        assert_eq!(decoded("1%C3%A9").as_deref(), Some("1é"));
        assert_eq!(decoded("%+1"), None);
    }
}
