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
    Access, OFlags, Timespec, Timestamps, XattrFlags, access, fgetxattr, flistxattr, fsetxattr,
    futimens,
};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use similar::TextDiff;
use tempfile::{Builder, TempDir};

/// The size limit of a file: a program has some megabytes.
const MAX_SIZE: u64 = 256 << 20;

/// The mode of a new folder.
const FOLDER_MODE: u32 = 0o755;

/// Names the failed action and its path in an error.
pub trait Doing<T> {
    fn doing(self, action: &str, path: &Path) -> Result<T>;
}

impl<T, E> Doing<T> for Result<T, E>
where
    Self: Context<T, E>,
{
    fn doing(self, action: &str, path: &Path) -> Result<T> {
        self.with_context(|| format!("{action} {}", path.display()))
    }
}

/// The owner of a file.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    strum::Display,
    clap::ValueEnum,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum Owner {
    /// containerd's config.toml, or a file that it imports.
    Containerd,
    /// Docker's daemon.json.
    Docker,
    /// A drop-in of Podman's containers.conf.
    Podman,
    /// A drop-in of CRI-O's.
    #[value(name = "crio")]
    Crio,
    /// The unit of the node agent.
    #[value(skip)]
    Agent,
    /// The programs and the settings of bindguard itself.
    #[value(skip)]
    Bindguard,
}

/// The content of a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
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
#[derive(Debug, Clone)]
pub struct Change {
    pub owner: Owner,
    /// The path; of a link to an edited file, the path of that file.
    pub path: PathBuf,
    /// The current content; `None` if the file does not exist.
    pub before: Option<Content>,
    /// The planned content; `None` to remove the file.
    pub after: Option<Content>,
    /// The mode of a new file.
    pub mode: u32,
    /// The command that activates the change.
    pub command: Option<String>,
}

/// The planned changes to the files of a runtime.
#[derive(Debug, Default)]
pub struct Plan {
    /// A change for each file; a change may be empty.
    pub changes: Vec<Change>,
    /// Notes for the operator.
    pub notes: Vec<String>,
    /// The OCI runtime that bindguard-runtime must call; `None` if bindguard's shim names it.
    pub needs_runtime: Option<PathBuf>,
    /// Other programs without which no container would start.
    pub needs_programs: Vec<PathBuf>,
    /// The command that activates the changes.
    pub command: Option<String>,
    /// The operator's own steps, if no file that lasts can be changed.
    pub advice: Option<String>,
}

impl Change {
    /// The change of a file, or of the file to which a link leads, to this text.
    pub fn text(owner: Owner, path: &Path, text: String) -> Result<Self> {
        let after = Content::File(text.into_bytes());
        Self::to(owner, resolved(path), Some(after))
    }

    /// The change to a link that leads to `target`.
    pub fn link(owner: Owner, path: PathBuf, target: &Path) -> Result<Self> {
        Self::to(owner, path, Some(Content::Link(target.to_owned())))
    }

