//! Reading a small file that may lie anywhere, a server that does not answer included.
//!
//! Nearly always the kernel has the whole way in its cache, and the file is on a local filesystem: that is told in a few
//! microseconds, and it is read here. Otherwise a process apart reads it, which may hang in this one's place.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::path::Path;
use std::time::Duration;

use rustix::io::Errno;

use crate::apart::Apart;
use crate::handle::Handle;
use crate::mounts::Mounts;
use crate::probe::{End, Patience, listen};

/// How long a server may take.
const PATIENCE: Duration = Duration::from_millis(700);

/// Reads a file, or its first `most` bytes.
///
/// # Errors
/// The kernel's, and `TimedOut` when nobody answers.
pub fn read_file(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    if is_at_hand(path) { read_here(path, most) } else { read_apart(path, most) }
}

/// Nobody has to be waited for; or nobody can tell, before Linux 5.12.
fn is_at_hand(path: &Path) -> bool {
    let mounts = Mounts::default();
    let is_local = |handle: &Handle| !mounts.is_on_a_server(handle);
    match Handle::try_cached(path) {
        Ok(handle) => is_local(&handle),
        Err(error) if error.kind() == ErrorKind::WouldBlock => is_cold(path, is_local),
        Err(_) => true,
    }
}

/// It is but the cache that lacks it: in a local folder that the kernel knows there is the file itself, or nothing.
fn is_cold(path: &Path, is_local: impl Fn(&Handle) -> bool) -> bool {
    let in_known_folder = |next: &&Path| next.parent().and_then(Handle::cached).is_some_and(|folder| is_local(&folder));
    path.ancestors().find(in_known_folder).is_some_and(|next| match Handle::of(next) {
        Ok(file) => next == path && file.is_symlink().is_ok_and(|is_link| !is_link),
        Err(error) => error.is_not_found(),
    })
}

fn read_here(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn read_apart(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut apart = Apart::start(|pipe| {
        let (number, bytes) = match read_here(path, most) {
            Ok(bytes) => (0, bytes),
            Err(error) => (error.raw_os_error().unwrap_or_else(|| Errno::IO.raw_os_error()), Vec::new()),
        };
        // A reader that has gone has stopped caring.
        let _ = pipe.write_all(&[&number.to_ne_bytes(), bytes.as_slice()].concat());
    })?;
    let (heard, end) = listen(apart.said(), Patience { each: PATIENCE, all: PATIENCE })?;
    match heard.split_first_chunk().filter(|_| end == End::Closed) {
        Some((number, bytes)) if i32::from_ne_bytes(*number) == 0 => Ok(bytes.to_vec()),
        Some((number, _)) => Err(io::Error::from_raw_os_error(i32::from_ne_bytes(*number))),
        None => {
            let why = format!("it did not answer within {} ms", PATIENCE.as_millis());
            Err(io::Error::new(ErrorKind::TimedOut, why))
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn here_and_apart_the_same_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        fs::write(&file, "x".repeat(100_000)).unwrap();
        symlink(&file, &link).unwrap();
        for path in [&file, &link] {
            for read in [read_file, read_here, read_apart] {
                assert_eq!(read(path, 200_000).unwrap().len(), 100_000);
                assert_eq!(read(path, 10).unwrap().len(), 10);
            }
        }
        for path in [folder.path().join("missing"), folder.path().join("deep/er/missing")] {
            assert!(is_at_hand(&path), "a process would be made each time: {}", path.display());
            for read in [read_file, read_here, read_apart] {
                assert_eq!(read(&path, 10).unwrap_err().kind(), ErrorKind::NotFound);
            }
        }
    }
}
