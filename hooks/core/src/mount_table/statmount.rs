//! A mount in the form that statmount(2) returns: `struct statmount` of the kernel's
//! `include/uapi/linux/mount.h`.
//!
//! The structure contains the fields of a mountinfo line with raw strings, without escapes. A field
//! that the caller did not request, or that the kernel did not fill in, is missing from the mask
//! and is not read.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::entry::{Device, FsType, MountAttributes, MountEntry, MountId, MountRoot, Propagation};
use super::parse::as_text;

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

/// Offsets within `struct statmount`.
mod at {
    pub(super) const MASK: usize = 8;
    pub(super) const DEV_MAJOR: usize = 16;
    pub(super) const DEV_MINOR: usize = 20;
    pub(super) const FS_TYPE: usize = 36;
    pub(super) const PARENT: usize = 48;
    pub(super) const OLD_ID: usize = 56;
    pub(super) const OLD_PARENT: usize = 60;
    pub(super) const ATTRIBUTES: usize = 64;
    pub(super) const PROPAGATION: usize = 72;
    pub(super) const PEER_GROUP: usize = 80;
    pub(super) const MASTER: usize = 88;
    pub(super) const ROOT: usize = 104;
    pub(super) const POINT: usize = 108;
    pub(super) const FS_SUBTYPE: usize = 120;
    /// The end of the fixed part; the strings follow.
    pub(super) const STRINGS: usize = 512;
}

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
        let mask = number(buffer, at::MASK)?;
        let needed = Self::mask(mount_point) & !SUBTYPE;
        if mask & needed != needed {
            return Err(StatmountError::Missing(mask));
        }
        let mount_point = match mount_point {
            Some(known) => known.to_owned(),
            None => PathBuf::from(OsStr::from_bytes(string(buffer, at::POINT, "mount point")?)),
        };
        let root = MountRoot::from_kernel(string(buffer, at::ROOT, "root")?);
        // As mountinfo writes the type, such as `fuse.sshfs`.
        let mut fs_type = as_text(string(buffer, at::FS_TYPE, "filesystem type")?);
        if mask & SUBTYPE != 0 {
            fs_type.push('.');
            fs_type += &as_text(string(buffer, at::FS_SUBTYPE, "filesystem subtype")?);
        }
        let flags = number(buffer, at::PROPAGATION)?;
        let mut propagation = Propagation {
            unbindable: flags & UNBINDABLE != 0,
            ..Propagation::default()
        };
        // The kernel's peer groups are ints, although the fields are wider.
        if flags & SHARED != 0 {
            propagation.peer_group =
                Some(u32::try_from(number(buffer, at::PEER_GROUP)?).unwrap_or(u32::MAX));
        }
        if flags & SLAVE != 0 {
            propagation.master =
                Some(u32::try_from(number(buffer, at::MASTER)?).unwrap_or(u32::MAX));
        }
        let entry = MountEntry {
            id: MountId(short_number(buffer, at::OLD_ID)?),
            unique_id: None,
            parent: MountId(short_number(buffer, at::OLD_PARENT)?),
            device: Device {
                major: short_number(buffer, at::DEV_MAJOR)?,
                minor: short_number(buffer, at::DEV_MINOR)?,
            },
            root,
            mount_point,
            options: OsString::new(),
            attributes: MountAttributes::from_bits(number(buffer, at::ATTRIBUTES)?),
            propagation,
            fs_type: FsType(fs_type),
            source: OsString::new(),
            super_options: OsString::new(),
        };
        Ok(Self {
            entry,
            unique_parent: number(buffer, at::PARENT)?,
        })
    }
}

fn bytes_at<const N: usize>(buffer: &[u8], offset: usize) -> Result<[u8; N], StatmountError> {
    let bytes = buffer.get(offset..).and_then(<[u8]>::first_chunk);
    bytes.copied().ok_or(StatmountError::TooShort)
}

fn number(buffer: &[u8], offset: usize) -> Result<u64, StatmountError> {
    bytes_at(buffer, offset).map(u64::from_ne_bytes)
}

fn short_number(buffer: &[u8], offset: usize) -> Result<u32, StatmountError> {
    bytes_at(buffer, offset).map(u32::from_ne_bytes)
}

/// Reads the string at the position that the number at `offset` contains, counted from the end of
/// the fixed part.
fn string<'a>(
    buffer: &'a [u8],
    offset: usize,
    name: &'static str,
) -> Result<&'a [u8], StatmountError> {
    let start = at::STRINGS.saturating_add(short_number(buffer, offset)? as usize);
    let rest = buffer.get(start..).unwrap_or_default();
    let end = rest.iter().position(|byte| *byte == 0);
    Ok(&rest[..end.ok_or(StatmountError::BadString(name))?])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A buffer of the kernel: a mount of `fuse` at `/point` with the root `/root`.
    fn buffer(mask: u64, propagation: u64) -> Vec<u8> {
        let mut buffer = vec![0; at::STRINGS];
        let mut put = |offset: usize, bytes: &[u8]| {
            buffer[offset..offset + bytes.len()].copy_from_slice(bytes);
        };
        for (offset, number) in [
            (at::DEV_MAJOR, 8),
            (at::DEV_MINOR, 17),
            (at::OLD_ID, 30),
            (at::OLD_PARENT, 20),
            (at::FS_TYPE, 0),
            (at::ROOT, 5),
            (at::POINT, 11),
            (at::FS_SUBTYPE, 18),
        ] {
            put(offset, &u32::to_ne_bytes(number));
        }
        for (offset, number) in [
            (at::MASK, mask),
            (at::PARENT, 4_000_000_000_000),
            (at::ATTRIBUTES, 0x3),
            (at::PROPAGATION, propagation),
            (at::PEER_GROUP, 5),
            (at::MASTER, 6),
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
