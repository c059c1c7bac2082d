//! A reference to a file that does not open its content: `O_PATH`, see open(2).

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, OnceLock};
use std::{fs, io};

use bindguard_core::evidence::{FileIdentity, FileKind};
use bindguard_core::mount_table::{FsType, MountId};
use bindguard_core::text::climbs;
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Statx, StatxAttributes, StatxFlags,
};
use rustix::io::Errno;
use rustix::path::Arg;

use crate::{Failure, failed};

/// statx(2)'s `STATX_MNT_ID_UNIQUE`: the kernel never reuses this id.
const UNIQUE_MOUNT_ID: StatxFlags = StatxFlags::from_bits_retain(0x4000);

/// The attributes that cannot change while a descriptor is open.
const LASTING: StatxFlags = UNIQUE_MOUNT_ID
    .union(StatxFlags::TYPE)
    .union(StatxFlags::INO);

/// An `O_PATH` descriptor. While a handle is open, the mount under the path keeps its id.
#[derive(Debug)]
pub struct Handle {
    fd: OwnedFd,
    path: PathBuf,
    /// No link was followed: the kernel's own path is the same.
    is_as_written: bool,
    /// Its mount is read from the kernel's own tables, because its filesystem may query a server.
    is_unqueried: bool,
    /// Read once.
    lasting: OnceLock<Statx>,
}

impl Handle {
    /// Opens the file that `path` leads to; follows a final symlink.
    ///
    /// # Errors
    /// open(2)'s.
    pub fn follow(path: &Path) -> Result<Self, Failure> {
        Self::open(path, OFlags::empty())
    }

    /// Opens `path` itself; does not follow a final symlink.
    ///
    /// # Errors
    /// open(2)'s.
    pub fn of(path: &Path) -> Result<Self, Failure> {
        Self::open(path, OFlags::NOFOLLOW)
    }

    /// Opens `path` itself, and records if it has no symlink: then its
    /// [`resolved_path`](Handle::resolved_path) needs no readlink(2). `path` has no `..` in it.
    ///
    /// # Errors
    /// open(2)'s.
    pub(crate) fn as_written(path: &Path) -> Result<Self, Failure> {
        match open_resolved(path, OFlags::NOFOLLOW, ResolveFlags::NO_SYMLINKS) {
            Ok(fd) => Ok(Self::of_written(fd, path)),
            Err(Errno::NOENT) => Err(failed("open", path)(Errno::NOENT)),
            // A symlink, or a kernel or a seccomp filter that does not know the call.
            Err(_) => Self::of(path),
        }
    }

    /// Opens the file that an absolute path leads to, a final symlink followed, if the kernel has
    /// the whole path in its cache: openat2(2), `RESOLVE_CACHED`.
    ///
    /// # Errors
    /// `WouldBlock` if a disk, a server or a daemon would have to answer; otherwise the kernel's
    /// error, which is certain.
    pub fn cached(path: &Path) -> io::Result<Self> {
        // Most paths have no link in them. Then readlink(2) is not needed for the kernel's own
        // path.
        if !climbs(path) {
            let resolve = ResolveFlags::CACHED | ResolveFlags::NO_SYMLINKS;
            match open_resolved(path, OFlags::empty(), resolve) {
                Ok(fd) => return Ok(Self::of_written(fd, path)),
                Err(Errno::NOENT) => return Err(Errno::NOENT.into()),
                Err(_) => {}
            }
        }
        let fd = open_resolved(path, OFlags::empty(), ResolveFlags::CACHED)?;
        Ok(Self::from_fd(fd, path.to_owned()))
    }

    /// True if the kernel's cache shows that no symlink is on the way to `path`, or that `path`
    /// does not exist.
    pub fn has_one_name(path: &Path) -> bool {
        let resolve = ResolveFlags::CACHED | ResolveFlags::NO_SYMLINKS;
        match open_resolved(path, OFlags::empty(), resolve) {
            Ok(_) => !climbs(path),
            Err(errno) => errno == Errno::NOENT,
        }
    }

