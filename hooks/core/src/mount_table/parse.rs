//! Parsers of mounts: of lines of mountinfo, and of the structure that statmount(2) returns. A line
//! that cannot be parsed is skipped and named in the table.
//!
//! ```text
//! 36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue
//! id parent dev root mount_point options [optional fields] - type source super_options
//! ```

use std::borrow::Cow;
use std::ffi::{OsStr, OsString};
use std::mem;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::mount_table::{
    Device, FsType, MountAttributes, MountEntry, MountId, MountRoot, MountTable, Propagation,
};

/// A line of mountinfo that is not a mount, which makes the table incomplete.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("read line {line} of mountinfo, `{text}`: {wrong}{}", and_more(*.more))]
pub struct ParseError {
    /// Counted from 1.
    pub line: usize,
    /// The start of the line.
    pub text: String,
    /// The error in the line.
    pub wrong: WrongField,
    /// The number of later lines with an error.
    pub more: usize,
}

fn and_more(more: usize) -> String {
    match more {
        0 => String::new(),
        more => format!(" (and {more} more)"),
    }
}

/// The error in a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WrongField {
    /// The line ends before this field.
    #[error("no {0}")]
    Missing(&'static str),
    /// This field must be a number, but is not.
    #[error("{0} is not a number")]
    NotANumber(&'static str),
}

impl MountTable {
    /// Reads the text of a `mountinfo` file. [`MountTable::skipped`] names a line that is not a
    /// mount.
    pub fn from_mountinfo_in_part(text: &[u8]) -> Self {
        let mut table = Self::default();
        let lines = text.strip_suffix(b"\n").unwrap_or(text);
        if !lines.is_empty() {
            for (index, line) in lines.split(|byte| *byte == b'\n').enumerate() {
                match MountEntry::from_line(line) {
                    Ok(entry) => table.entries.push(entry),
                    Err(wrong) => table.skip(index + 1, line, wrong),
                }
            }
        }
        table
    }

    /// Reads the text of a `mountinfo` file whose every line must be a mount.
    ///
    /// # Errors
    /// If a line is not a mount.
    pub fn from_mountinfo(text: &[u8]) -> Result<Self, ParseError> {
        Self::from_mountinfo_in_part(text).complete()
    }

    fn skip(&mut self, line: usize, text: &[u8], wrong: WrongField) {
        /// A filesystem's options can have a page of text.
        const MAX_TEXT: usize = 200;
        match &mut self.skipped {
            Some(first) => first.more += 1,
            None => {
                self.skipped = Some(ParseError {
                    line,
                    text: as_text(&text[..text.len().min(MAX_TEXT)]),
                    wrong,
                    more: 0,
                });
            }
        }
    }
}

impl MountEntry {
    /// Reads a line of mountinfo without the newline.
    ///
    /// # Errors
    /// If a field is missing or does not match proc_pid_mountinfo(5).
    pub fn from_line(line: &[u8]) -> Result<Self, WrongField> {
        let mut fields = Fields(Some(line));
        let id = MountId(number("mount id", fields.next("mount id")?)?);
        let parent = MountId(number("parent id", fields.next("parent id")?)?);
        let device = fields.next("major:minor")?;
        let colon = device.iter().position(|byte| *byte == b':');
        let colon = colon.ok_or(WrongField::NotANumber("major:minor"))?;
        let device = Device {
            major: number("major", &device[..colon])?,
            minor: number("minor", &device[colon + 1..])?,
        };
        let root = MountRoot::from_kernel(&unescape(fields.next("root")?));
        let mount_point = PathBuf::from(os_string(&unescape(fields.next("mount point")?)));
        // The escapes in options depend on the filesystem.
        let options = os_string(fields.next("mount options")?);
        let propagation = fields.propagation()?;
        let fs_type = FsType(as_text(&unescape(fields.next("filesystem type")?)));
        let source = os_string(&unescape(fields.next("source")?));
        // 9p and old versions of cifs print spaces in their options unescaped.
        let super_options = fields.0.ok_or(WrongField::Missing("super options"))?;
        let mut entry = Self {
            id,
            unique_id: None,
            parent,
            device,
            root,
            mount_point,
            attributes: MountAttributes::from_options(&options),
            options,
            propagation,
            fs_type,
            source,
            super_options: os_string(super_options),
        };
        if entry.root.path == Path::new("/")
            && let Some(path) = entry.root_in_source()
        {
            entry.root.path = path.to_owned();
        }
        Ok(entry)
    }
}

/// The part of a line after the fields that were read. `None` after the last field.
struct Fields<'a>(Option<&'a [u8]>);

