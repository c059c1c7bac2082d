//! Opens the streams that containerd names for a process, away from the event loop.
//!
//! A client may choose any of the names. A name may lead to a server that does not answer; a
//! `file://` may be a fifo without a reader. Such a call waits until the open returns, as with Go's
//! shim. The pod's other containers do not wait.
//!
//! Fifos are opened so that no call blocks and no disconnect fails. An output is opened for reading
//! *and* writing: this succeeds before its reader comes, and a write after the reader has gone
//! fills the fifo instead of failing with EPIPE. The same is true of the write end of an input,
//! which the shim keeps open until `CloseIO`. Any other file (a regular file, /dev/null) is copied
//! by a thread as an input, and passed to the process itself as an output: the event loop watches
//! no such file.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use super::Streams;
use super::console::nonblocking;
use crate::blocking::{run_blocking, spawn_thread};
use crate::step::{StepError, failed};

/// The files behind the three names.
#[derive(Default)]
pub struct OpenedStreams {
    pub stdin: Option<Input>,
    pub stdout: OutputTarget,
    /// Nowhere with a terminal, or if a logging program reads both.
    pub stderr: OutputTarget,
}

/// The destination of an output.
#[derive(Default)]
pub enum OutputTarget {
    #[default]
    Nowhere,
    /// A fifo, open for both; the shim copies into it.
    Fifo(OwnedFd),
    /// An existing file that is no fifo; the process writes directly.
    File(OwnedFd),
    /// A log file that the shim writes.
    LogFile(PathBuf, OwnedFd),
    /// The log file of stdout, for stderr.
    SameLogFile,
    /// A program that is not started yet.
    Logger(LogProgram),
}

/// An input: the read end, and the write end that keeps a fifo from ending.
pub struct Input {
    /// For the copy.
    pub read: OwnedFd,
    /// Kept open until `CloseIO`.
    pub hold: Option<OwnedFd>,
}

impl OpenedStreams {
    pub async fn open(streams: &Streams) -> Result<Self, StepError> {
        let names = [&streams.stdin, &streams.stdout, &streams.stderr];
        if !streams.terminal && names.iter().all(|name| name.is_empty()) {
            return Ok(Self::default());
        }
        let streams = streams.clone();
        run_blocking(move || Self::open_all(&streams))
            .await
            .map_err(failed("open the process's streams in a thread"))?
    }

    fn open_all(streams: &Streams) -> Result<Self, StepError> {
        let stdin = open_stdin(&streams.stdin)?;
        let stdout = match open_output("stdout", &streams.stdout)? {
            // Without a reader the process would hang as soon as the terminal is full.
            OutputTarget::Nowhere if streams.terminal => {
                let missing = io::Error::from(io::ErrorKind::NotFound);
                return Err(failed(open("stdout", Path::new("")))(missing));
            }
            // The event loop watches no such file: a thread writes it.
            OutputTarget::File(file) if streams.terminal => {
                OutputTarget::LogFile(streams.stdout.clone().into(), file)
            }
            stdout => stdout,
        };
        let stderr = match &stdout {
            _ if streams.terminal => OutputTarget::Nowhere,
            // The program also reads stderr, whatever name stderr has.
            OutputTarget::Logger(_) => OutputTarget::Nowhere,
            OutputTarget::LogFile(..) if streams.stderr == streams.stdout => {
                OutputTarget::SameLogFile
            }
            _ => match open_output("stderr", &streams.stderr)? {
                OutputTarget::Logger(_) => return Err(unsupported("stderr", &streams.stderr)),
                target => target,
            },
        };
        Ok(Self {
            stdin,
            stdout,
            stderr,
        })
    }
}

fn open_stdin(name: &str) -> Result<Option<Input>, StepError> {
    match parse("stdin", name)? {
        Stream::Nowhere => Ok(None),
        Stream::Path(path) => {
            let input = open_input(&path).map_err(failed(open("stdin", &path)))?;
            Ok(Some(input))
        }
        Stream::File(_) | Stream::Logger(_) => Err(unsupported("stdin", name)),
    }
}

fn open_output(stream: &str, name: &str) -> Result<OutputTarget, StepError> {
    Ok(match parse(stream, name)? {
        Stream::Nowhere => OutputTarget::Nowhere,
        Stream::Path(path) => open_output_path(&path).map_err(failed(open(stream, &path)))?,
        Stream::File(path) => {
            let file = open_log_file(&path).map_err(failed(open(stream, &path)))?;
            OutputTarget::LogFile(path, file)
        }
        Stream::Logger(program) => OutputTarget::Logger(program),
    })
}

