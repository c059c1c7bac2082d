//! Parses a mount table that arrives in pieces: memory never contains the whole text.

use std::ffi::OsString;
use std::mem;

use super::entry::MountEntry;
use super::limits::{ExceededLimit, TableError, TableLimits};
use super::parse::ParseError;
use super::table::MountTable;

/// The parts of each mount that a reader needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Detail {
    /// All fields.
    All,
    /// All fields but the source and the super options. No reader of a container's table uses these
    /// two, and an overlay's options have up to 4 KiB.
    WithoutSources,
}

/// A mount table that is still arriving.
#[derive(Debug)]
pub struct TableParser {
    limits: TableLimits,
    detail: Detail,
    text: usize,
    lines: usize,
    memory: usize,
    /// The start of a line whose end has not arrived.
    partial: Vec<u8>,
    table: MountTable,
}

impl TableParser {
    /// Starts with an empty table.
    pub fn new(limits: TableLimits, detail: Detail) -> Self {
        Self {
            limits,
            detail,
            text: 0,
            lines: 0,
            memory: 0,
            partial: Vec::new(),
            table: MountTable::default(),
        }
    }

    /// Adds the next piece of the text, which may begin and end anywhere in a line.
    ///
    /// # Errors
    /// If the text exceeds a limit.
    pub fn push(&mut self, piece: &[u8]) -> Result<(), TableError> {
        self.text += piece.len();
        if self.text > self.limits.text {
            return Err(TableError::TooLarge(ExceededLimit::Text(self.limits.text)));
        }
        let mut lines = piece.split(|byte| *byte == b'\n');
        // Text after the last newline is the start of the next line.
        let start = lines.next_back().unwrap_or_default();
        for end in lines {
            if self.partial.is_empty() {
                self.add(end)?;
            } else {
                self.extend_partial(end)?;
                let line = mem::take(&mut self.partial);
                self.add(&line)?;
            }
        }
        self.extend_partial(start)
    }

    /// The table, after the whole text has arrived. [`MountTable::skipped`] names a line that is not
    /// a mount.
    ///
    /// # Errors
    /// If the last line has no end.
    pub fn finish(self) -> Result<MountTable, TableError> {
        match self.partial.is_empty() {
            true => Ok(self.table),
            false => Err(TableError::CutOff),
        }
    }

    fn extend_partial(&mut self, part: &[u8]) -> Result<(), TableError> {
        self.refuse_long_line(self.partial.len() + part.len())?;
        self.partial.extend_from_slice(part);
        Ok(())
    }

    fn refuse_long_line(&self, length: usize) -> Result<(), TableError> {
        match length > self.limits.line {
            true => Err(TableError::TooLarge(ExceededLimit::Line(self.limits.line))),
            false => Ok(()),
        }
    }

    fn add(&mut self, line: &[u8]) -> Result<(), TableError> {
        self.refuse_long_line(line.len())?;
        match MountEntry::from_line(line) {
            Ok(entry) => self.add_entry(entry),
            Err(wrong) => {
                self.count_line()?;
                self.table.skip(ParseError::new(self.lines, line, wrong));
                Ok(())
            }
        }
    }

    fn count_line(&mut self) -> Result<(), TableError> {
        self.lines += 1;
        match self.lines > self.limits.mounts {
            true => Err(TableError::TooLarge(ExceededLimit::Mounts(
                self.limits.mounts,
            ))),
            false => Ok(()),
        }
    }

    /// Adds a mount that was not read from the text.
    ///
    /// # Errors
    /// If the table now exceeds a limit.
    pub fn add_entry(&mut self, mut entry: MountEntry) -> Result<(), TableError> {
        self.count_line()?;
        if self.detail == Detail::WithoutSources {
            (entry.source, entry.super_options) = (OsString::new(), OsString::new());
        }
        self.memory += entry.memory();
        if self.memory > self.limits.memory {
            return Err(TableError::TooLarge(ExceededLimit::Memory(
                self.limits.memory,
            )));
        }
        self.table.push(entry);
        Ok(())
    }
}

impl MountTable {
    /// The bytes that the parsed mounts occupy, without the allocator's overhead.
    pub fn memory(&self) -> usize {
        self.entries().iter().map(MountEntry::memory).sum()
    }
}