    fn open(path: &Path, flags: OFlags) -> Result<Self, Failure> {
        let fd = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC | flags, Mode::empty())
            .map_err(failed("open", path))?;
        Ok(Self::from_fd(fd, path.to_owned()))
    }

    pub(crate) fn from_fd(fd: OwnedFd, path: PathBuf) -> Self {
        Self {
            fd,
            path,
            is_as_written: false,
            is_unqueried: false,
            lasting: OnceLock::new(),
        }
    }

    fn of_written(fd: OwnedFd, path: &Path) -> Self {
        Self {
            is_as_written: true,
            ..Self::from_fd(fd, path.to_owned())
        }
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The id of the mount that it is on, as mountinfo has it. Valid while this handle is open.
    ///
    /// # Errors
    /// statx(2)'s, and a kernel that is too old.
    pub fn mount_id(&self) -> Result<MountId, Failure> {
        let id = if self.is_unqueried() {
            // The kernel's table of open files, proc_pid_fdinfo(5).
            let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", self.fd.as_raw_fd()))
                .map_err(failed("stat", &self.path))?;
            let id = info.lines().find_map(|line| line.strip_prefix("mnt_id:"));
            id.and_then(|id| id.trim().parse().ok())
        } else {
            let stat = self.statx(StatxFlags::MNT_ID)?;
            let id = u32::try_from(stat.stx_mnt_id).ok();
            id.filter(|_| has(&stat, StatxFlags::MNT_ID))
        };
        id.map(MountId).ok_or_else(|| self.too_old("ids of mounts"))
    }

    /// The id of the mount that it is on, as statmount(2) takes it. `None` before Linux 6.8, and if
    /// statx(2) fails.
    pub(crate) fn unique_mount_id(&self) -> Option<u64> {
        unique_id_in(self.lasting().ok()?)
    }

    /// True if the file is the root of its mount: the path is a mount point.
    ///
    /// # Errors
    /// statx(2)'s, and a kernel that is too old.
    pub fn is_mount_root(&self) -> Result<bool, Failure> {
        let stat = self.lasting()?;
        match stat
            .stx_attributes_mask
            .contains(StatxAttributes::MOUNT_ROOT)
        {
            true => Ok(stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT)),
            false => Err(self.too_old("roots of mounts")),
        }
    }

    /// The identity of the file. Uses cached attributes instead of waiting for a server.
    ///
    /// # Errors
    /// statx(2)'s.
    pub fn identity(&self) -> Result<FileIdentity, Failure> {
        self.lasting().map(identity_in)
    }

    /// The identity of a name in a directory, if it is no symlink and is on the same mount as this
    /// handle. `None` otherwise, if statx(2) fails, and before Linux 6.8.
    pub(crate) fn identity_on_same_mount(
        &self,
        directory: impl AsFd,
        name: &Path,
    ) -> Option<FileIdentity> {
        let mount = self.unique_mount_id()?;
        let file = statx_of_name(directory, name, LASTING).ok()?;
        let is_on_it = unique_id_in(&file) == Some(mount) && type_in(&file) != FileType::Symlink;
        is_on_it.then(|| identity_in(&file))
    }

    /// True if the file itself is a symlink.
    ///
    /// # Errors
    /// statx(2)'s.
    pub(crate) fn is_symlink(&self) -> Result<bool, Failure> {
        Ok(type_in(self.lasting()?) == FileType::Symlink)
    }

    /// The path that it was opened by, if the kernel's own path is known to be the same.
    pub fn path_as_written(&self) -> Option<&Path> {
        self.is_as_written.then_some(&self.path)
    }

    /// The kernel's own path of it, symlinks resolved. Not usable for a deleted file.
    ///
    /// # Errors
    /// readlink(2)'s.
    pub fn resolved_path(&self) -> io::Result<PathBuf> {
        match self.path_as_written() {
            Some(path) => Ok(path.to_owned()),
            None => fs::read_link(self.magic_path()),
        }
    }

    fn lasting(&self) -> Result<&Statx, Failure> {
        if let Some(lasting) = self.lasting.get() {
            return Ok(lasting);
        }
        let lasting = self.statx(LASTING)?;
        Ok(self.lasting.get_or_init(|| lasting))
    }

    fn statx(&self, mask: StatxFlags) -> Result<Statx, Failure> {
        statx_of(&self.fd, mask).map_err(failed("stat", &self.path))
    }

    fn too_old(&self, fact: &str) -> Failure {
        let why = format!("this kernel does not report {fact}: it is too old");
        failed("stat", &self.path)(io::Error::new(ErrorKind::Unsupported, why))
    }

    /// A path that leads to this very file and mount, whatever its name leads to by now:
    /// proc_pid_fd(5).
    pub(crate) fn magic_path(&self) -> PathBuf {
        Self::link_of(&self.fd)
    }

    /// The same for any descriptor.
    pub(crate) fn link_of(descriptor: &impl AsRawFd) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", descriptor.as_raw_fd()))
    }

    /// The same file, but its mount is read from the kernel's own tables if a filesystem of this
    /// kernel may query a server. That is slower.
    #[must_use]
    pub fn unqueried(self) -> Self {
        Self {
            is_unqueried: true,
            ..self
        }
    }

    /// True if its filesystem may query a server before it answers.
    pub(crate) fn is_unqueried(&self) -> bool {
        self.is_unqueried && *HAS_QUERYING_FILESYSTEM
    }

    /// True if the path of the file is `mount_point`: the file is the root of the mount there.
    pub(crate) fn is_at(&self, mount_point: &Path) -> bool {
        self.resolved_path().is_ok_and(|resolved| {
            // The kernel appends this to the path of a deleted file that a mount still shows.
            let deleted = resolved.as_os_str().as_bytes().strip_suffix(b" (deleted)");
            resolved == mount_point || deleted == Some(mount_point.as_os_str().as_bytes())
        })
    }

    /// The kind of the file, without a query to the filesystem.
    ///
    /// # Errors
    /// open(2)'s.
    pub(crate) fn kind(&self) -> Result<FileKind, Failure> {
        match Self::open(&self.magic_path(), OFlags::DIRECTORY) {
            Ok(_) => Ok(FileKind::Directory),
            Err(error) if error.source.kind() == ErrorKind::NotADirectory => Ok(FileKind::File),
            Err(error) => Err(error),
        }
    }
}

