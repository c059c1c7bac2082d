//! Symlinks that may have led to a directory which is gone.
//!
//! A pod's `subPath` may be a symlink: `current`, which leads to `releases/42`. The kubelet follows
//! the link and binds `releases/42`, and the mount shows only `releases/42`. A deployment may
//! remove `releases/42`, or a folder in it, and point `current` at `releases/43`. Then a kubelet
//! would bind `releases/43`. So a missing directory is not made again if a link on the way leads to
//! a sibling of the directory or of a parent.
//!
//! A link that was removed, or lies elsewhere in the volume, is not found.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, Dir, FileType, statat};
use rustix::io::Errno;

/// Limit of names to read; beyond it the search fails.
const NAMES: usize = 10_000;

/// The existing directories on the way to a missing directory, with their paths within the volume.
#[derive(Debug, Default)]
pub(crate) struct OnTheWay(Vec<(PathBuf, OwnedFd)>);

impl OnTheWay {
    /// Adds a directory below the deepest directory.
    pub(crate) fn push(&mut self, path: PathBuf, directory: OwnedFd) {
        self.0.push((path, directory));
    }

    /// The directory that was added last.
    pub(crate) fn deepest(&self) -> Option<&OwnedFd> {
        self.0.last().map(|(_, directory)| directory)
    }

    /// Finds a link that leads away from the path, to another name in a directory on the way.
    /// `volume` is the path of the volume's root.
    ///
    /// # Errors
    /// getdents(2)'s and readlink(2)'s; `E2BIG` when there are too many names to read.
    pub(crate) fn link_beside(&self, volume: &Path) -> Result<Option<PathBuf>, Errno> {
        let mut names = 0;
        for (path, directory) in &self.0 {
            for entry in Dir::read_from(directory)? {
                let entry = entry?;
                names += 1;
                if names > NAMES {
                    return Err(Errno::TOOBIG);
                }
                if !matches!(entry.file_type(), FileType::Symlink | FileType::Unknown) {
                    continue;
                }
                let target = match rustix::fs::readlinkat(directory, entry.file_name(), Vec::new())
                {
                    Ok(target) => target,
                    // It is no link, or went away.
                    Err(Errno::INVAL | Errno::NOENT) => continue,
                    Err(errno) => return Err(errno),
                };
                let target = Path::new(OsStr::from_bytes(target.as_bytes()));
                if within(volume, path, target).is_some_and(|target| self.are_left_for(&target)) {
                    return Ok(Some(
                        path.join(OsStr::from_bytes(entry.file_name().to_bytes())),
                    ));
                }
            }
        }
        Ok(None)
    }

    /// True if `target` is an entry directly below a watched directory. The entry may be missing,
    /// as a release that is put in place later. A file is nothing that a directory was bound
    /// through.
    fn are_left_for(&self, target: &Path) -> bool {
        let held = |path: &Path| {
            self.0
                .iter()
                .find(|(known, _)| known == path)
                .map(|(_, directory)| directory)
        };
        let Some((parent, name)) = target.parent().and_then(held).zip(target.file_name()) else {
            return false;
        };
        let kind = || {
            Some(FileType::from_raw_mode(
                statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)
                    .ok()?
                    .st_mode,
            ))
        };
        held(target).is_none() && kind() != Some(FileType::RegularFile)
    }
}

/// The target of a link in a directory of the volume, as a path within the volume; `None` if it is
/// outside.
fn within(volume: &Path, directory: &Path, target: &Path) -> Option<PathBuf> {
    let (mut path, target) = match target.strip_prefix(volume) {
        Ok(below) if target.is_absolute() => (PathBuf::new(), below),
        _ if target.is_absolute() => return None,
        _ => (directory.to_owned(), target),
    };
    for component in target.components() {
        match component {
            Component::Normal(name) => path.push(name),
            Component::ParentDir => path.pop().then_some(())?,
            Component::CurDir => {}
            Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    Some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_is_followed_by_its_words() {
        let leads = |directory: &str, target: &str| {
            within("/v".as_ref(), directory.as_ref(), target.as_ref())
                .map(|path| path.display().to_string())
        };
        assert_eq!(leads("", "releases/43").as_deref(), Some("releases/43"));
        assert_eq!(
            leads("a", "../releases/./43").as_deref(),
            Some("releases/43")
        );
        assert_eq!(leads("a", "/v/releases/43").as_deref(), Some("releases/43"));
        assert_eq!((leads("", "../etc"), leads("a", "/etc")), (None, None));
    }
}
