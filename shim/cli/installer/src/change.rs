//! The current and the planned content of a file or link, with the file's attributes.
//!
//! The new content is written beside the file and renamed over it, with the same mode, owner and
//! extended attributes: a reader sees the old bytes or the new bytes. The file is read again just before:
//! an editor or a configuration tool may have changed it since the diff was shown. A killed process leaves
//! its scratch files. Their names contain the pid, so a later process removes the files of dead processes.

use std::collections::BTreeMap;
use std::ffi::{CStr, OsStr};
use std::fs::{self, File, Metadata, OpenOptions, Permissions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown, symlink};
use std::path::{Path, PathBuf};
use std::{env, io, process};

use anyhow::{Context, Result, anyhow, ensure};
use bindguard_operator::node::is_root;
use bindguard_sys::make_folders;
use rustix::fs::{
    OFlags, Timespec, Timestamps, XattrFlags, fgetxattr, flistxattr, fsetxattr, futimens,
};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use similar::TextDiff;
use tempfile::{Builder, TempDir};

/// The size limit of a file: a program has some megabytes.
const MAX_SIZE: u64 = 256 << 20;

/// The mode of a new folder.
const FOLDER_MODE: u32 = 0o755;

/// The content of a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// A file with these bytes.
    File(Vec<u8>),
    /// A symbolic link to this path.
    Link(PathBuf),
}

impl Content {
    /// The bytes of a file.
    pub fn bytes(&self) -> Option<&[u8]> {
        match self {
            Self::File(bytes) => Some(bytes),
            Self::Link(_) => None,
        }
    }
}

/// The planned change of a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// The path; of a link to an edited file, the path of that file.
    pub path: PathBuf,
    /// The current content; `None` if the file does not exist.
    pub before: Option<Content>,
    /// The planned content; `None` to remove the file.
    pub after: Option<Content>,
    /// The attributes of the planned content.
    pub attributes: NewAttributes,
}

/// The attributes of a planned content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NewAttributes {
    /// Those of the present file; this mode for a new file.
    Present(u32),
    /// The attributes of the file when it had this content.
    Former(Attributes),
}

impl Change {
    /// The change of a file from its current content to `after`.
    pub fn of(path: &Path, after: Option<Vec<u8>>, mode: u32) -> Result<Self> {
        let path = resolved(path);
        let attributes = NewAttributes::Present(mode);
        Ok(Self {
            before: content(&path)?,
            path,
            after: after.map(Content::File),
            attributes,
        })
    }

    /// The change to a link that leads to `target`.
    pub fn link(path: &Path, target: &Path) -> Result<Self> {
        let after = Some(Content::Link(target.to_owned()));
        Ok(Self {
            before: content(path)?,
            path: path.to_owned(),
            after,
            attributes: NewAttributes::Present(0),
        })
    }

    /// True if there is nothing to do.
    pub fn is_none(&self) -> bool {
        self.before == self.after
    }

    /// Refuses a change in a folder that cannot be written, such as a folder on a read-only file
    /// system.
    pub fn check_writable(&self) -> Result<()> {
        let folder = nearest(self.path.parent().unwrap_or(&self.path));
        rustix::fs::access(folder, rustix::fs::Access::WRITE_OK)
            .map_err(io::Error::from)
            .with_context(|| {
                format!(
                    "{} {}: {} is not writable, and nothing was changed",
                    self.word(),
                    self.path.display(),
                    folder.display()
                )
            })
    }

    /// A word for the change.
    pub fn word(&self) -> &'static str {
        match (&self.before, &self.after) {
            (before, after) if before == after => "keep",
            (None, _) => "create",
            (Some(_), Some(_)) => "change",
            (Some(_), None) => "remove",
        }
    }

    /// The unified diff of a text; `None` for a program or a link.
    pub fn diff(&self) -> Option<String> {
        let text = |content: &Option<Content>| match content {
            None => Some(String::new()),
            Some(Content::File(bytes)) => String::from_utf8(bytes.clone()).ok(),
            Some(Content::Link(_)) => None,
        };
        let (before, after) = (text(&self.before)?, text(&self.after)?);
        if before.contains('\0') || after.contains('\0') {
            return None;
        }
        let name = |content: &Option<Content>| {
            content
                .as_ref()
                .map_or("/dev/null".into(), |_| self.path.display().to_string())
        };
        let diff = TextDiff::from_lines(&before, &after);
        Some(
            diff.unified_diff()
                .header(&name(&self.before), &name(&self.after))
                .to_string(),
        )
    }

    pub fn apply(&self) -> Result<()> {
        if self.is_none() {
            return Ok(());
        }
        ensure!(
            content(&self.path)? == self.before,
            "{} changed while this was at work: nothing was done to it, run it again",
            self.path.display()
        );
        match &self.after {
            Some(Content::File(bytes)) => write(&self.path, bytes, &self.attributes),
            Some(Content::Link(target)) => write_link(&self.path, target),
            None => fs::remove_file(&self.path)
                .with_context(|| format!("remove {}", self.path.display())),
        }
    }
}

