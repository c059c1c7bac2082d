//! Reading mount tables, as a stream within limits.

use std::fs::File;
use std::io::{self, Read};

use bindguard_core::mount_table::{Detail, MountTable, TableError, TableLimits, TableParser};

/// Why there is no mount table.
#[derive(Debug, thiserror::Error)]
pub enum MountinfoError {
    /// The file could not be read.
    #[error("read /proc/thread-self/mountinfo")]
    Read(#[source] io::Error),
    /// The content was not accepted.
    #[error("parse /proc/thread-self/mountinfo")]
    Parse(#[from] TableError),
}

/// Why a stream was no mount table.
#[derive(Debug, thiserror::Error)]
pub enum ReadTableError {
    /// It could not be read.
    #[error(transparent)]
    Read(#[from] io::Error),
    /// Its content was not accepted, for example because it is too large.
    #[error(transparent)]
    Table(#[from] TableError),
}

/// The kernel returns at most a page of mountinfo for each read(2). The size is for pipes.
const PIECE: usize = 16 << 10;

/// Reads `/proc/thread-self/mountinfo`: the thread's own namespace, which may differ from the
/// process's.
///
/// # Errors
/// If it cannot be read, or contains a line that is not a mount.
pub fn read_mount_table() -> Result<MountTable, MountinfoError> {
    let table = read_mount_table_in_part()?;
    table
        .complete()
        .map_err(|error| MountinfoError::Parse(error.into()))
}

/// As [`read_mount_table`], for readers that conclude nothing from a mount which is not listed. The
/// table names a line that is not a mount.
///
/// # Errors
/// If it cannot be read.
pub fn read_mount_table_in_part() -> Result<MountTable, MountinfoError> {
    let file = File::open("/proc/thread-self/mountinfo").map_err(MountinfoError::Read)?;
    read_host_table_in_part(file).map_err(|error| match error {
        ReadTableError::Read(source) => MountinfoError::Read(source),
        ReadTableError::Table(source) => MountinfoError::Parse(source),
    })
}

/// Reads the mount table of the host, to which no container adds a line. The table names a line
/// that is not a mount.
///
/// # Errors
/// If it cannot be read, exceeds [`TableLimits::HOST`], or ends in the middle of a line.
pub fn read_host_table_in_part(text: impl Read) -> Result<MountTable, ReadTableError> {
    read_table(text, TableLimits::HOST, Detail::All)
}

/// Reads the mount table of a container or of any other foreign process: a `/proc/PID/mountinfo`,
/// or a descriptor over which its text arrives. The sources of the mounts are left out.
///
/// # Errors
/// If it cannot be read, exceeds [`TableLimits::CONTAINER`], ends in the middle of a line, or
/// contains a line that is not a mount.
pub fn read_container_table(text: impl Read) -> Result<MountTable, ReadTableError> {
    let table = read_table(text, TableLimits::CONTAINER, Detail::WithoutSources)?;
    table
        .complete()
        .map_err(|error| TableError::from(error).into())
}

fn read_table(
    mut text: impl Read,
    limits: TableLimits,
    detail: Detail,
) -> Result<MountTable, ReadTableError> {
    let mut parser = TableParser::new(limits, detail);
    let mut piece = vec![0; PIECE];
    loop {
        match text.read(&mut piece) {
            Ok(0) => return Ok(parser.finish()?),
            Ok(length) => parser.push(&piece[..length])?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
}
