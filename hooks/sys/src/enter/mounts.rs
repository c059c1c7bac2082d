//! The mount table of another namespace, read mount by mount: listmount(2) and statmount(2).
//!
//! The kernel prints a line of mountinfo into a buffer of its own, which it doubles until the line
//! fits. That buffer counts as memory of the reader. A container that nests folders makes a line of
//! 40 MB, which kills a reader with 64 MiB. statmount(2) stops at the size of the caller's buffer.
//!
//! Before Linux 6.11 the text is the only way to read the mounts of another namespace.

use std::fs::File;
use std::io::{self, Read};

use bindguard_core::mount_table::{
    Detail, ExceededLimit, MountEntry, MountTable, StatmountEntry, TableError, TableLimits,
    TableParser,
};
use rustix::io::Errno;

use super::owner::mount_namespace_id;
use crate::mountinfo::{ReadTableError, read_container_table};
use crate::statmount::{listmount_in, statmount_in};

/// The number of ids in a call.
const IDS: usize = 512;

/// The mounts of a namespace, without their sources. `text` opens its mountinfo, for kernels that
/// cannot list the mounts of another namespace.
///
/// # Errors
/// If they cannot be read, exceed [`TableLimits::CONTAINER`], or the text has a line that is no
/// mount.
pub fn mounts_in<R: Read>(
    namespace: &File,
    text: impl FnOnce() -> io::Result<R>,
) -> Result<MountTable, ReadTableError> {
    match listed(namespace) {
        Err(ReadTableError::Read(error)) if is_unknown(&error) => read_container_table(text()?),
        table => table,
    }
}

fn listed(namespace: &File) -> Result<MountTable, ReadTableError> {
    let namespace = mount_namespace_id(namespace)?;
    let mut parser = TableParser::new(TableLimits::CONTAINER, Detail::WithoutSources);
    let (mut ids, mut last) = ([0; IDS], 0);
    loop {
        let count = listmount_in(namespace, last, &mut ids).map_err(unknown_if_denied)?;
        for id in &ids[..count] {
            if let Some(StatmountEntry { entry, .. }) = mount_in(namespace, *id)? {
                parser.add_entry(entry)?;
            }
        }
        match ids[..count].last() {
            Some(id) if count == IDS => last = *id,
            _ => return Ok(parser.finish()?),
        }
    }
}

/// `None` if it was unmounted since it was listed, or is not below the root of the namespace.
fn mount_in(namespace: u64, id: u64) -> Result<Option<StatmountEntry>, ReadTableError> {
    let limit = TableLimits::CONTAINER.line;
    match statmount_in(namespace, id, limit) {
        Ok(mount) => Ok(Some(StatmountEntry {
            entry: MountEntry {
                unique_id: Some(id),
                ..mount.entry
            },
            ..mount
        })),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) if Errno::from_io_error(&error) == Some(Errno::OVERFLOW) => {
            Err(TableError::TooLarge(ExceededLimit::Line(limit)).into())
        }
        Err(error) => Err(error.into()),
    }
}

/// Without the right to list the mounts of a namespace the kernel pretends that it is gone. The
/// namespace is open here.
fn unknown_if_denied(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::NotFound => Errno::PERM.into(),
        _ => error,
    }
}

/// The errors of kernels, and of seccomp filters, that do not know a call or its argument.
fn is_unknown(error: &io::Error) -> bool {
    matches!(
        Errno::from_io_error(error),
        Some(Errno::NOSYS | Errno::NOTTY | Errno::INVAL | Errno::TOOBIG | Errno::PERM)
    )
}
