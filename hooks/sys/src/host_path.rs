//! Walks a path of the host name by name, and shows every folder and symlink on the way.
//!
//! A single call that resolves a path shows only the end of the path. Each folder of this walk
//! stays open, so owners, modes and places belong to the very folders in which the names were
//! looked up. `..` leads to the folder before, as the walk came from there.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use bindguard_core::refresh::{Found, LookUp};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, Statx, StatxFlags};
use rustix::io::Errno;

use crate::handle::Handle;

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
}

/// A walk, with its folders open.
#[derive(Debug)]
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

/// Why a path could not be walked.
#[derive(Debug, thiserror::Error)]
#[error("open {}", path.display())]
pub struct WalkError {
    /// The path of the name.
    pub path: PathBuf,
    #[source]
    pub source: io::Error,
}

/// Walks an absolute path from the root of this process.
///
/// # Errors
/// If the kernel refuses a step, or there are too many symlinks or names. A missing name is no
/// error.
pub fn walk_host_path(path: &Path) -> Result<HostWalk, WalkError> {
    let root = rustix::fs::openat(CWD, "/", FOLDER, Mode::empty());
    walk_in(root, path, &|_| true)
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
) -> Result<HostWalk, WalkError> {
    // The kernel's own link to the root has to be followed.
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::openat(CWD, format!("/proc/{pid}/root"), flags, Mode::empty());
    walk_in(root, path, is_local)
}

fn walk_in(
    root: Result<OwnedFd, Errno>,
    path: &Path,
    is_local: &dyn Fn(u64) -> bool,
) -> Result<HostWalk, WalkError> {
    let root = root
        .and_then(|root| Walking::of(root, "/".into()))
        .map_err(|errno| failed(Path::new("/"), errno))?;
    let mut walk = HostWalk {
        folders: vec![root],
        look_ups: Vec::new(),
        named_in: None,
        end: None,
        place: "/".into(),
        newest_link: None,
    };
    let mut walking = Walking {
        at: vec![0],
        names: VecDeque::new(),
        links: 0,
        is_local,
    };
    walking.add_target(path.as_os_str());
    walking.run(&mut walk)?;
    Ok(walk)
}

const FOLDER: OFlags = OFlags::PATH
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);
const ANY: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

#[derive(Debug)]
enum Next {
    Root,
    Parent,
    Name(OsString),
}

/// The state of a walk.
struct Walking<'l> {
    /// The folders from `/` to the present folder.
    at: Vec<usize>,
    names: VecDeque<Next>,
    links: usize,
    is_local: &'l dyn Fn(u64) -> bool,
}

