//! Walks a path of the host name by name, and shows every folder and symlink on the way.
//!
//! A single call that resolves a path shows only the end of the path. Each folder of this walk
//! stays open, so owners, modes and places belong to the very folders in which the names were
//! looked up. `..` leads to the folder before, as the walk came from there.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use bindguard_core::refresh::{Found, LookUp};
use rustix::fs::{FileType, OFlags, Statx, StatxFlags};
use rustix::io::Errno;

use crate::handle::{Handle, has, open_folder, open_name, statx_of, type_in};
use crate::{Failure, failed};

/// Limit of symlinks on a way: the kernel's limit, path_resolution(7).
const MAX_LINKS: usize = 40;

/// Limit of look-ups on one way: each keeps a descriptor, and the target of a symlink can name
/// 2,000 folders.
const MAX_LOOK_UPS: usize = 256;

/// A folder of a walk.
#[derive(Debug)]
pub struct WalkedFolder {
    pub handle: Handle,
    pub owner: u32,
    pub mode: u32,
    /// The time since 1970 at which the folder was made; `None` on a filesystem without birth
    /// times.
    pub born: Option<Duration>,
    mount: u64,
}

/// A walk, with its folders open.
#[derive(Debug, Default)]
pub struct HostWalk {
    pub folders: Vec<WalkedFolder>,
    /// The look-ups, in their order.
    pub look_ups: Vec<LookUp>,
    /// The index of the folder in which the last name of the path itself was looked up; none if the
    /// walk ended before.
    pub named_in: Option<usize>,
    /// The file or folder at the end; none if nothing has that name, or something is mounted on the
    /// file.
    pub end: Option<Handle>,
    /// The path without symlinks. Its last names may be missing.
    pub place: PathBuf,
    /// The time since 1970 at which the newest symlink on the way was changed; `None` without a
    /// symlink.
    pub newest_link: Option<Duration>,
}

/// Walks an absolute path from the root of this process.
///
/// # Errors
/// If the kernel refuses a step, or there are too many symlinks or names. A missing name is no
/// error.
pub fn walk_host_path(path: &Path) -> Result<HostWalk, Failure> {
    walk_in("/", path, &|_| true)
}

/// Walks a path from the root of another process. The symlinks of that root lead into that root.
/// `is_local` is true for the id of a mount in which no server or daemon has to answer a look-up.
///
/// # Errors
/// As [`walk_host_path`], and if the process has ended, or a server would have to answer.
pub fn walk_path_of_process(
    pid: u32,
    path: &Path,
    is_local: &dyn Fn(u64) -> bool,
) -> Result<HostWalk, Failure> {
    walk_in(&format!("/proc/{pid}/root"), path, is_local)
}

fn walk_in(root: &str, path: &Path, is_local: &dyn Fn(u64) -> bool) -> Result<HostWalk, Failure> {
    // The kernel's own link to the root of a process has to be followed.
    let root = open_folder(root).and_then(|root| Ok((stat(&root)?, root)));
    let (root_stat, root) = root.map_err(failed("open", Path::new("/")))?;
    let mut walk = HostWalk {
        folders: vec![folder(root, "/".into(), &root_stat)],
        place: "/".into(),
        ..HostWalk::default()
    };
    // The folders from `/` to the present folder.
    let mut at = vec![0];
    let mut links = 0;
    let mut names = VecDeque::new();
    add_target(&mut names, path);
    while let Some(name) = names.pop_front() {
        if name == "/" || name == ".." {
            let depth = if name == "/" { 1 } else { at.len() - 1 };
            at.truncate(depth.max(1));
            let above = &walk.folders[at[at.len() - 1]];
            walk.place = above.handle.path().to_owned();
            continue;
        }
        let here = at[at.len() - 1];
        let is_last = names.is_empty();
        // Later the last name belongs to a symlink's target.
        if is_last && walk.named_in.is_none() {
            walk.named_in = Some(here);
        }
        let parent = &walk.folders[here];
        let path = parent.handle.path().join(&name);
        if walk.look_ups.len() == MAX_LOOK_UPS {
            return Err(failed("open", &path)(Errno::LOOP));
        }
        if !is_local(parent.mount) {
            return Err(failed("open", &path)(Errno::AGAIN));
        }
        walk.place.clone_from(&path);
        let opened = open(&parent.handle, &name, is_last)
            .and_then(|opened| Ok(Some((stat(&opened)?, opened))));
        let opened = match opened {
            Err(Errno::NOENT) => None,
            opened => opened.map_err(failed("open", &path))?,
        };
        let kind = opened.as_ref().map(|(stat, _)| type_in(stat));
        let found = match (kind, opened) {
            (Some(FileType::Directory), Some((stat, opened))) => {
                if is_last {
                    let end = opened.try_clone().map_err(failed("open", &path))?;
                    walk.end = Some(Handle::from_fd(end, path.clone()));
                }
                let child = walk.folders.len();
                walk.folders.push(folder(opened, path, &stat));
                at.push(child);
                Found::Folder(child)
            }
            (Some(FileType::Symlink), Some((stat, opened))) => {
                links += 1;
                if links > MAX_LINKS {
                    return Err(failed("open", &path)(Errno::LOOP));
                }
                let seconds = u64::try_from(stat.stx_ctime.tv_sec).unwrap_or(0);
                let changed = Duration::new(seconds, stat.stx_ctime.tv_nsec);
                walk.newest_link = walk.newest_link.max(Some(changed));
                let target = rustix::fs::readlinkat(&opened, "", Vec::new())
                    .map_err(failed("open", &path))?;
                walk.place = parent.handle.path().to_owned();
                let target = OsString::from_vec(target.into_bytes());
                add_target(&mut names, Path::new(&target));
                Found::Link {
                    owner: stat.stx_uid,
                }
            }
            (_, Some((stat, _))) if is_last && stat.stx_mnt_id != parent.mount => Found::MountPoint,
            (_, Some((_, opened))) if is_last => {
                walk.end = Some(Handle::from_fd(opened, path));
                Found::File
            }
            _ => Found::Missing,
        };
        let goes_on = matches!(found, Found::Folder(_) | Found::Link { .. });
        walk.look_ups.push(LookUp {
            folder: here,
            name,
            found,
        });
        if !goes_on {
            break;
        }
    }
    for name in names {
        if name != ".." {
            walk.place.push(name);
        }
    }
    Ok(walk)
}

