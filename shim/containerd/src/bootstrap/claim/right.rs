//! The right to change the links to a socket. At most one living process has the right.
//!
//! ```text
//!   s/.<hash of the socket's path>.0  ── symbolic link ──►  a socket on which the owner of the right listens
//! ```
//! symlink(2) succeeds for exactly one process. When the owner dies, the kernel closes the owner's
//! socket, and the next number can be taken. The owner removes all numbers, the lowest first. A
//! competitor may have seen the dead owners before this removal. Therefore each process checks the
//! dead owners again after making its own link. If a dead owner's link is gone, the right was
//! released in between, and the process gives up.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use super::{connect_to, hash};

/// The right, until it is dropped.
#[derive(Debug)]
pub(super) struct LinkRight {
    /// The entries of dead owners, then the entry of this process.
    entries: Vec<PathBuf>,
}

impl LinkRight {
    /// Takes the right for `owner`, a socket on which this process listens. `None` if a different
    /// process has the right.
    pub(super) fn take(socket: &Path, owner: &Path) -> io::Result<Option<Self>> {
        let mut dead_owners: Vec<(PathBuf, PathBuf)> = Vec::new();
        loop {
            let entry = entry(socket, dead_owners.len());
            match symlink(owner, &entry) {
                Ok(())
                    if dead_owners
                        .iter()
                        .all(|(entry, owner)| leads_to(entry, owner)) =>
                {
                    let entries = dead_owners
                        .into_iter()
                        .map(|(entry, _)| entry)
                        .chain([entry])
                        .collect();
                    return Ok(Some(Self { entries }));
                }
                Ok(()) => return fs::remove_file(entry).map(|()| None),
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                    match fs::read_link(&entry) {
                        Ok(other) if is_dead(&other) => dead_owners.push((entry, other)),
                        _ => return Ok(None),
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }
}

impl Drop for LinkRight {
    fn drop(&mut self) {
        for entry in &self.entries {
            let _ = fs::remove_file(entry);
        }
    }
}

/// Begins with a dot: no link of a group does.
fn entry(socket: &Path, number: usize) -> PathBuf {
    socket.with_file_name(format!(
        ".{}.{number}",
        hash(socket.as_os_str().as_encoded_bytes())
    ))
}

pub(super) fn leads_to(link: &Path, target: &Path) -> bool {
    fs::read_link(link).is_ok_and(|leads_to| leads_to == target)
}

fn is_dead(owner: &Path) -> bool {
    matches!(connect_to(owner), Err(Errno::CONNREFUSED | Errno::NOENT))
}