impl<'a> Fields<'a> {
    fn next(&mut self, name: &'static str) -> Result<&'a [u8], WrongField> {
        let rest = self.0.ok_or(WrongField::Missing(name))?;
        let space = rest.iter().position(|byte| *byte == b' ');
        self.0 = space.map(|space| &rest[space + 1..]);
        Ok(&rest[..space.unwrap_or(rest.len())])
    }

    fn propagation(&mut self) -> Result<Propagation, WrongField> {
        let mut propagation = Propagation::default();
        loop {
            let field = self.next("separator")?;
            let colon = field.iter().position(|byte| *byte == b':');
            let (tag, value) = match colon {
                Some(colon) => (&field[..colon], Some(&field[colon + 1..])),
                None => (field, None),
            };
            match (tag, value) {
                (b"-", None) => return Ok(propagation),
                (b"shared", Some(n)) => propagation.peer_group = Some(number("shared", n)?),
                (b"master", Some(n)) => propagation.master = Some(number("master", n)?),
                (b"propagate_from", Some(n)) => {
                    propagation.propagate_from = Some(number("propagate_from", n)?);
                }
                (b"unbindable", None) => propagation.unbindable = true,
                // The man page requires it: "parsers should ignore all unrecognized optional
                // fields".
                _ => propagation.unknown.push(as_text(field)),
            }
        }
    }
}

fn number(name: &'static str, field: &[u8]) -> Result<u32, WrongField> {
    let digits = str::from_utf8(field).ok();
    // `u32::from_str` accepts a leading plus, which the kernel never writes.
    let digits = digits.filter(|digits| !digits.starts_with('+'));
    let number = digits.and_then(|digits| digits.parse().ok());
    number.ok_or(WrongField::NotANumber(name))
}

/// A field that any user may choose, such as the subtype of a FUSE mount: bytes that are no UTF-8 are
/// no reason to refuse the table.
pub(super) fn as_text(field: &[u8]) -> String {
    String::from_utf8_lossy(field).into_owned()
}

fn os_string(bytes: &[u8]) -> OsString {
    OsStr::from_bytes(bytes).to_owned()
}

// Parses a mount table that arrives in pieces: memory never contains the whole text.

/// A mount table that is still arriving.
#[derive(Debug)]
pub struct TableParser {
    limits: TableLimits,
    text: usize,
    lines: usize,
    memory: usize,
    /// The start of a line whose end has not arrived.
    partial: Vec<u8>,
    table: MountTable,
}

impl TableParser {
    /// Starts with an empty table.
    pub fn new(limits: TableLimits) -> Self {
        Self {
            limits,
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
            return Err(ExceededLimit::Text(self.limits.text).into());
        }
        for part in piece.split_inclusive(|byte| *byte == b'\n') {
            let end = part.strip_suffix(b"\n");
            let length = self.partial.len() + end.unwrap_or(part).len();
            if length > self.limits.line {
                return Err(ExceededLimit::Line(self.limits.line).into());
            }
            match end {
                Some(line) if self.partial.is_empty() => self.add(line)?,
                Some(end) => {
                    let mut line = mem::take(&mut self.partial);
                    line.extend_from_slice(end);
                    self.add(&line)?;
                }
                None => self.partial.extend_from_slice(part),
            }
        }
        Ok(())
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

    fn add(&mut self, line: &[u8]) -> Result<(), TableError> {
        match MountEntry::from_line(line) {
            Ok(entry) => self.add_entry(entry),
            Err(wrong) => {
                self.count_line()?;
                self.table.skip(self.lines, line, wrong);
                Ok(())
            }
        }
    }

    fn count_line(&mut self) -> Result<(), ExceededLimit> {
        self.lines += 1;
        match self.lines > self.limits.mounts {
            true => Err(ExceededLimit::Mounts(self.limits.mounts)),
            false => Ok(()),
        }
    }

    /// Adds a mount that was not read from the text.
    ///
    /// # Errors
    /// If the table now exceeds a limit.
    pub fn add_entry(&mut self, mut entry: MountEntry) -> Result<(), TableError> {
        self.count_line()?;
        if !self.limits.keeps_sources {
            entry.source = OsString::new();
            entry.super_options = OsString::new();
        }
        self.memory += entry.memory();
        if self.memory > self.limits.memory {
            return Err(ExceededLimit::Memory(self.limits.memory).into());
        }
        self.table.entries.push(entry);
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
        let mut bytes = size_of::<Self>()
            + self.root.path.as_os_str().len()
            + self.mount_point.as_os_str().len()
            + self.options.len()
            + self.fs_type.0.len()
            + self.source.len()
            + self.super_options.len();
        for field in &self.propagation.unknown {
            bytes += size_of::<String>() + field.len();
        }
        bytes
    }
}

// Limits for reading a mount table, and the reasons for refusing a table.
//
// A container decides how long its own mount table is: 3,000 binds below a long name are 86 MB of
// text. A table beyond a limit is an error, never a shorter or empty table.

/// The limits for a mount table. A reader stops at the first exceeded limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableLimits {
    /// Bytes of text: the reader's time.
    pub text: usize,
    /// Mounts.
    pub mounts: usize,
    /// Bytes of a line.
    pub line: usize,
    /// Bytes that the parsed mounts may occupy: the reader's memory.
    pub memory: usize,
    /// False to leave out the source and the super options of each mount.
    pub keeps_sources: bool,
}

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

impl TableLimits {
    /// For the reader's own namespace. No container can add a line to this table, users of the node
    /// can add few, and a create must not fail on a large node.
    ///
    /// The kernel's own limit is `fs.mount-max`, by default 100,000 mounts. 30,000 mounts of a
    /// kubelet are 12 MB of text.
    pub const HOST: Self = Self {
        text: 512 * MIB,
        mounts: 1_000_000,
        line: MIB,
        memory: usize::MAX,
        keeps_sources: true,
    };

