//! Parser of mountinfo. A line that cannot be parsed is skipped and named in the table.
//!
//! ```text
//! 36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue
//! id parent dev root mount_point options [optional fields] - type source super_options
//! ```

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::attributes::MountAttributes;
use super::entry::{Device, FsType, MountEntry, MountId, MountRoot, Propagation};
use super::escape::unescape;
use super::table::MountTable;

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

impl ParseError {
    /// A filesystem's options can have a page of text.
    const MAX_TEXT: usize = 200;

    pub(super) fn new(line: usize, text: &[u8], wrong: WrongField) -> Self {
        Self {
            line,
            text: String::from_utf8_lossy(&text[..text.len().min(Self::MAX_TEXT)]).into_owned(),
            wrong,
            more: 0,
        }
    }
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
        if lines.is_empty() {
            return table;
        }
        for (index, line) in lines.split(|byte| *byte == b'\n').enumerate() {
            match MountEntry::from_line(line) {
                Ok(entry) => table.push(entry),
                Err(wrong) => table.skip(ParseError::new(index + 1, line, wrong)),
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
}

impl MountEntry {
    /// Reads a line of mountinfo without the newline.
    ///
    /// # Errors
    /// If a field is missing or does not match proc_pid_mountinfo(5).
    pub fn from_line(line: &[u8]) -> Result<Self, WrongField> {
        let mut fields = Fields(Some(line));
        let id = MountId(fields.number("mount id")?);
        let parent = MountId(fields.number("parent id")?);
        let device = device(fields.next("major:minor")?)?;
        let root = MountRoot::from_kernel(&unescape(fields.next("root")?));
        let mount_point = PathBuf::from(fields.escaped("mount point")?);
        let options = fields.raw("mount options")?;
        let propagation = propagation(&mut fields)?;
        let fs_type = FsType(text(&unescape(fields.next("filesystem type")?)));
        let source = fields.escaped("source")?;
        // 9p and old versions of cifs print spaces in their options unescaped.
        let super_options = fields.rest("super options")?;
        let attributes = MountAttributes::from_options(&options);
        let entry = Self {
            id,
            unique_id: None,
            parent,
            device,
            root,
            mount_point,
            options,
            attributes,
            propagation,
            fs_type,
            source,
            super_options,
        };
        Ok(entry.with_root_of_source())
    }

    fn with_root_of_source(mut self) -> Self {
        if let Some(path) = self
            .root_in_source()
            .filter(|_| self.root.path == Path::new("/"))
        {
            self.root.path = path.to_owned();
        }
        self
    }
}

/// The part of a line after the fields that were read. `None` after the last field.
struct Fields<'a>(Option<&'a [u8]>);

impl<'a> Fields<'a> {
    fn next(&mut self, name: &'static str) -> Result<&'a [u8], WrongField> {
        let rest = self.0.ok_or(WrongField::Missing(name))?;
        match rest.iter().position(|byte| *byte == b' ') {
            Some(space) => {
                self.0 = Some(&rest[space + 1..]);
                Ok(&rest[..space])
            }
            None => {
                self.0 = None;
                Ok(rest)
            }
        }
    }

    fn number(&mut self, name: &'static str) -> Result<u32, WrongField> {
        number(name, self.next(name)?)
    }

    fn escaped(&mut self, name: &'static str) -> Result<OsString, WrongField> {
        Ok(OsStr::from_bytes(&unescape(self.next(name)?)).to_owned())
    }

    /// Returns options as written: the escapes depend on the filesystem.
    fn raw(&mut self, name: &'static str) -> Result<OsString, WrongField> {
        Ok(OsStr::from_bytes(self.next(name)?).to_owned())
    }

    fn rest(&mut self, name: &'static str) -> Result<OsString, WrongField> {
        let rest = self.0.take().ok_or(WrongField::Missing(name))?;
        Ok(OsStr::from_bytes(rest).to_owned())
    }
}

fn propagation(fields: &mut Fields<'_>) -> Result<Propagation, WrongField> {
    let mut propagation = Propagation::default();
    loop {
        let field = fields.next("separator")?;
        let (tag, value) = match field.iter().position(|b| *b == b':') {
            Some(colon) => (&field[..colon], Some(&field[colon + 1..])),
            None => (field, None),
        };
        match (tag, value) {
            (b"-", None) => return Ok(propagation),
            (b"shared", Some(n)) => propagation.peer_group = Some(number("shared", n)?),
            (b"master", Some(n)) => propagation.master = Some(number("master", n)?),
            (b"propagate_from", Some(n)) => {
                propagation.propagate_from = Some(number("propagate_from", n)?)
            }
            (b"unbindable", None) => propagation.unbindable = true,
            // The man page requires it: "parsers should ignore all unrecognized optional fields".
            _ => propagation.unknown.push(text(field)),
        }
    }
}

fn device(field: &[u8]) -> Result<Device, WrongField> {
    let colon = field
        .iter()
        .position(|b| *b == b':')
        .ok_or(WrongField::NotANumber("major:minor"))?;
    Ok(Device {
        major: number("major", &field[..colon])?,
        minor: number("minor", &field[colon + 1..])?,
    })
}

fn number(name: &'static str, field: &[u8]) -> Result<u32, WrongField> {
    // `u32::from_str` accepts a leading plus, which the kernel never writes.
    let digits = field.iter().all(u8::is_ascii_digit).then_some(field);
    digits
        .and_then(|d| std::str::from_utf8(d).ok())
        .and_then(|d| d.parse().ok())
        .ok_or(WrongField::NotANumber(name))
}

/// A field that any user may choose, such as the subtype of a FUSE mount: bytes that are no UTF-8 are
/// no reason to refuse the table.
pub(super) fn text(field: &[u8]) -> String {
    String::from_utf8_lossy(field).into_owned()
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
