//! The attributes of a file: mode, owner, times and extended attributes, such as an SELinux label.
//!
//! An edited file keeps its attributes, except its times. A restored file gets its former
//! attributes.

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::Path;

use rustix::fs::{Timespec, Timestamps, XattrFlags, fgetxattr, flistxattr, fsetxattr, futimens};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

/// Signatures of a content: they are wrong for an edited file.
const SIGNATURES: [&str; 2] = ["security.ima", "security.evm"];

/// The device and the inode of the file to which a path leads.
pub fn identity(path: &Path) -> Option<(u64, u64)> {
    let found = fs::metadata(path).ok()?;
    Some((found.dev(), found.ino()))
}

/// The attributes of a regular file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attributes {
    mode: u32,
    uid: u32,
    gid: u32,
    accessed: (i64, i64),
    modified: (i64, i64),
    /// The attributes with their values in hexadecimal digits.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    xattrs: BTreeMap<String, String>,
}

impl Attributes {
    /// Those of the regular file at a path; `None` if there is no such file.
    pub fn of(path: &Path) -> io::Result<Option<Self>> {
        if !path.symlink_metadata().is_ok_and(|found| found.is_file()) {
            return Ok(None);
        }
        let file = File::open(path)?;
        let found = file.metadata()?;
        Ok(Some(Self {
            mode: found.mode() & 0o7777,
            uid: found.uid(),
            gid: found.gid(),
            accessed: (found.atime(), found.atime_nsec()),
            modified: (found.mtime(), found.mtime_nsec()),
            xattrs: xattrs_of(&file)?,
        }))
    }

    /// The attributes for a different content.
    #[must_use]
    pub fn without_signatures(mut self) -> Self {
        self.xattrs
            .retain(|name, _| !SIGNATURES.contains(&name.as_str()));
        self
    }

    /// Gives the attributes to a file with a different content.
    pub fn give_to_edited(self, file: &File) -> io::Result<()> {
        self.without_signatures().give(file)
    }

    /// Gives them to a file with the same content, times included.
    pub fn give_to_restored(&self, file: &File) -> io::Result<()> {
        self.give(file)?;
        let time = |(seconds, nanoseconds): (i64, i64)| Timespec {
            tv_sec: seconds,
            tv_nsec: nanoseconds,
        };
        let times = Timestamps {
            last_access: time(self.accessed),
            last_modification: time(self.modified),
        };
        Ok(futimens(file, &times)?)
    }

    fn give(&self, file: &File) -> io::Result<()> {
        fchown(file, Some(self.uid), Some(self.gid))?;
        file.set_permissions(Permissions::from_mode(self.mode))?;
        for (name, digits) in &self.xattrs {
            fsetxattr(file, name.as_str(), &bytes_of(digits), XattrFlags::empty())?;
        }
        Ok(())
    }
}

fn xattrs_of(file: &File) -> io::Result<BTreeMap<String, String>> {
    let mut names = vec![0; 64 << 10];
    let length = match flistxattr(file, &mut names) {
        Ok(length) => length,
        Err(Errno::OPNOTSUPP) => return Ok(BTreeMap::new()),
        Err(errno) => return Err(errno.into()),
    };
    let mut value = vec![0; 64 << 10];
    let mut xattrs = BTreeMap::new();
    for name in names[..length].split_inclusive(|byte| *byte == 0) {
        let Some(name) = CStr::from_bytes_until_nul(name)
            .ok()
            .and_then(|name| name.to_str().ok())
        else {
            continue;
        };
        let length = fgetxattr(file, name, &mut value)?;
        xattrs.insert(
            name.to_owned(),
            value[..length]
                .iter()
                .map(|byte| format!("{byte:02x}"))
                .collect(),
        );
    }
    Ok(xattrs)
}

fn bytes_of(digits: &str) -> Vec<u8> {
    let pairs = digits.as_bytes().chunks_exact(2);
    pairs
        .filter_map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok())
        .collect()
}