    /// For the table of any other process, which a container may have filled.
    ///
    /// A container that binds the host's root has the host's mounts: 28,000 mounts are 11 MB of
    /// text and 12 MiB in memory. The kernel prints 32 MiB in 45 ms, so a hostile table delays its
    /// neighbours by less than 0.1 s. A line has a page of options and two paths of at most 4 KiB,
    /// which escapes make four times longer. The agent is limited to 64 MiB and has at most three
    /// such tables at once: two refreshes and the survey.
    pub const CONTAINER: Self = Self {
        text: 32 * MIB,
        mounts: 65_536,
        line: 64 * KIB,
        memory: 12 * MIB,
        // No reader of a container's table uses these two, and an overlay's options have up to 4 KiB.
        keeps_sources: false,
    };
}

/// Why a mount table was not accepted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// A line is not a mount.
    #[error(transparent)]
    Parse(#[from] ParseError),
    /// The text ends in the middle of a line.
    #[error("its last line is cut off")]
    CutOff,
    /// The table exceeds a limit, and none of its mounts is known.
    #[error("the mount table is too large: {0}")]
    TooLarge(#[from] ExceededLimit),
}

/// The limit that a mount table exceeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ExceededLimit {
    /// [`TableLimits::text`]
    #[error("more than {} KiB of text", .0 / KIB)]
    Text(usize),
    /// [`TableLimits::mounts`]
    #[error("more than {0} mounts")]
    Mounts(usize),
    /// [`TableLimits::line`]
    #[error("a line of more than {} KiB", .0 / KIB)]
    Line(usize),
    /// [`TableLimits::memory`]
    #[error("its mounts need more than {} KiB of memory", .0 / KIB)]
    Memory(usize),
}

// The octal escapes of mountinfo: space, tab, newline and backslash, and `#` in sources.
//
// Mirrors the kernel's `mangle_path`, which `seq_path` and `mangle` call with these characters.

/// Undoes the kernel's escapes. A backslash without three octal digits is kept: the kernel writes
/// no such backslash, and refusing the table for it has no benefit.
fn unescape(field: &[u8]) -> Cow<'_, [u8]> {
    if !field.contains(&b'\\') {
        return Cow::Borrowed(field);
    }
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, behind @ ..] = rest {
        rest = behind;
        let mut byte = *first;
        if let (b'\\', [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', more @ ..]) =
            (byte, behind)
        {
            byte = (a - b'0') << 6 | (b - b'0') << 3 | (c - b'0');
            rest = more;
        }
        out.push(byte);
    }
    Cow::Owned(out)
}

/// Escapes as the kernel does.
pub(super) fn escape(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len());
    for &byte in bytes {
        match byte {
            b' ' | b'\t' | b'\n' | b'\\' | b'#' => out.extend(format!("\\{byte:03o}").bytes()),
            plain => out.push(plain),
        }
    }
    out
}

