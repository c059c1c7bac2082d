//! Opens the streams that containerd names for a process, away from the event loop.
//!
//! A client may choose any of the names. A name may lead to a server that does not answer; a
//! `file://` may be a fifo without a reader. Such a call waits until the open returns, as with Go's
//! shim. The pod's other containers do not wait.

use std::io;
use std::path::Path;

use super::fifo::{self, Input, OutputTarget};
use super::stream::Stream;
use super::{IoError, Streams};
use crate::blocking::run_blocking;
use crate::step::failed;

/// The files behind the three names.
#[derive(Default)]
pub(super) struct OpenedStreams {
    pub(super) stdin: Option<Input>,
    pub(super) stdout: OutputTarget,
    /// Nowhere with a terminal, or if a logging program reads both.
    pub(super) stderr: OutputTarget,
}

impl OpenedStreams {
    /// Opens them.
    pub(super) async fn open(streams: &Streams) -> Result<Self, IoError> {
        if !streams.terminal
            && [&streams.stdin, &streams.stdout, &streams.stderr]
                .iter()
                .all(|name| name.is_empty())
        {
            return Ok(Self::default());
        }
        let streams = streams.clone();
        run_blocking(move || Self::open_all(&streams))
            .await
            .map_err(failed("open the process's streams in a thread"))?
    }

    fn open_all(streams: &Streams) -> Result<Self, IoError> {
        let stdin = open_stdin(&streams.stdin)?;
        let stdout = match open_output("stdout", &streams.stdout)? {
            // Without a reader the process would hang as soon as the terminal is full.
            OutputTarget::Nowhere if streams.terminal => {
                let missing = io::Error::from(io::ErrorKind::NotFound);
                return Err(failed(open("stdout", Path::new("")))(missing).into());
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

fn open_stdin(name: &str) -> Result<Option<Input>, IoError> {
    const STREAM: &str = "stdin";
    match parse(STREAM, name)? {
        Stream::Nowhere => Ok(None),
        Stream::Path(path) => {
            let input = fifo::open_input(&path).map_err(failed(open(STREAM, &path)))?;
            Ok(Some(input))
        }
        Stream::File(_) | Stream::Logger(_) => Err(unsupported(STREAM, name)),
    }
}

fn open_output(stream: &'static str, name: &str) -> Result<OutputTarget, IoError> {
    Ok(match parse(stream, name)? {
        Stream::Nowhere => OutputTarget::Nowhere,
        Stream::Path(path) => fifo::open_output(&path).map_err(failed(open(stream, &path)))?,
        Stream::File(path) => {
            let file = fifo::open_log_file(&path).map_err(failed(open(stream, &path)))?;
            OutputTarget::LogFile(path, file)
        }
        Stream::Logger(program) => OutputTarget::Logger(program),
    })
}

fn parse(stream: &'static str, name: &str) -> Result<Stream, IoError> {
    Stream::parse(name).map_err(|_| unsupported(stream, name))
}

fn unsupported(stream: &'static str, name: &str) -> IoError {
    IoError::Scheme {
        stream,
        uri: name.to_owned(),
    }
}

fn open(stream: &'static str, path: &Path) -> String {
    format!("open {stream} {:?}", path.display().to_string())
}