impl AsFd for Handle {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// True if this kernel has a filesystem that [queries its
/// server](FsType::queries_server_for_attributes) for attributes. Few nodes load these modules. A
/// single read(2) returns all of proc_filesystems(5).
static HAS_QUERYING_FILESYSTEM: LazyLock<bool> = LazyLock::new(|| {
    let mut known = [0; 4096];
    let length = File::open("/proc/filesystems").and_then(|mut file| file.read(&mut known));
    for line in String::from_utf8_lossy(&known[..length.unwrap_or(0)]).lines() {
        if let Some((_, name)) = line.split_once('\t')
            && FsType(name.to_owned()).queries_server_for_attributes()
        {
            return true;
        }
    }
    false
});

fn open_resolved(path: &Path, flags: OFlags, resolve: ResolveFlags) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::CLOEXEC | flags;
    rustix::fs::openat2(CWD, path, flags, Mode::empty(), resolve)
}

pub(crate) fn open_folder(path: impl Arg) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty())
}

/// Opens a name in a folder itself: no symlink is followed.
pub(crate) fn open_name(
    folder: impl AsFd,
    name: impl AsRef<Path>,
    more: OFlags,
) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC | more;
    rustix::fs::openat(folder, name.as_ref(), flags, Mode::empty())
}

/// Attributes of a name in a folder, without a query to a server.
pub(crate) fn statx_of_name(
    folder: impl AsFd,
    name: impl AsRef<Path>,
    wanted: StatxFlags,
) -> Result<Statx, Errno> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT | AtFlags::STATX_DONT_SYNC;
    rustix::fs::statx(folder, name.as_ref(), flags, wanted)
}

/// Attributes of an open file, without a query to its server.
pub(crate) fn statx_of(file: impl AsFd, wanted: StatxFlags) -> Result<Statx, Errno> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    rustix::fs::statx(file, c"", flags, wanted)
}

pub(crate) fn type_in(stat: &Statx) -> FileType {
    FileType::from_raw_mode(stat.stx_mode.into())
}

fn identity_in(stat: &Statx) -> FileIdentity {
    FileIdentity {
        device: rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor),
        inode: stat.stx_ino,
        kind: match type_in(stat) {
            FileType::Directory => FileKind::Directory,
            _ => FileKind::File,
        },
    }
}

/// The id of the mount that a file is on, as statmount(2) takes it. `None` before Linux 6.8.
pub(crate) fn unique_mount_id(file: impl AsFd) -> Option<u64> {
    unique_id_in(&statx_of(file, UNIQUE_MOUNT_ID).ok()?)
}

fn unique_id_in(stat: &Statx) -> Option<u64> {
    has(stat, UNIQUE_MOUNT_ID).then_some(stat.stx_mnt_id)
}

pub(crate) fn has(stat: &Statx, field: StatxFlags) -> bool {
    StatxFlags::from_bits_retain(stat.stx_mask).contains(field)
}

