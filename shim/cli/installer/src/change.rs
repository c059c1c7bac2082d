//! The current and the planned content of a file or link.
//!
//! The new content is written beside the file and renamed over it, with the same mode and owner: a
//! reader sees the old bytes or the new bytes. The file is read again just before: an editor or a
//! configuration tool may have changed it since the diff was shown.

use std::fs::{self, Metadata, OpenOptions, Permissions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, ensure};
use bindguard_sys::make_folders;
use rustix::fs::OFlags;
use similar::TextDiff;

use crate::attributes::Attributes;
use crate::scratch;

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
        let change = Self {
            before: content(&path)?,
            path,
            after: after.map(Content::File),
            attributes,
        };
        change.check_links()?;
        Ok(change)
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

    /// Refuses the edit of a file with a second hard link: a rename would separate the names, and
    /// readers see an edit in place half-way.
    fn check_links(&self) -> Result<()> {
        let (Some(Content::File(before)), Some(Content::File(after))) = (&self.before, &self.after)
        else {
            return Ok(());
        };
        let links = self
            .path
            .symlink_metadata()
            .map_or(1, |found| found.nlink());
        ensure!(
            before == after || links == 1,
            "edit {}: the file has {links} names (hard links), and an edit would separate them; replace it by a copy of its own",
            self.path.display()
        );
        Ok(())
    }

    /// Refuses a change in a folder that cannot be written, such as a folder on a read-only file
    /// system.
    pub fn check_writable(&self) -> Result<()> {
        let folder = nearest(self.path.parent().unwrap_or(&self.path));
        rustix::fs::access(folder, rustix::fs::Access::WRITE_OK)
            .map_err(std::io::Error::from)
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

    /// Applies the change.
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
            Some(Content::File(bytes)) => {
                self.check_links()?;
                write(&self.path, bytes, &self.attributes)
            }
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
    scratch::sweep(beside);
    let mut file =
        scratch::with_builder(|builder| builder.tempfile_in(beside)).with_context(doing)?;
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
    let link =
        scratch::with_builder(|builder| builder.make_in(folder, |link| symlink(target, link)))
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

#[cfg(test)]
mod tests {
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
}
