//! Reads a small file on any filesystem, even on a server that does not answer.
//!
//! Nearly always the file can be reached [without waiting](crate::open_without_waiting), and this
//! process reads it. Otherwise a separate process reads it, which may hang in this one's place.

use std::fs::OpenOptions;
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

use nix::libc;

use crate::cached_path::cannot_wait;
use crate::hanging_probes::answer_within;
use crate::mounts::Mounts;

/// Time limit for a server.
const READ_TIMEOUT: Duration = Duration::from_millis(700);

/// Reads a file, or its first `most` bytes.
///
/// # Errors
/// The kernel's errors, `TimedOut` if a server does not answer, and `InvalidInput` for a fifo: its
/// writer may never come.
pub fn read_file(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    if is_on_this_node(path) {
        read_here(path, most)
    } else {
        read_in_separate_process(path, most)
    }
}

/// `None` if there is no such file or folder.
///
/// # Errors
/// The other errors.
pub fn unless_absent<T>(read: io::Result<T>) -> io::Result<Option<T>> {
    match read {
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            Ok(None)
        }
        read => read.map(Some),
    }
}

/// True if the file can be read without waiting for a server. Before Linux 6.8 only the mount table
/// shows that, which costs more than a small file is worth: the answer is true then.
fn is_on_this_node(path: &Path) -> bool {
    let mounts = Mounts::default();
    cannot_wait(path, |handle| !mounts.is_on_a_server(handle))
}

fn read_here(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    if file.metadata()?.file_type().is_fifo() {
        return Err(io::Error::new(ErrorKind::InvalidInput, "it is a fifo"));
    }
    file.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn read_in_separate_process(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    answer_within(READ_TIMEOUT, path, || read_here(path, most))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn both_processes_read_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        fs::write(&file, "x".repeat(100_000)).unwrap();
        symlink(&file, &link).unwrap();
        for path in [&file, &link] {
            for read in [read_file, read_here, read_in_separate_process] {
                assert_eq!(read(path, 200_000).unwrap().len(), 100_000);
                assert_eq!(read(path, 10).unwrap().len(), 10);
            }
        }
        for path in [
            folder.path().join("missing"),
            folder.path().join("deep/er/missing"),
        ] {
            assert!(
                is_on_this_node(&path),
                "a process would be made each time: {}",
                path.display()
            );
            for read in [read_file, read_here, read_in_separate_process] {
                assert_eq!(read(&path, 10).unwrap_err().kind(), ErrorKind::NotFound);
            }
        }
    }

    #[test]
    fn a_fifo_does_not_block_the_reader() {
        let folder = tempfile::tempdir().unwrap();
        let fifo = folder.path().join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::from_bits_truncate(0o600)).unwrap();
        assert_eq!(
            read_file(&fifo, 10).unwrap_err().kind(),
            ErrorKind::InvalidInput
        );
        assert!(read_file(Path::new("/dev/null"), 10).unwrap().is_empty());
    }
}