impl MountEntry {
    /// See [`MountTable::memory`].
    fn memory(&self) -> usize {
        let texts = [
            self.root.path.as_os_str().len(),
            self.mount_point.as_os_str().len(),
            self.options.len(),
            self.fs_type.0.len(),
            self.source.len(),
            self.super_options.len(),
        ];
        let unknown: usize = self
            .propagation
            .unknown
            .iter()
            .map(|field| size_of::<String>() + field.len())
            .sum();
        size_of::<Self>() + texts.iter().sum::<usize>() + unknown
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::*;

    const TABLE: &str = "\
21 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw
30 21 0:9 /a\\040b /mnt/c\\134d rw,relatime - overlay overlay rw,lowerdir=/l
";

    fn parsed(
        text: &str,
        size: usize,
        limits: TableLimits,
        detail: Detail,
    ) -> Result<MountTable, TableError> {
        let mut parser = TableParser::new(limits, detail);
        text.as_bytes()
            .chunks(size)
            .try_for_each(|piece| parser.push(piece))?;
        parser.finish()
    }

    #[test]
    fn pieces_of_any_size_are_the_same_table() {
        let whole = MountTable::from_mountinfo(TABLE.as_bytes());
        for size in 1..=TABLE.len() {
            assert_eq!(
                parsed(TABLE, size, TableLimits::HOST, Detail::All).ok(),
                whole.clone().ok(),
                "{size}"
            );
        }
        assert_eq!(
            parsed("", 1, TableLimits::HOST, Detail::All),
            Ok(MountTable::default())
        );
    }

    #[test]
    fn a_text_that_is_no_whole_table_is_an_error() {
        for end in (1..TABLE.len()).filter(|end| !TABLE[..*end].ends_with('\n')) {
            assert_eq!(
                parsed(&TABLE[..end], 7, TableLimits::HOST, Detail::All),
                Err(TableError::CutOff),
                "{end}"
            );
        }
    }

    #[test]
    fn a_line_that_is_no_mount_is_skipped_and_named() {
        let text = format!("{TABLE}no mount\n{TABLE}\n");
        for size in [1, 7, text.len()] {
            let table = parsed(&text, size, TableLimits::HOST, Detail::All).unwrap();
            let skipped = table.skipped().unwrap();
            assert_eq!(
                (table.entries().len(), skipped.line, skipped.more),
                (4, 3, 1)
            );
            assert!(table.complete().is_err());
        }
    }

    #[test]
    fn each_limit_is_one() {
        let (text, longest) = (TABLE.len(), TABLE.lines().map(str::len).max().unwrap());
        let fits = TableLimits {
            text,
            mounts: 2,
            line: longest,
            memory: 4096,
        };
        for size in [1, 7, text] {
            assert!(parsed(TABLE, size, fits, Detail::All).is_ok(), "{size}");
            for (limits, exceeded) in [
                (
                    TableLimits {
                        text: text - 1,
                        ..fits
                    },
                    ExceededLimit::Text(text - 1),
                ),
                (TableLimits { mounts: 1, ..fits }, ExceededLimit::Mounts(1)),
                (
                    TableLimits {
                        line: longest - 1,
                        ..fits
                    },
                    ExceededLimit::Line(longest - 1),
                ),
                (
                    TableLimits {
                        memory: 300,
                        ..fits
                    },
                    ExceededLimit::Memory(300),
                ),
            ] {
                assert_eq!(
                    parsed(TABLE, size, limits, Detail::All),
                    Err(TableError::TooLarge(exceeded)),
                    "{size}"
                );
            }
        }
    }

    #[test]
    fn the_sources_can_be_left_out() {
        let table = parsed(TABLE, 7, TableLimits::CONTAINER, Detail::WithoutSources).unwrap();
        let whole = MountTable::from_mountinfo(TABLE.as_bytes()).unwrap();
        for (entry, whole) in table.entries().iter().zip(whole.entries()) {
            assert_eq!((entry.source.len(), entry.super_options.len()), (0, 0));
            assert_eq!(
                (entry.id, &entry.root, &entry.propagation),
                (whole.id, &whole.root, &whole.propagation)
            );
        }
    }

    #[test]
    fn the_memory_of_a_table_is_that_of_its_entries_and_texts() {
        let line = b"1 0 0:9 / /a rw odd:1 - tmpfs none rw";
        let table = MountTable::from_mountinfo(&[line, &b"\n"[..]].concat()).unwrap();
        let texts = ["/", "/a", "rw", "tmpfs", "none", "rw", "odd:1"].concat();
        let expected = size_of::<MountEntry>() + size_of::<String>() + texts.len();
        assert_eq!(table.memory(), expected);
    }
}