fn add_target(names: &mut VecDeque<OsString>, target: &Path) {
    for component in target.components().rev() {
        if component != Component::CurDir {
            names.push_front(component.as_os_str().to_owned());
        }
    }
}

fn folder(opened: OwnedFd, path: PathBuf, stat: &Statx) -> WalkedFolder {
    let born = u64::try_from(stat.stx_btime.tv_sec)
        .ok()
        .filter(|_| has(stat, StatxFlags::BTIME));
    WalkedFolder {
        handle: Handle::from_fd(opened, path),
        owner: stat.stx_uid,
        mode: stat.stx_mode.into(),
        born: born.map(|seconds| Duration::new(seconds, stat.stx_btime.tv_nsec)),
        mount: stat.stx_mnt_id,
    }
}

/// Opens a name itself. O_DIRECTORY mounts what autofs(5) mounts on demand, as the runtime's own
/// walk did.
fn open(folder: &Handle, name: &OsStr, is_last: bool) -> Result<OwnedFd, Errno> {
    if !is_last {
        match open_name(folder, name, OFlags::DIRECTORY) {
            Err(Errno::NOTDIR | Errno::LOOP) => {}
            opened => return opened,
        }
    }
    open_name(folder, name, OFlags::empty())
}

fn stat(file: &OwnedFd) -> Result<Statx, Errno> {
    let wanted = StatxFlags::TYPE | StatxFlags::MODE | StatxFlags::UID;
    let times = StatxFlags::BTIME | StatxFlags::CTIME;
    statx_of(file, wanted | times | StatxFlags::MNT_ID)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::os::unix::fs::symlink;
    use std::{fs, io};

    use super::*;

    /// The names that were looked up below the folder of the test, and their results.
    fn walked(root: &Path, path: &str) -> (String, bool) {
        let walk = walk_host_path(&root.join(path)).unwrap();
        let of_test = walk.look_ups.iter().skip(root.components().count() - 1);
        let words = of_test.map(|LookUp { name, found, .. }| {
            let found = match found {
                Found::Folder(_) => "/",
                Found::Link { .. } => "@",
                Found::File => "",
                Found::MountPoint => "!",
                Found::Missing => "?",
            };
            format!("{}{found}", name.to_string_lossy())
        });
        let words: Vec<String> = words.collect();
        (words.join(" "), walk.end.is_some())
    }

    #[test]
    fn every_folder_and_link_is_seen() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        fs::create_dir_all(root.join("a/b")).unwrap();
        fs::write(root.join("a/b/file"), "").unwrap();
        symlink("a/b", root.join("link")).unwrap();
        symlink("../../a/./b/../b/file", root.join("a/b/up")).unwrap();
        symlink(root.join("a"), root.join("absolute")).unwrap();
        symlink("loop", root.join("loop")).unwrap();
        for (path, names, is_there) in [
            ("a/b/file", "a/ b/ file", true),
            ("link/file", "link@ a/ b/ file", true),
            ("a/b/up", "a/ b/ up@ a/ b/ b/ file", true),
            ("a/../a/b/file", "a/ a/ b/ file", true),
            ("a/b", "a/ b/", true),
            ("a/b/gone", "a/ b/ gone?", false),
            ("a/b/file/x", "a/ b/ file?", false),
        ] {
            assert_eq!(walked(root, path), (names.to_owned(), is_there), "{path}");
        }
        assert!(walk_host_path(&root.join("loop")).is_err());
        assert!(walked(root, "absolute/b/file").0.ends_with("b/ file"));
        symlink("../file", root.join("a/up")).unwrap();
        symlink("b/file", root.join("a/down")).unwrap();
        assert_eq!(walked(root, "a/up"), ("a/ up@ file?".to_owned(), false));
        let walk = walk_host_path(&root.join("a/down")).unwrap();
        let named_in = &walk.folders[walk.named_in.unwrap()];
        assert_eq!(named_in.handle.path(), root.join("a"));
        assert!(
            named_in.born.is_some(),
            "the filesystem of the tests records when a folder was made"
        );
    }

    /// A container that can write a folder on the way could take all descriptors of the agent.
    #[test]
    fn a_long_target_of_a_link_takes_few_descriptors() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        fs::create_dir(root.join("a")).unwrap();
        symlink("a/../".repeat(200) + "a", root.join("short")).unwrap();
        assert!(walked(root, "short").1);
        symlink("a/../".repeat(800) + "a", root.join("long")).unwrap();
        let error = walk_host_path(&root.join("long")).unwrap_err();
        assert_eq!(error.source.kind(), io::Error::from(Errno::LOOP).kind());
    }
}
