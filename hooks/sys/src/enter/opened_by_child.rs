//! Opens a file below `/proc/PID` in a child, which passes the descriptor back: unix(7).
//!
//! The process can hold a lock that the open needs: see [`crate::process_files`]. Then the child is
//! killed. The kill ends the child's wait for the lock.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, Instant};

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;

use super::descriptor_message::{receive_message, send_message, sockets};
use super::is_answered;
use crate::fork::ChildProcess;
use crate::process_files::ProcessFile;

/// Time limit of an open.
const OPEN_TIMEOUT: Duration = Duration::from_secs(1);

/// Time limit of an open whose child waits for a processor.
const BUSY_TIMEOUT: Duration = Duration::from_secs(10);

/// Opens a file of a process to read it.
///
/// # Errors
/// The kernel's, and `TimedOut` if the process holds a lock.
pub fn open_process_file(file: &ProcessFile) -> io::Result<OwnedFd> {
    let path = CString::new(file.path.as_os_str().as_bytes())?;
    let (ours, theirs) = sockets()?;
    let kept = [theirs.as_raw_fd()];
    let child = ChildProcess::start(&kept, || pass_opened(theirs.as_fd(), &path))?;
    drop(theirs);
    let until = Instant::now() + BUSY_TIMEOUT;
    let opened = if is_answered(ours.as_fd(), child.pid(), OPEN_TIMEOUT, until) {
        receive(ours.as_fd())
    } else {
        Err(io::ErrorKind::TimedOut.into())
    };
    child.kill();
    opened
}

/// Opens the file, and sends its descriptor or the error number.
fn pass_opened(socket: BorrowedFd<'_>, path: &CStr) {
    // A process can replace its descriptor with a fifo, whose open would wait for a writer.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let opened = openat(CWD, path, flags, Mode::empty());
    let number = opened
        .as_ref()
        .map_or_else(|errno| errno.raw_os_error(), |_| 0);
    let file = opened.as_ref().ok().map(AsFd::as_fd);
    // If the reader is gone, the answer is not needed.
    let _ = send_message(socket, &number.to_le_bytes(), file.as_slice());
}

fn receive(socket: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let mut number = [0; 4];
    let (size, mut descriptors) = receive_message(socket, &mut number)?;
    match (i32::from_le_bytes(number), descriptors.pop()) {
        (0, Some(opened)) => Ok(opened),
        // The child was killed, or there are too many open files.
        (0, None) if size == 0 => Err(io::ErrorKind::UnexpectedEof.into()),
        (0, None) => Err(Errno::MFILE.into()),
        (number, _) => Err(io::Error::from_raw_os_error(number)),
    }
}