/// The path, or the nearest folder above that exists.
pub fn nearest(path: &Path) -> &Path {
    let is_there = |path: &&Path| path.symlink_metadata().is_ok();
    path.ancestors().find(is_there).unwrap_or(Path::new("/"))
}

/// The content of a path; `None` if there is nothing.
pub fn content(path: &Path) -> Result<Option<Content>> {
    match fs::read_link(path) {
        Ok(target) => Ok(Some(Content::Link(target))),
        Err(_) => Ok(read(path)?.map(Content::File)),
    }
}

/// The content of a file; `None` if there is no file. A fifo may have no writer, and a device has no
/// end.
pub fn read(path: &Path) -> Result<Option<Vec<u8>>> {
    let doing = || format!("read {}", path.display());
    match fs::metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        found => check_readable(path, &found.with_context(doing)?)?,
    }
    let nonblock = OFlags::NONBLOCK.bits().cast_signed();
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(nonblock)
        .open(path);
    let file = file.with_context(doing)?;
    // another file may have the name by now
    check_readable(path, &file.metadata().with_context(doing)?)?;
    let mut bytes = Vec::new();
    file.take(MAX_SIZE)
        .read_to_end(&mut bytes)
        .with_context(doing)?;
    Ok(Some(bytes))
}

/// The text of a file; `None` if there is no file.
pub fn read_text(path: &Path) -> Result<Option<String>> {
    let text = read(path)?.map(String::from_utf8).transpose();
    text.map_err(|_| anyhow!("read {}: it is not text", path.display()))
}

fn check_readable(path: &Path, found: &Metadata) -> Result<()> {
    let path = path.display();
    ensure!(found.is_file(), "read {path}: {path} is no regular file");
    ensure!(
        found.len() <= MAX_SIZE,
        "read {path}: it is larger than {} MiB",
        MAX_SIZE >> 20
    );
    Ok(())
}

/// Replaces a file in one step, and creates the missing folders above it.
pub fn write(path: &Path, bytes: &[u8], attributes: &NewAttributes) -> Result<()> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    let doing = || format!("write {}", path.display());
    make_folders(folder, FOLDER_MODE).with_context(|| format!("create {}", folder.display()))?;
    let beside = temporary_folder(folder);
    sweep(beside);
    let mut file = with_builder(|builder| builder.tempfile_in(beside)).with_context(doing)?;
    file.write_all(bytes).with_context(doing)?;
    let present = Attributes::of(path).with_context(doing)?;
    match (attributes, present) {
        (NewAttributes::Former(former), _) => former.give_to_restored(file.as_file()),
        (NewAttributes::Present(_), Some(present)) => present.give_to_edited(file.as_file()),
        (NewAttributes::Present(mode), None) => file
            .as_file()
            .set_permissions(Permissions::from_mode(*mode)),
    }
    .with_context(doing)?;
    file.as_file().sync_all().with_context(doing)?;
    file.persist(path)
        .map_err(|error| error.error)
        .with_context(doing)?;
    Ok(())
}

/// The folder for a new file until the rename. A runtime may read or watch every file of a folder
/// `*.d`.
pub fn temporary_folder(folder: &Path) -> &Path {
    let device = |folder: &Path| fs::metadata(folder).ok().map(|found| found.dev());
    let is_read = folder.extension().is_some_and(|extension| extension == "d");
    match folder
        .parent()
        .filter(|parent| is_read && device(parent).is_some() && device(parent) == device(folder))
    {
        Some(parent) => parent,
        None => folder,
    }
}

/// Replaces a link in one step: a start meanwhile runs the old or the new program.
fn write_link(path: &Path, target: &Path) -> Result<()> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    let doing = || format!("link {} to {}", path.display(), target.display());
    make_folders(folder, FOLDER_MODE).with_context(|| format!("create {}", folder.display()))?;
    let link = with_builder(|builder| builder.make_in(folder, |link| symlink(target, link)))
        .with_context(doing)?;
    link.persist(path)
        .map_err(|error| error.error)
        .with_context(doing)?;
    Ok(())
}

/// A link stays a link: install changes the file behind the link. A link among the folders stays in
/// the path: MicroK8s has `current`, which leads to a new folder after an upgrade.
#[expect(
    clippy::disallowed_methods,
    reason = "a runtime's own config, not the source of a container's bind"
)]
pub fn resolved(path: &Path) -> PathBuf {
    let is_link = path
        .symlink_metadata()
        .is_ok_and(|found| found.is_symlink());
    if is_link {
        path.canonicalize().unwrap_or_else(|_| path.to_owned())
    } else {
        path.to_owned()
    }
}