impl Walking<'_> {
    fn add_target(&mut self, target: &OsStr) {
        for component in Path::new(target).components().rev() {
            match component {
                Component::RootDir | Component::Prefix(_) => self.names.push_front(Next::Root),
                Component::ParentDir => self.names.push_front(Next::Parent),
                Component::Normal(name) => self.names.push_front(Next::Name(name.to_owned())),
                Component::CurDir => {}
            }
        }
    }

    fn run(&mut self, walk: &mut HostWalk) -> Result<(), WalkError> {
        while let Some(next) = self.names.pop_front() {
            match next {
                Next::Root => {
                    self.at.truncate(1);
                    walk.place = "/".into();
                }
                Next::Parent => {
                    self.at.truncate(self.at.len().saturating_sub(1).max(1));
                    walk.place = walk.folders[self.here()].handle.path().to_owned();
                }
                Next::Name(name) => {
                    // Later the last name belongs to a symlink's target.
                    if self.names.is_empty() && walk.named_in.is_none() {
                        walk.named_in = Some(self.here());
                    }
                    if !self.look_up(walk, name)? {
                        break;
                    }
                }
            }
        }
        for next in self.names.drain(..) {
            if let Next::Name(name) = next {
                walk.place.push(name);
            }
        }
        Ok(())
    }

    fn here(&self) -> usize {
        self.at.last().copied().unwrap_or(0)
    }

    /// Looks a name up. Returns false if the walk ends here.
    fn look_up(&mut self, walk: &mut HostWalk, name: OsString) -> Result<bool, WalkError> {
        let folder = self.here();
        let parent = &walk.folders[folder];
        let path = parent.handle.path().join(&name);
        if walk.look_ups.len() == MAX_LOOK_UPS {
            return Err(failed(&path, Errno::LOOP));
        }
        let mount = mount_of(&parent.handle).map_err(|errno| failed(&path, errno))?;
        if !(self.is_local)(mount) {
            return Err(failed(&path, Errno::AGAIN));
        }
        walk.place.clone_from(&path);
        let is_last = self.names.is_empty();
        let opened = open(&parent.handle, &name, is_last);
        let opened = opened.and_then(|opened| Ok((stat(&opened)?, opened)));
        let (stat, opened) = match opened {
            Ok(opened) => opened,
            Err(Errno::NOENT) => {
                walk.look_ups.push(LookUp {
                    folder,
                    name,
                    found: Found::Missing,
                });
                return Ok(false);
            }
            Err(errno) => return Err(failed(&path, errno)),
        };
        let is_mount_point = stat.stx_mnt_id != mount;
        let (found, goes_on) = match FileType::from_raw_mode(stat.stx_mode.into()) {
            FileType::Directory => {
                let child = walk.folders.len();
                if is_last {
                    let end = rustix::io::fcntl_dupfd_cloexec(&opened, 0)
                        .map_err(|errno| failed(&path, errno))?;
                    walk.end = Some(Handle::from_fd(end, path.clone()));
                }
                walk.folders.push(Self::folder(opened, path, &stat));
                self.at.push(child);
                (Found::Folder(child), true)
            }
            FileType::Symlink => {
                self.links += 1;
                if self.links > MAX_LINKS {
                    return Err(failed(&path, Errno::LOOP));
                }
                let seconds = u64::try_from(stat.stx_ctime.tv_sec).unwrap_or(0);
                let changed = Duration::new(seconds, stat.stx_ctime.tv_nsec);
                walk.newest_link = walk.newest_link.max(Some(changed));
                let target = rustix::fs::readlinkat(&opened, "", Vec::new())
                    .map_err(|errno| failed(&path, errno))?;
                walk.place = parent.handle.path().to_owned();
                self.add_target(&OsString::from_vec(target.into_bytes()));
                (
                    Found::Link {
                        owner: stat.stx_uid,
                    },
                    true,
                )
            }
            _ if !is_last => (Found::Missing, false),
            _ if is_mount_point => (Found::MountPoint, false),
            _ => {
                walk.end = Some(Handle::from_fd(opened, path));
                (Found::File, false)
            }
        };
        walk.look_ups.push(LookUp {
            folder,
            name,
            found,
        });
        Ok(goes_on)
    }

    fn of(opened: OwnedFd, path: PathBuf) -> Result<WalkedFolder, Errno> {
        let stat = stat(&opened)?;
        Ok(Self::folder(opened, path, &stat))
    }

    fn folder(opened: OwnedFd, path: PathBuf, stat: &Statx) -> WalkedFolder {
        let is_known = StatxFlags::from_bits_retain(stat.stx_mask).contains(StatxFlags::BTIME);
        let seconds = u64::try_from(stat.stx_btime.tv_sec)
            .ok()
            .filter(|_| is_known);
        WalkedFolder {
            handle: Handle::from_fd(opened, path),
            owner: stat.stx_uid,
            mode: stat.stx_mode.into(),
            born: seconds.map(|seconds| Duration::new(seconds, stat.stx_btime.tv_nsec)),
        }
    }
}

/// Opens a name itself. O_DIRECTORY mounts what autofs(5) mounts on demand, as the runtime's own
/// walk did.
fn open(folder: &Handle, name: &OsStr, is_last: bool) -> Result<OwnedFd, Errno> {
    if !is_last {
        match rustix::fs::openat(folder, name, FOLDER, Mode::empty()) {
            Err(Errno::NOTDIR | Errno::LOOP) => {}
            opened => return opened,
        }
    }
    rustix::fs::openat(folder, name, ANY, Mode::empty())
}

fn stat(file: impl AsFd) -> Result<Statx, Errno> {
    let wanted = StatxFlags::TYPE
        | StatxFlags::MODE
        | StatxFlags::UID
        | StatxFlags::BTIME
        | StatxFlags::CTIME
        | StatxFlags::MNT_ID;
    rustix::fs::statx(
        file,
        "",
        AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC,
        wanted,
    )
}

fn mount_of(file: impl AsFd) -> Result<u64, Errno> {
    Ok(stat(file)?.stx_mnt_id)
}

fn failed(path: &Path, errno: Errno) -> WalkError {
    WalkError {
        path: path.to_owned(),
        source: errno.into(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::fs;
    use std::os::unix::fs::symlink;

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