// A mount in the form that statmount(2) returns: `struct statmount` of the kernel's
// `include/uapi/linux/mount.h`.
//
// The structure contains the fields of a mountinfo line with raw strings, without escapes. A field
// that the caller did not request, or that the kernel did not fill in, is missing from the mask
// and is not read.

/// The fields that every mount must have: `STATMOUNT_SB_BASIC`, `_MNT_BASIC`, `_MNT_ROOT` and
/// `_FS_TYPE`.
const NEEDED: u64 = 0x01 | 0x02 | 0x08 | 0x20;
/// `STATMOUNT_MNT_POINT`: a path of usual length is a third of the kernel's work.
const POINT: u64 = 0x10;
/// `STATMOUNT_FS_SUBTYPE`, Linux 6.13 and newer: the kind of FUSE filesystem, such as `sshfs`.
const SUBTYPE: u64 = 0x100;

/// A mount from statmount(2), with its parent's unique id, which the kernel never reuses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatmountEntry {
    /// The mount; options and source are left empty.
    pub entry: MountEntry,
    /// `mnt_parent_id`.
    pub unique_parent: u64,
}

/// The reason for which a buffer is not a mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum StatmountError {
    /// The buffer ends before its fixed part does.
    #[error("statmount filled in too little")]
    TooShort,
    /// A requested field is missing.
    #[error("statmount returned only {0:#x} of the requested fields")]
    Missing(u64),
    /// A string is outside the buffer, or has no end.
    #[error("statmount's {0} is no string")]
    BadString(&'static str),
}

// Offsets within `struct statmount`.
const MASK_AT: usize = 8;
const DEV_MAJOR_AT: usize = 16;
const DEV_MINOR_AT: usize = 20;
const FS_TYPE_AT: usize = 36;
const PARENT_AT: usize = 48;
const OLD_ID_AT: usize = 56;
const OLD_PARENT_AT: usize = 60;
const ATTRIBUTES_AT: usize = 64;
const PROPAGATION_AT: usize = 72;
const PEER_GROUP_AT: usize = 80;
const MASTER_AT: usize = 88;
const ROOT_AT: usize = 104;
const POINT_AT: usize = 108;
const FS_SUBTYPE_AT: usize = 120;
/// The end of the fixed part; the strings follow.
const STRINGS_AT: usize = 512;

