//! Reads a small file on any filesystem, even on a server that does not answer, and makes folders
//! and files.
//!
//! Nearly always the file can be reached [without waiting](crate::open_without_waiting), and this
//! process reads it. Otherwise a separate process reads it, which may hang in this one's place.
//!
//! Folders and files of bindguard get modes that do not depend on the caller's umask. A umask of 0
//! would let every user write what root made, and a umask of 077 would keep users from programs
//! that they run.

use std::fs::{self, DirBuilder, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::time::Duration;

use nix::libc;

use crate::handle::Handle;
use crate::mounts::Mounts;
use crate::probe::answer_within;

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

// Walks paths without waiting for a server or a daemon.
//
// Nearly always the kernel has the whole path in its cache and resolves it in a few microseconds:
// openat2(2), `RESOLVE_CACHED`. A name that the cache lacks may still be on a local filesystem.
// tmpfs, and so most of /run, caches no missing names, and a file that was not read since the node
// started is on a disk. So a walk goes to the end of the cached part, and one step further on a
// local filesystem. A second step could go through a link and lead anywhere.

/// Limit of walks to a path. A mount, an umount or a rename anywhere on the node ends a walk that
/// uses the cache alone (fs/namei.c, `LOOKUP_RCU`), as if the cache lacked a name.
const MAX_WALKS: usize = 4;

/// Opens the file that an absolute path leads to, a final symlink followed, if the walk needs no
/// answer from a server or a daemon. The file itself may be on a server.
///
/// # Errors
/// `WouldBlock` if the walk may have to wait; otherwise the kernel's error, which is certain.
pub fn open_without_waiting(path: &Path, is_local: impl Fn(&Handle) -> bool) -> io::Result<Handle> {
    let mut walked = walk(path, &is_local);
    for _ in 1..MAX_WALKS {
        match walked {
            Err(error) if error.kind() == ErrorKind::WouldBlock => walked = walk(path, &is_local),
            certain => return certain,
        }
    }
    walked
}

impl Mounts {
    /// Opens the file that an absolute path leads to, a final symlink followed, if neither a server
    /// nor a daemon must answer the walk.
    ///
    /// # Errors
    /// See [`open_without_waiting`].
    pub fn open_without_waiting(&self, path: &Path) -> io::Result<Handle> {
        open_without_waiting(path, |handle| self.is_local(handle))
    }
}

fn walk(path: &Path, is_local: impl Fn(&Handle) -> bool) -> io::Result<Handle> {
    match Handle::cached(path) {
        Err(error) if error.kind() == ErrorKind::WouldBlock => {
            one_step_more(path, is_local).unwrap_or(Err(error))
        }
        known => known,
    }
}

/// True if neither the walk to a path nor a call on its file can wait. Also true where the kernel
/// cannot detect that.
pub(crate) fn cannot_wait(path: &Path, is_local: impl Fn(&Handle) -> bool) -> bool {
    match open_without_waiting(path, &is_local) {
        Ok(handle) => is_local(&handle),
        Err(error) => error.kind() != ErrorKind::WouldBlock,
    }
}

/// Opens the first name that the cache lacks. `None` if that does not settle where the path leads.
///
/// A walk that uses the cache alone also ends at a symlink whose access time is due (`pick_link` of
/// fs/namei.c). Reading the symlink sets that time: the next walk goes on.
fn one_step_more(path: &Path, is_local: impl Fn(&Handle) -> bool) -> Option<io::Result<Handle>> {
    let in_known_folder = |next: &&Path| {
        next.parent()
            .and_then(|folder| Handle::cached(folder).ok())
            .is_some_and(|folder| is_local(&folder))
    };
    let next = path.ancestors().find(in_known_folder)?;
    match Handle::of(next) {
        Ok(found) if found.is_symlink().is_ok_and(|is_link| !is_link) => {
            (next == path).then_some(Ok(found))
        }
        Ok(link) => {
            let _ = rustix::fs::readlinkat(&link, c"", Vec::new());
            None
        }
        Err(error) => error
            .is_not_found()
            .then(|| Err(ErrorKind::NotFound.into())),
    }
}

/// Creates a folder and the missing folders above it, each with this mode. An existing folder keeps
/// its mode.
///
/// # Errors
/// The kernel's, and `NotADirectory` if a file is in the way.
pub fn make_folders(folder: &Path, mode: u32) -> io::Result<()> {
    match DirBuilder::new().mode(mode).create(folder) {
        Ok(()) => fs::set_permissions(folder, Permissions::from_mode(mode)),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            if fs::metadata(folder)?.is_dir() {
                Ok(())
            } else {
                Err(ErrorKind::NotADirectory.into())
            }
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {
            make_folders(folder.parent().ok_or(error)?, mode)?;
            make_folders(folder, mode)
        }
        Err(error) => Err(error),
    }
}

/// Creates a file with this content and this mode, instead of a file that a killed process left.
/// Follows no link.
///
/// # Errors
/// The kernel's.
pub fn write_new_file(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let mut create = OpenOptions::new();
    create.write(true).create_new(true).mode(0o600);
    let mut file = match create.open(path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            fs::remove_file(path)?;
            create.open(path)?
        }
        opened => opened?,
    };
    file.write_all(bytes)?;
    file.set_permissions(Permissions::from_mode(mode))
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

#[cfg(test)]
mod cached_path_tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_path_missing_from_the_cache_is_read_only_from_local_folders() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("file"), "").unwrap();
        // /proc caches no missing names.
        for missing in ["missing", "deep/er/missing"].map(|name| Path::new("/proc/self").join(name))
        {
            let kind = |is_local: bool| {
                open_without_waiting(&missing, |_| is_local)
                    .unwrap_err()
                    .kind()
            };
            assert_eq!(kind(true), ErrorKind::NotFound);
            assert!(cannot_wait(&missing, |_| true));
            if Handle::cached(&missing).unwrap_err().kind() == ErrorKind::WouldBlock {
                assert_eq!(kind(false), ErrorKind::WouldBlock);
                assert!(!cannot_wait(&missing, |_| false));
            }
        }
        let file = folder.path().join("file");
        assert!(
            open_without_waiting(&file, |_| false).is_ok(),
            "its name is known, wherever it lies"
        );
        assert!(cannot_wait(&file, |_| true) && !cannot_wait(&file, |_| false));
    }

    /// The walk that uses the cache alone does not set the access time of a new symlink.
    #[test]
    fn a_symlink_that_nothing_has_followed_is_followed() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("file"), "").unwrap();
        for number in 0..20 {
            let link = folder.path().join(number.to_string());
            symlink("file", &link).unwrap();
            let opened = open_without_waiting(&link, |_| true).unwrap();
            let resolved = opened.resolved_path().unwrap();
            assert!(resolved.ends_with("file"), "{}", resolved.display());
        }
    }
}

#[cfg(test)]
mod new_files_tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::os::unix::fs::symlink;

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn modes_are_exact_and_links_are_not_followed() {
        let place = tempfile::tempdir().unwrap();
        let (outer, inner) = (place.path().join("outer"), place.path().join("outer/inner"));
        // the usual umask takes these bits
        make_folders(&inner, 0o777).unwrap();
        assert_eq!((mode(&outer), mode(&inner)), (0o777, 0o777));
        make_folders(&inner, 0o700).unwrap();
        assert_eq!(mode(&inner), 0o777, "an existing folder keeps its mode");

        let (file, link) = (inner.join("file"), inner.join("link"));
        write_new_file(&file, b"one", 0o666).unwrap();
        assert_eq!(mode(&file), 0o666);
        symlink(&file, &link).unwrap();
        write_new_file(&link, b"two", 0o600).unwrap();
        assert!(link.symlink_metadata().unwrap().is_file());
        assert_eq!(fs::read(&file).unwrap(), b"one");
        let below_a_file = make_folders(&file.join("below"), 0o755).unwrap_err();
        assert_eq!(below_a_file.kind(), ErrorKind::NotADirectory);
    }
}