// Walks paths without waiting for a server or a daemon.
//
// Nearly always the kernel has the whole path in its cache and resolves it in a few microseconds:
// openat2(2), `RESOLVE_CACHED`. A name that the cache lacks may still be on a local filesystem.
// tmpfs, and so most of /run, caches no missing names, and a file that was not read since the node
// started is on a disk. So a walk goes to the end of the cached part, and one step further on a
// local filesystem. A second step could go through a link and lead anywhere.

/// Limit of walks to a path. A mount, an umount or a rename anywhere on the node ends a walk that
/// uses the cache alone (fs/namei.c, `LOOKUP_RCU`), as if the cache lacked a name.
const MAX_WALKS: usize = 4;

/// Opens the file that an absolute path leads to, a final symlink followed, if the walk needs no
/// answer from a server or a daemon. The file itself may be on a server.
///
/// # Errors
/// `WouldBlock` if the walk may have to wait; otherwise the kernel's error, which is certain.
pub fn open_without_waiting(path: &Path, is_local: impl Fn(&Handle) -> bool) -> io::Result<Handle> {
    let mut walked = walk(path, &is_local);
    for _ in 1..MAX_WALKS {
        match walked {
            Err(error) if error.kind() == ErrorKind::WouldBlock => walked = walk(path, &is_local),
            certain => return certain,
        }
    }
    walked
}

fn walk(path: &Path, is_local: impl Fn(&Handle) -> bool) -> io::Result<Handle> {
    match Handle::cached(path) {
        Err(error) if error.kind() == ErrorKind::WouldBlock => {
            one_step_more(path, is_local).unwrap_or(Err(error))
        }
        known => known,
    }
}

/// True if neither the walk to a path nor a call on its file can wait. Also true where the kernel
/// cannot detect that.
pub(crate) fn cannot_wait(path: &Path, is_local: impl Fn(&Handle) -> bool) -> bool {
    match open_without_waiting(path, &is_local) {
        Ok(handle) => is_local(&handle),
        Err(error) => error.kind() != ErrorKind::WouldBlock,
    }
}

/// Opens the first name that the cache lacks. `None` if that does not settle where the path leads.
///
/// A walk that uses the cache alone also ends at a symlink whose access time is due (`pick_link` of
/// fs/namei.c). Reading the symlink sets that time: the next walk goes on.
fn one_step_more(path: &Path, is_local: impl Fn(&Handle) -> bool) -> Option<io::Result<Handle>> {
    let in_known_folder = |next: &&Path| {
        next.parent()
            .and_then(|folder| Handle::cached(folder).ok())
            .is_some_and(|folder| is_local(&folder))
    };
    let next = path.ancestors().find(in_known_folder)?;
    match Handle::of(next) {
        Ok(found) if found.is_symlink().is_ok_and(|is_link| !is_link) => {
            (next == path).then_some(Ok(found))
        }
        Ok(link) => {
            let _ = rustix::fs::readlinkat(&link, c"", Vec::new());
            None
        }
        Err(error) => error
            .is_not_found()
            .then(|| Err(ErrorKind::NotFound.into())),
    }
}

#[cfg(test)]
mod cached_path_tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_path_missing_from_the_cache_is_read_only_from_local_folders() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("file"), "").unwrap();
        // /proc caches no missing names.
        for missing in ["missing", "deep/er/missing"].map(|name| Path::new("/proc/self").join(name))
        {
            let kind = |is_local: bool| {
                open_without_waiting(&missing, |_| is_local)
                    .unwrap_err()
                    .kind()
            };
            assert_eq!(kind(true), ErrorKind::NotFound);
            assert!(cannot_wait(&missing, |_| true));
            if Handle::cached(&missing).unwrap_err().kind() == ErrorKind::WouldBlock {
                assert_eq!(kind(false), ErrorKind::WouldBlock);
                assert!(!cannot_wait(&missing, |_| false));
            }
        }
        let file = folder.path().join("file");
        assert!(
            open_without_waiting(&file, |_| false).is_ok(),
            "its name is known, wherever it lies"
        );
        assert!(cannot_wait(&file, |_| true) && !cannot_wait(&file, |_| false));
    }

    /// The walk that uses the cache alone does not set the access time of a new symlink.
    #[test]
    fn a_symlink_that_nothing_has_followed_is_followed() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("file"), "").unwrap();
        for number in 0..20 {
            let link = folder.path().join(number.to_string());
            symlink("file", &link).unwrap();
            let opened = open_without_waiting(&link, |_| true).unwrap();
            let resolved = opened.resolved_path().unwrap();
            assert!(resolved.ends_with("file"), "{}", resolved.display());
        }
    }
}
