//! Reading the mount table of the calling thread's mount namespace.

use std::fs;
use std::io;

use bindguard_core::mount_table::{MountTable, ParseError};

/// Why there is no mount table.
#[derive(Debug, thiserror::Error)]
pub enum MountinfoError {
    /// The file could not be read.
    #[error("read /proc/thread-self/mountinfo")]
    Read(#[source] io::Error),
    /// The content could not be parsed.
    #[error("parse /proc/thread-self/mountinfo")]
    Parse(#[from] ParseError),
}

/// Reads `/proc/thread-self/mountinfo`: the thread's own namespace, which may differ from the process's.
///
/// # Errors
/// If it cannot be read, or contains a line that is not a mount.
pub fn read_mount_table() -> Result<MountTable, MountinfoError> {
    let text = fs::read("/proc/thread-self/mountinfo").map_err(MountinfoError::Read)?;
    Ok(MountTable::from_mountinfo(&text)?)
}