fn parse(stream: &str, name: &str) -> Result<Stream, StepError> {
    Stream::parse(name).ok_or_else(|| unsupported(stream, name))
}

fn unsupported(stream: &str, name: &str) -> StepError {
    format!("{stream} {name:?}: streams of this kind are not supported").into()
}

fn open(stream: &str, path: &Path) -> String {
    format!("open {stream} {:?}", path.display().to_string())
}

fn open_output_path(path: &Path) -> io::Result<OutputTarget> {
    if fs::metadata(path)?.file_type().is_fifo() {
        let fifo = fifo_options().read(true).write(true).open(path)?;
        return Ok(OutputTarget::Fifo(fifo.into()));
    }
    let file = OpenOptions::new().append(true).open(path)?;
    Ok(OutputTarget::File(file.into()))
}

/// Opens the log file of a `file://` stream, and creates it if needed.
fn open_log_file(path: &Path) -> io::Result<OwnedFd> {
    if let Some(dir) = path.parent() {
        DirBuilder::new().recursive(true).mode(0o755).create(dir)?;
    }
    let mut options = OpenOptions::new();
    let file = options.append(true).create(true).mode(0o644).open(path)?;
    Ok(file.into())
}

fn open_input(path: &Path) -> io::Result<Input> {
    if !fs::metadata(path)?.file_type().is_fifo() {
        let mut file = File::open(path)?;
        let (read, mut write) = io::pipe()?;
        let read = OwnedFd::from(read);
        nonblocking(&read)?;
        spawn_thread(move || {
            if let Err(error) = io::copy(&mut file, &mut write) {
                tracing::debug!(%error, "an input ended early");
            }
        })?;
        return Ok(Input { read, hold: None });
    }
    // The reader first: a non-blocking open of the write end fails (ENXIO) as long as there is no
    // reader.
    let read = fifo_options().read(true).open(path)?;
    let hold = fifo_options().write(true).open(path)?;
    Ok(Input {
        read: read.into(),
        hold: Some(hold.into()),
    })
}

fn fifo_options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.custom_flags(OFlags::NONBLOCK.bits().cast_signed());
    options
}

/// A stream as containerd names it: nothing, a path, or a URI.
///
/// ```text
///   /run/containerd/fifo/1/web-stdout     a path, nearly always of a fifo
///   file:///var/log/web.log               a file that the shim makes
///   binary:///usr/bin/logger?tag=web      a program that reads stdout and stderr; its arguments are `tag web`
///   binary-v2:///usr/bin/logger           the same, and it must report that it is ready
/// ```
/// The parser follows Go's net/url, because clients test against net/url: a host is ignored and may
/// be missing (`file:/x`), `%20` is a blank in a path, and `+` is a blank in a query. A path with
/// an invalid escape is refused, a query part with an invalid escape is skipped. The first value of
/// a repeated key is used.
#[derive(Debug, PartialEq, Eq)]
enum Stream {
    Nowhere,
    Path(PathBuf),
    /// A log file to create.
    File(PathBuf),
    Logger(LogProgram),
}

#[derive(Debug, PartialEq, Eq)]
pub struct LogProgram {
    pub path: PathBuf,
    /// Keys and values of the query, in order.
    pub arguments: Vec<String>,
    /// True if an end without output counts as a failure: otherwise it counts as ready.
    pub must_signal_ready: bool,
}

impl Stream {
    /// `None` for a URI with an unknown scheme, or with an invalid path.
    fn parse(name: &str) -> Option<Self> {
        if name.is_empty() {
            return Some(Self::Nowhere);
        }
        let (scheme, rest) = match name.split_once(":/") {
            Some((scheme, rest)) if !scheme.contains('/') => (scheme, rest),
            _ => return Some(Self::Path(name.into())),
        };
        let (rest, _fragment) = rest.split_once('#').unwrap_or((rest, ""));
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        let path = match place.strip_prefix('/') {
            Some(after_slashes) => match after_slashes.find('/') {
                Some(slash) => after_slashes[slash..].to_owned(),
                None => String::new(),
            },
            None => format!("/{place}"),
        };
        let path = PathBuf::from(decoded(&path)?);
        match scheme {
            "fifo" => Some(Self::Path(path)),
            "file" => Some(Self::File(path)),
            "binary" | "binary-v2" => Some(Self::Logger(LogProgram {
                path,
                arguments: arguments(query),
                must_signal_ready: scheme == "binary-v2",
            })),
            _ => None,
        }
    }
}