/// A file's name in messages.
pub fn name(path: &Path) -> String {
    path.display().to_string()
}

/// The note on a file that stays.
pub fn stays(path: &Path, error: &anyhow::Error) -> String {
    format!(
        "{} stays: {error:#}; correct this, then run this again",
        name(path)
    )
}

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

/// The folders for root's private copies. The root of an image may lack the first ones.
const PRIVATE: [&str; 3] = ["/run", "/var/lib", "/"];

const PREFIX: &str = ".bindguard-";

/// The prefix of this process's files.
pub fn prefix() -> String {
    format!("{PREFIX}{}-", process::id())
}

/// Calls `make` with a builder of such files.
pub fn with_builder<T>(make: impl FnOnce(&mut Builder<'_, '_>) -> T) -> T {
    make(Builder::new().prefix(&prefix()))
}

/// A folder of this process for copies of files that may have secrets, which no other user can
/// read. Removes what killed processes left.
///
/// # Errors
/// If no such folder can be made.
pub fn private_folder() -> io::Result<TempDir> {
    let parents = match is_root() {
        true => PRIVATE.map(PathBuf::from).to_vec(),
        false => vec![env::temp_dir()],
    };
    let mut failed = ErrorKind::NotFound.into();
    for parent in parents {
        sweep(&parent);
        let mut builder = Builder::new();
        let private = Permissions::from_mode(0o700);
        match builder
            .prefix(&prefix())
            .permissions(private)
            .tempdir_in(parent)
        {
            Ok(folder) => return Ok(folder),
            Err(error) => failed = error,
        }
    }
    Err(failed)
}

/// Removes the private copies of processes that have ended.
pub fn sweep_private() {
    PRIVATE.iter().for_each(|folder| sweep(Path::new(folder)));
}

/// Removes the files and private folders of processes that have ended from a folder.
pub fn sweep(folder: &Path) {
    let entries = folder.read_dir().into_iter().flatten().flatten();
    for entry in entries.filter(|entry| is_abandoned(&entry.file_name())) {
        let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
        // the next sweep tries again
        let _ = match is_folder {
            true => fs::remove_dir_all(entry.path()),
            false => fs::remove_file(entry.path()),
        };
    }
}

fn is_abandoned(name: &OsStr) -> bool {
    let pid = || {
        name.to_str()?
            .strip_prefix(PREFIX)?
            .split_once('-')?
            .0
            .parse::<u32>()
            .ok()
    };
    pid().is_some_and(|pid| {
        pid != process::id()
            && Path::new("/proc")
                .join(pid.to_string())
                .symlink_metadata()
                .is_err()
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]
    use super::*;

    #[test]
    fn mode_owner_and_links_are_kept_and_the_diff_says_what_changes() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (
            folder.path().join("real.toml"),
            folder.path().join("link.toml"),
        );
        fs::write(&file, "a = 1\nb = 2\n").unwrap();
        fs::set_permissions(&file, Permissions::from_mode(0o640)).unwrap();
        symlink(&file, &link).unwrap();
        let change = Change::of(&link, Some(b"a = 1\nb = 3\n".to_vec()), 0o644).unwrap();
        let diff = change.diff().unwrap();
        assert!(
            diff.contains("\n-b = 2\n+b = 3\n") && diff.contains("+++ "),
            "{diff}"
        );
        change.apply().unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "a = 1\nb = 3\n");
        assert_eq!(fs::metadata(&file).unwrap().mode() & 0o7777, 0o640);
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(
            folder.path().read_dir().unwrap().count(),
            2,
            "something lies beside the file"
        );
    }

    #[test]
    fn a_file_that_changed_meanwhile_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("config");
        let change = Change::of(&file, Some(b"new".to_vec()), 0o600).unwrap();
        fs::write(&file, "somebody else's").unwrap();
        assert!(
            change
                .apply()
                .unwrap_err()
                .to_string()
                .contains("changed while")
        );
        assert_eq!(fs::read_to_string(&file).unwrap(), "somebody else's");
    }

    #[test]
    fn only_the_files_of_ended_processes_go() {
        let folder = tempfile::tempdir().unwrap();
        let own = format!("{}x", prefix());
        let (ended, other) = (".bindguard-4294967295-x", ".bindguard-notes");
        [own.as_str(), ended, other, "config.toml"]
            .iter()
            .for_each(|name| fs::write(folder.path().join(name), "").unwrap());
        sweep(folder.path());
        let mut left: Vec<_> = folder
            .path()
            .read_dir()
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        left.sort();
        assert_eq!(left, [own.as_str(), other, "config.toml"]);
    }
}
