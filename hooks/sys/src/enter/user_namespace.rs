//! A user namespace for an idmapped mount whose bind has ids of its own.
//!
//! A child moves into a new user namespace, and waits until the agent has written the ids and
//! opened the namespace. The namespace lives on by its descriptor.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use bindguard_core::spec::IdMaps;

use super::descriptor_message::receive_message;
use super::helper_process::{HelperProcess, Work};
use crate::poll::is_readable;

/// Limit of the wait for the child.
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// Creates a user namespace with the mapping `ids`.
///
/// # Errors
/// If the kernel refuses.
pub fn user_namespace_of(helper: &HelperProcess, ids: &IdMaps) -> io::Result<File> {
    let until = Instant::now() + START_TIMEOUT;
    // The child opens no file of a container.
    let child = helper.start_child(Work::UserNamespace, None, until)?;
    mapped(child.socket.as_fd(), child.pid, ids, until)
}

fn mapped(child: BorrowedFd<'_>, pid: i32, ids: &IdMaps, until: Instant) -> io::Result<File> {
    let mut number = [0; 4];
    if !is_readable(child, until.saturating_duration_since(Instant::now())) {
        return Err(io::ErrorKind::TimedOut.into());
    }
    if receive_message(child, &mut number)?.0 != number.len() {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    match i32::from_le_bytes(number) {
        0 => {}
        errno => return Err(io::Error::from_raw_os_error(errno)),
    }
    let process = format!("/proc/{pid}");
    fs::write(format!("{process}/uid_map"), ids.users.to_proc())?;
    fs::write(format!("{process}/gid_map"), ids.groups.to_proc())?;
    File::open(format!("{process}/ns/user"))
}