fn arguments(query: &str) -> Vec<String> {
    let mut arguments: Vec<String> = Vec::new();
    for word in query.split('&') {
        if word.is_empty() || word.contains(';') {
            continue;
        }
        let (key, value) = word.split_once('=').unwrap_or((word, ""));
        if let Some(key) = decoded(&key.replace('+', " "))
            && let Some(value) = decoded(&value.replace('+', " "))
            && arguments.chunks(2).all(|known| known[0] != key)
        {
            arguments.extend([key, value]);
        }
    }
    arguments
}

/// Percent-decoding. None: a `%` without two hexadecimal digits.
fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [byte, after @ ..] = rest {
        rest = after;
        if *byte != b'%' {
            bytes.push(*byte);
            continue;
        }
        let (digits, after) = after.split_at_checked(2)?;
        let digit = |digit: u8| char::from(digit).to_digit(16);
        bytes.push((digit(digits[0])? * 16 + digit(digits[1])?) as u8);
        rest = after;
    }
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    fn fifo() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("fifo");
        mknodat(CWD, &path, FileType::Fifo, Mode::from(0o600), 0).unwrap();
        (dir, path)
    }

    #[test]
    fn an_output_opens_before_its_reader_and_survives_it() {
        let (_dir, path) = fifo();
        let OutputTarget::Fifo(fd) = open_output_path(&path).unwrap() else {
            panic!("no fifo")
        };
        let mut writer = File::from(fd);
        writer.write_all(b"one").unwrap();
        let mut reader = File::open(&path).unwrap();
        let mut got = [0; 3];
        reader.read_exact(&mut got).unwrap();
        drop(reader);
        writer.write_all(b"two").unwrap();
    }

    #[test]
    fn an_input_ends_when_its_hold_is_dropped() {
        let (_dir, path) = fifo();
        let input = open_input(&path).unwrap();
        drop(OpenOptions::new().write(true).open(&path).unwrap());
        let mut read = File::from(input.read);
        let mut buffer = [0; 8];
        assert_eq!(
            read.read(&mut buffer).unwrap_err().kind(),
            io::ErrorKind::WouldBlock
        );
        drop(input.hold);
        assert_eq!(read.read(&mut buffer).unwrap(), 0);
    }

    #[test]
    fn an_input_that_is_no_fifo_is_read_to_its_end() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), [7; 200_000]).unwrap();
        for (path, length) in [(file.path(), 200_000), (Path::new("/dev/null"), 0)] {
            let input = open_input(path).unwrap();
            let flags = rustix::fs::fcntl_getfl(&input.read).unwrap();
            assert!(flags.contains(OFlags::NONBLOCK));
            rustix::fs::fcntl_setfl(&input.read, flags - OFlags::NONBLOCK).unwrap();
            let mut bytes = Vec::new();
            File::from(input.read).read_to_end(&mut bytes).unwrap();
            assert_eq!(bytes, vec![7; length]);
        }
    }

    #[test]
    fn a_regular_file_is_appended_to_by_the_process_itself() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(matches!(
            open_output_path(file.path()).unwrap(),
            OutputTarget::File(_)
        ));
        assert!(open_output_path(Path::new("/nonexistent/x")).is_err());
    }

    fn logger(name: &str) -> LogProgram {
        match Stream::parse(name) {
            Some(Stream::Logger(program)) => program,
            other => panic!("{name}: {other:?}"),
        }
    }

    #[test]
    fn paths_and_files() {
        assert_eq!(Stream::parse(""), Some(Stream::Nowhere));
        assert_eq!(
            Stream::parse("/run/a b%20"),
            Some(Stream::Path("/run/a b%20".into()))
        );
        assert_eq!(
            Stream::parse("/run/odd://name"),
            Some(Stream::Path("/run/odd://name".into()))
        );
        assert_eq!(
            Stream::parse("file:///var/log/a%20b?x=y"),
            Some(Stream::File("/var/log/a b".into()))
        );
        assert_eq!(Stream::parse("npipe:////./pipe/x"), None);
    }

    /// As Go's net/url reads them.
    #[test]
    fn uris_without_a_host_and_with_invalid_escapes() {
        assert_eq!(
            Stream::parse("file:/var/log/a"),
            Some(Stream::File("/var/log/a".into()))
        );
        assert_eq!(
            logger("binary:/bin/log?tag=web").path,
            PathBuf::from("/bin/log")
        );
        assert_eq!(
            Stream::parse("/run/a:/b%zz"),
            Some(Stream::Path("/run/a:/b%zz".into()))
        );
        for name in ["file:///tmp/%zz", "file:///tmp/100%", "binary:///bin/%2"] {
            assert_eq!(Stream::parse(name), None, "{name}");
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
