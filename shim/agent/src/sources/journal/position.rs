//! The position in the journal, kept over restarts of the agent.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use bindguard_sys::write_new_file;

/// The journal's file, which a rotation renames, and the number of bytes read of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Position {
    pub(super) inode: u64,
    pub(super) offset: u64,
}

impl Position {
    /// `None` if the record is missing or malformed.
    pub(super) fn read(record: &Path) -> Option<Self> {
        let text = fs::read_to_string(record).ok()?;
        let (inode, offset) = text.trim().split_once(' ')?;
        Some(Self {
            inode: inode.parse().ok()?,
            offset: offset.parse().ok()?,
        })
    }

    /// The end of the journal at this moment; `None` without a journal.
    pub(super) fn end_of(journal: &Path) -> Option<Self> {
        let metadata = fs::metadata(journal).ok()?;
        Some(Self {
            inode: metadata.ino(),
            offset: metadata.len(),
        })
    }

    /// Replaces the record as a whole.
    pub(super) fn write(self, record: &Path) -> io::Result<()> {
        let new = record.with_extension("new");
        let text = format!("{} {}\n", self.inode, self.offset);
        write_new_file(&new, text.as_bytes(), 0o600)?;
        fs::rename(new, record)
    }
}