/// mount(2)'s `MS_UNBINDABLE`, `MS_SLAVE` and `MS_SHARED`, the bits of `mnt_propagation`.
const UNBINDABLE: u64 = 1 << 17;
const SLAVE: u64 = 1 << 19;
const SHARED: u64 = 1 << 20;

impl StatmountEntry {
    /// The mask for statmount(2). A known `mount_point` is not requested again.
    pub fn mask(mount_point: Option<&Path>) -> u64 {
        NEEDED | SUBTYPE | if mount_point.is_none() { POINT } else { 0 }
    }

    /// Parses the buffer that statmount(2) wrote for the [`mask`](Self::mask) of the same
    /// `mount_point`.
    ///
    /// # Errors
    /// If the buffer lacks a requested field, or contains an invalid string.
    pub fn from_buffer(buffer: &[u8], mount_point: Option<&Path>) -> Result<Self, StatmountError> {
        let buffer = Buffer(buffer);
        let mask = buffer.long(MASK_AT)?;
        let needed = Self::mask(mount_point) & !SUBTYPE;
        if mask & needed != needed {
            return Err(StatmountError::Missing(mask));
        }
        let mount_point = match mount_point {
            Some(known) => known.to_owned(),
            None => os_string(buffer.string(POINT_AT, "mount point")?).into(),
        };
        let root = MountRoot::from_kernel(buffer.string(ROOT_AT, "root")?);
        // As mountinfo writes the type, such as `fuse.sshfs`.
        let mut fs_type = as_text(buffer.string(FS_TYPE_AT, "filesystem type")?);
        if mask & SUBTYPE != 0 {
            fs_type.push('.');
            fs_type += &as_text(buffer.string(FS_SUBTYPE_AT, "filesystem subtype")?);
        }
        let flags = buffer.long(PROPAGATION_AT)?;
        // The kernel's peer groups are ints, although the fields are wider.
        let group = |flag: u64, at: usize| match flags & flag {
            0 => Ok(None),
            _ => Ok(Some(u32::try_from(buffer.long(at)?).unwrap_or(u32::MAX))),
        };
        let entry = MountEntry {
            id: MountId(buffer.short(OLD_ID_AT)?),
            unique_id: None,
            parent: MountId(buffer.short(OLD_PARENT_AT)?),
            device: Device {
                major: buffer.short(DEV_MAJOR_AT)?,
                minor: buffer.short(DEV_MINOR_AT)?,
            },
            root,
            mount_point,
            options: OsString::new(),
            attributes: MountAttributes::from_bits(buffer.long(ATTRIBUTES_AT)?),
            propagation: Propagation {
                peer_group: group(SHARED, PEER_GROUP_AT)?,
                master: group(SLAVE, MASTER_AT)?,
                unbindable: flags & UNBINDABLE != 0,
                ..Propagation::default()
            },
            fs_type: FsType(fs_type),
            source: OsString::new(),
            super_options: OsString::new(),
        };
        Ok(Self {
            entry,
            unique_parent: buffer.long(PARENT_AT)?,
        })
    }
}

struct Buffer<'b>(&'b [u8]);

impl<'b> Buffer<'b> {
    fn bytes<const N: usize>(&self, at: usize) -> Result<[u8; N], StatmountError> {
        let bytes = self.0.get(at..).and_then(<[u8]>::first_chunk);
        bytes.copied().ok_or(StatmountError::TooShort)
    }

    fn long(&self, at: usize) -> Result<u64, StatmountError> {
        self.bytes(at).map(u64::from_ne_bytes)
    }

    fn short(&self, at: usize) -> Result<u32, StatmountError> {
        self.bytes(at).map(u32::from_ne_bytes)
    }

