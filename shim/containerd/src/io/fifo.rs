//! Opens the paths that containerd names as streams.
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

use super::pipes::nonblocking;
use super::stream::LogProgram;
use crate::blocking::spawn_thread;

/// The destination of an output.
#[derive(Default)]
pub(super) enum OutputTarget {
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
pub(crate) struct Input {
    /// For the copy.
    pub(crate) read: OwnedFd,
    /// Kept open until `CloseIO`.
    pub(crate) hold: Option<OwnedFd>,
}

/// Opens an output.
pub(crate) fn open_output(path: &Path) -> io::Result<OutputTarget> {
    if fs::metadata(path)?.file_type().is_fifo() {
        let fifo = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(nonblock())
            .open(path)?;
        return Ok(OutputTarget::Fifo(fifo.into()));
    }
    Ok(OutputTarget::File(
        OpenOptions::new().append(true).open(path)?.into(),
    ))
}

/// Opens the log file of a `file://` stream, and creates it if needed.
pub(crate) fn open_log_file(path: &Path) -> io::Result<OwnedFd> {
    if let Some(dir) = path.parent() {
        DirBuilder::new().recursive(true).mode(0o755).create(dir)?;
    }
    Ok(OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o644)
        .open(path)?
        .into())
}

/// Opens an input.
pub(crate) fn open_input(path: &Path) -> io::Result<Input> {
    if !fs::metadata(path)?.file_type().is_fifo() {
        return Ok(Input {
            read: copied_into_pipe(File::open(path)?)?,
            hold: None,
        });
    }
    // The reader first: a non-blocking open of the write end fails (ENXIO) as long as there is no
    // reader.
    let read = OpenOptions::new()
        .read(true)
        .custom_flags(nonblock())
        .open(path)?;
    let hold = OpenOptions::new()
        .write(true)
        .custom_flags(nonblock())
        .open(path)?;
    Ok(Input {
        read: read.into(),
        hold: Some(hold.into()),
    })
}

/// Starts to copy the file; returns the pipe's read end.
fn copied_into_pipe(mut file: File) -> io::Result<OwnedFd> {
    let (read, mut write) = io::pipe()?;
    let read = OwnedFd::from(read);
    nonblocking(&read)?;
    spawn_thread(move || {
        if let Err(error) = io::copy(&mut file, &mut write) {
            tracing::debug!(%error, "an input ended early");
        }
    })?;
    Ok(read)
}

fn nonblock() -> i32 {
    OFlags::NONBLOCK.bits().cast_signed()
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
        let OutputTarget::Fifo(fd) = open_output(&path).unwrap() else {
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
            open_output(file.path()).unwrap(),
            OutputTarget::File(_)
        ));
        assert!(open_output(Path::new("/nonexistent/x")).is_err());
    }
}