    /// The change of this very path from its current content to `after`.
    pub fn to(owner: Owner, path: PathBuf, after: Option<Content>) -> Result<Self> {
        Ok(Self {
            owner,
            before: content(&path)?,
            path,
            after,
            mode: 0o644,
            command: None,
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
        access(folder, Access::WRITE_OK).with_context(|| {
            let (word, path, folder) = (self.word(), self.path.display(), folder.display());
            format!("{word} {path}: {folder} is not writable, and nothing was changed")
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
        let path = self.path.display().to_string();
        let mut sides = [("", "/dev/null"); 2];
        for (side, content) in sides.iter_mut().zip([&self.before, &self.after]) {
            let Some(content) = content else { continue };
            *side = (str::from_utf8(content.bytes()?).ok()?, &path);
        }
        let [(before, from), (after, to)] = sides;
        if before.contains('\0') || after.contains('\0') {
            return None;
        }
        let diff = TextDiff::from_lines(before, after);
        Some(diff.unified_diff().header(from, to).to_string())
    }

    /// Makes the change. `former`: the attributes of the file when it had the planned content; `None`:
    /// the file keeps its present attributes.
    pub fn apply(&self, former: Option<&Attributes>) -> Result<()> {
        if self.is_none() {
            return Ok(());
        }
        ensure!(
            content(&self.path)? == self.before,
            "{} changed while this was at work: nothing was done to it, run it again",
            self.path.display()
        );
        match &self.after {
            Some(Content::File(bytes)) => write(&self.path, bytes, self.mode, former),
            Some(Content::Link(target)) => {
                let folder = folder_of(&self.path)?;
                // a start meanwhile runs the old or the new program
                let prefix = prefix();
                let mut link = Builder::new();
                let made = link
                    .prefix(&prefix)
                    .make_in(folder, |link| symlink(target, link));
                let linked = made.and_then(|link| Ok(link.persist(&self.path)?));
                linked.with_context(|| {
                    format!("link {} to {}", self.path.display(), target.display())
                })
            }
            None => fs::remove_file(&self.path).doing("remove", &self.path),
        }
    }
}

/// The content that a file has after `changes`; `None` if the file is missing then.
pub fn bytes_after(path: &Path, changes: &[Change]) -> Result<Option<Vec<u8>>> {
    match changes.iter().find(|change| change.path == path) {
        Some(change) => {
            let after = change.after.as_ref();
            Ok(after.and_then(Content::bytes).map(<[u8]>::to_vec))
        }
        None => read(path),
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
    match fs::metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        found => check_readable(path, &found.doing("read", path)?)?,
    }
    let nonblock = OFlags::NONBLOCK.bits().cast_signed();
    let mut options = OpenOptions::new();
    let opened = options.read(true).custom_flags(nonblock).open(path);
    let file = opened.doing("read", path)?;
    // another file may have the name by now
    check_readable(path, &file.metadata().doing("read", path)?)?;
    let mut bytes = Vec::new();
    let read = file.take(MAX_SIZE).read_to_end(&mut bytes);
    read.doing("read", path)?;
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

/// Replaces a file in one step, and creates the missing folders above it. The new file gets the
/// `former` attributes, times included, those of the present file, or this mode.
pub fn write(path: &Path, bytes: &[u8], mode: u32, former: Option<&Attributes>) -> Result<()> {
    let beside = temporary_folder(folder_of(path)?);
    sweep(beside);
    let write = || -> io::Result<()> {
        let mut file = Builder::new().prefix(&prefix()).tempfile_in(beside)?;
        file.write_all(bytes)?;
        match (former, Attributes::of(path)?) {
            (Some(former), _) => {
                former.give(file.as_file())?;
                let time = |(seconds, nanoseconds): (i64, i64)| Timespec {
                    tv_sec: seconds,
                    tv_nsec: nanoseconds,
                };
                let times = Timestamps {
                    last_access: time(former.accessed),
                    last_modification: time(former.modified),
                };
                futimens(file.as_file(), &times)?;
            }
            (None, Some(present)) => present.without_signatures().give(file.as_file())?,
            (None, None) => {
                let mode = Permissions::from_mode(mode);
                file.as_file().set_permissions(mode)?;
            }
        }
        file.as_file().sync_all()?;
        file.persist(path)?;
        Ok(())
    };
    write().doing("write", path)
}

/// The folder for a new file until the rename. A runtime may read or watch every file of a folder
/// `*.d`.
pub fn temporary_folder(folder: &Path) -> &Path {
    let device = |folder: &Path| Some(identity(folder)?.0);
    match folder.parent() {
        Some(parent)
            if folder.extension() == Some(OsStr::new("d"))
                && device(parent).is_some()
                && device(parent) == device(folder) =>
        {
            parent
        }
        _ => folder,
    }
}

/// The folder of a file, which is created if it is missing.
fn folder_of(path: &Path) -> Result<&Path> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    make_folders(folder, FOLDER_MODE).doing("create", folder)?;
    Ok(folder)
}

/// A link stays a link: install changes the file behind the link. A link among the folders stays in
/// the path: MicroK8s has `current`, which leads to a new folder after an upgrade.
pub fn resolved(path: &Path) -> PathBuf {
    match path.symlink_metadata() {
        Ok(found) if found.is_symlink() => canonical(path),
        _ => path.to_owned(),
    }
}

/// The path without links; the path as it is if it leads nowhere.
#[expect(
    clippy::disallowed_methods,
    reason = "a runtime's own config or a program, not the source of a container's bind"
)]
pub fn canonical(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

/// The note on a file that stays.
pub fn stays(path: &Path, error: &anyhow::Error) -> String {
    format!(
        "{} stays: {error:#}; correct this, then run this again",
        path.display()
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
    #[serde(default)]
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
        for name in SIGNATURES {
            self.xattrs.remove(name);
        }
        self
    }

    fn give(&self, file: &File) -> io::Result<()> {
        fchown(file, Some(self.uid), Some(self.gid))?;
        file.set_permissions(Permissions::from_mode(self.mode))?;
        for (name, digits) in &self.xattrs {
            let mut value = Vec::new();
            for at in (0..digits.len()).step_by(2) {
                let byte = digits
                    .get(at..at + 2)
                    .and_then(|pair| u8::from_str_radix(pair, 16).ok());
                value.push(byte.ok_or(ErrorKind::InvalidData)?);
            }
            fsetxattr(file, name.as_str(), &value, XattrFlags::empty())?;
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
        if let Ok(name) = CStr::from_bytes_with_nul(name)
            && let Ok(name) = name.to_str()
        {
            let length = fgetxattr(file, name, &mut value)?;
            xattrs.insert(name.to_owned(), digits_of(&value[..length]));
        }
    }
    Ok(xattrs)
}

/// Two hexadecimal digits for each byte.
pub fn digits_of(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The folders for root's private copies. The root of an image may lack the first ones.
const PRIVATE: [&str; 3] = ["/run", "/var/lib", "/"];

const PREFIX: &str = ".bindguard-";

/// The prefix of this process's files.
fn prefix() -> String {
    format!("{PREFIX}{}-", process::id())
}

/// A folder of this process for copies of files that may have secrets, which no other user can
/// read. Removes what killed processes left.
///
/// # Errors
/// If no such folder can be made.
pub fn private_folder() -> io::Result<TempDir> {
    let mut parents = PRIVATE.map(PathBuf::from).to_vec();
    if !is_root() {
        parents = vec![env::temp_dir()];
    }
    let prefix = prefix();
    let mut failed = ErrorKind::NotFound.into();
    for parent in parents {
        sweep(&parent);
        let mut builder = Builder::new();
        builder.prefix(&prefix);
        builder.permissions(Permissions::from_mode(0o700));
        match builder.tempdir_in(parent) {
            Ok(folder) => return Ok(folder),
            Err(error) => failed = error,
        }
    }
    Err(failed)
}

/// Removes the private copies of processes that have ended.
pub fn sweep_private() {
    for folder in PRIVATE {
        sweep(Path::new(folder));
    }
}

/// Removes the files and private folders of processes that have ended from a folder.
pub fn sweep(folder: &Path) {
    for entry in folder.read_dir().into_iter().flatten().flatten() {
        if let Some(name) = entry.file_name().to_str()
            && let Some(name) = name.strip_prefix(PREFIX)
            && let Some((pid, _)) = name.split_once('-')
            && let Ok(pid) = pid.parse::<u32>()
            && pid != process::id()
            && fs::symlink_metadata(format!("/proc/{pid}")).is_err()
        {
            // the next sweep tries again
            let _ = match entry.file_type() {
                Ok(kind) if kind.is_dir() => fs::remove_dir_all(entry.path()),
                _ => fs::remove_file(entry.path()),
            };
        }
    }
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
        let change = Change::text(Owner::Docker, &link, "a = 1\nb = 3\n".to_owned()).unwrap();
        let diff = change.diff().unwrap();
        assert!(
            diff.contains("\n-b = 2\n+b = 3\n") && diff.contains("+++ "),
            "{diff}"
        );
        change.apply(None).unwrap();
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
        let change = Change::text(Owner::Docker, &file, "new".to_owned()).unwrap();
        fs::write(&file, "somebody else's").unwrap();
        assert!(
            change
                .apply(None)
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