    /// The string at the position that the number at `at` contains, counted from the end of the
    /// fixed part.
    fn string(&self, at: usize, name: &'static str) -> Result<&'b [u8], StatmountError> {
        let start = STRINGS_AT.saturating_add(self.short(at)? as usize);
        let rest = self.0.get(start..).unwrap_or_default();
        let end = rest.iter().position(|byte| *byte == 0);
        Ok(&rest[..end.ok_or(StatmountError::BadString(name))?])
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::*;

    /// Any user can mount a FUSE filesystem with any subtype, by fusermount3(1).
    #[test]
    fn a_type_that_is_no_text_does_not_hide_the_other_mounts() {
        let line =
            b"35 29 0:26 / /home/u/m rw - fuse.\xff none rw\n36 29 8:1 / /d rw - ext4 d rw\n";
        let table = MountTable::from_mountinfo(line).unwrap();
        let types: Vec<&str> = table
            .entries()
            .iter()
            .map(|mount| mount.fs_type.0.as_str())
            .collect();
        assert_eq!(types, ["fuse.\u{fffd}", "ext4"]);
        assert!(!table.entries()[0].fs_type.is_local());
    }

    /// Captured from Linux 6.12: a volume, and a subpath of it.
    #[test]
    fn an_nfs_root_is_read_from_the_source() {
        for (line, root) in [
            (
                "35 29 0:26 / /vol rw shared:6 - nfs4 127.0.0.1:/share rw,vers=4.2",
                "/share",
            ),
            (
                "34 29 0:26 / /sub rw shared:6 - nfs4 127.0.0.1:/share/a\\040b/state rw,vers=4.2",
                "/share/a b/state",
            ),
            ("34 29 0:26 / /sub rw shared:6 - nfs [fe80::1]:/ rw", "/"),
            ("34 29 0:26 / /sub rw shared:6 - nfs oddity rw", "/"),
            (
                "34 29 0:26 /db /sub rw shared:6 - ceph 10.0.0.1:/share rw",
                "/db",
            ),
        ] {
            let entry = MountEntry::from_line(line.as_bytes()).unwrap();
            assert_eq!(
                entry.root,
                MountRoot {
                    path: root.into(),
                    deleted: false
                },
                "{line}"
            );
            assert_eq!(String::from_utf8(entry.to_line()).unwrap(), line);
        }
    }
}

#[cfg(test)]
mod stream_tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::*;

    const TABLE: &str = "\
21 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw
30 21 0:9 /a\\040b /mnt/c\\134d rw,relatime - overlay overlay rw,lowerdir=/l
";

    fn parsed(text: &str, size: usize, limits: TableLimits) -> Result<MountTable, TableError> {
        let mut parser = TableParser::new(limits);
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
                parsed(TABLE, size, TableLimits::HOST).ok(),
                whole.clone().ok(),
                "{size}"
            );
        }
        assert_eq!(parsed("", 1, TableLimits::HOST), Ok(MountTable::default()));
    }

    #[test]
    fn a_text_that_is_no_whole_table_is_an_error() {
        for end in (1..TABLE.len()).filter(|end| !TABLE[..*end].ends_with('\n')) {
            assert_eq!(
                parsed(&TABLE[..end], 7, TableLimits::HOST),
                Err(TableError::CutOff),
                "{end}"
            );
        }
    }

    #[test]
    fn a_line_that_is_no_mount_is_skipped_and_named() {
        let text = format!("{TABLE}no mount\n{TABLE}\n");
        for size in [1, 7, text.len()] {
            let table = parsed(&text, size, TableLimits::HOST).unwrap();
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
            keeps_sources: true,
        };
        for size in [1, 7, text] {
            assert!(parsed(TABLE, size, fits).is_ok(), "{size}");
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
                    parsed(TABLE, size, limits),
                    Err(TableError::TooLarge(exceeded)),
                    "{size}"
                );
            }
        }
    }

    #[test]
    fn the_sources_can_be_left_out() {
        let table = parsed(TABLE, 7, TableLimits::CONTAINER).unwrap();
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

#[cfg(test)]
mod escape_tests {
    use super::*;

    #[test]
    fn an_escaped_path_is_restored() {
        assert_eq!(escape(b"a b\\c\nd"), b"a\\040b\\134c\\012d");
        assert_eq!(unescape(b"a\\040b\\134c\\012d").as_ref(), b"a b\\c\nd");
        assert_eq!(
            unescape(b"lone\\ and \\08 and \\777").as_ref(),
            b"lone\\ and \\08 and \\777"
        );
    }
}

#[cfg(test)]
mod statmount_tests {
    use super::*;

    /// A buffer of the kernel: a mount of `fuse` at `/point` with the root `/root`.
    fn buffer(mask: u64, propagation: u64) -> Vec<u8> {
        let mut buffer = vec![0; STRINGS_AT];
        let mut put = |offset: usize, bytes: &[u8]| {
            buffer[offset..offset + bytes.len()].copy_from_slice(bytes);
        };
        for (offset, number) in [
            (DEV_MAJOR_AT, 8),
            (DEV_MINOR_AT, 17),
            (OLD_ID_AT, 30),
            (OLD_PARENT_AT, 20),
            (FS_TYPE_AT, 0),
            (ROOT_AT, 5),
            (POINT_AT, 11),
            (FS_SUBTYPE_AT, 18),
        ] {
            put(offset, &u32::to_ne_bytes(number));
        }
        for (offset, number) in [
            (MASK_AT, mask),
            (PARENT_AT, 4_000_000_000_000),
            (ATTRIBUTES_AT, 0x3),
            (PROPAGATION_AT, propagation),
            (PEER_GROUP_AT, 5),
            (MASTER_AT, 6),
        ] {
            put(offset, &u64::to_ne_bytes(number));
        }
        buffer.extend_from_slice(b"fuse\0/root\0/point\0sshfs\0");
        buffer
    }

    #[test]
    fn each_field_of_the_structure_is_read() {
        let read = StatmountEntry::from_buffer(&buffer(0x33b, SHARED), None).unwrap();
        let text = "30 20 8:17 /root /point ro,nosuid,relatime shared:5 - fuse.sshfs a rw";
        let mut expected = MountEntry::from_line(text.as_bytes()).unwrap();
        expected.options = OsString::new();
        expected.source = OsString::new();
        expected.super_options = OsString::new();
        assert_eq!(read.entry, expected);
        assert_eq!(read.unique_parent, 4_000_000_000_000);
    }

    #[test]
    fn the_groups_are_read_as_far_as_the_flags_say() {
        for (flags, peer_group, master, unbindable) in [
            (0, None, None, false),
            (SHARED, Some(5), None, false),
            (SLAVE, None, Some(6), false),
            (SHARED | SLAVE, Some(5), Some(6), false),
            (UNBINDABLE, None, None, true),
        ] {
            let read = StatmountEntry::from_buffer(&buffer(0x3b, flags), None).unwrap();
            let propagation = Propagation {
                peer_group,
                master,
                unbindable,
                ..Propagation::default()
            };
            assert_eq!(read.entry.propagation, propagation, "{flags:#x}");
            assert_eq!(read.entry.fs_type.0, "fuse");
        }
    }

    #[test]
    fn a_field_that_the_kernel_left_out_is_an_error_unless_it_is_known() {
        let known = Path::new("/known");
        assert_eq!(StatmountEntry::mask(None), 0x13b);
        assert_eq!(StatmountEntry::mask(Some(known)), 0x12b);
        let without_point = buffer(0x2b, 0);
        let missing = StatmountEntry::from_buffer(&without_point, None);
        assert_eq!(missing, Err(StatmountError::Missing(0x2b)));
        let read = StatmountEntry::from_buffer(&without_point, Some(known)).unwrap();
        assert_eq!(read.entry.mount_point, known);
        let short = StatmountEntry::from_buffer(&without_point[..100], Some(known));
        assert_eq!(short, Err(StatmountError::TooShort));
    }
}
