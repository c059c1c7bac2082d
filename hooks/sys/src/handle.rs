//! A reference to a file that does not open its content: `O_PATH`, see open(2).

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, OnceLock};
use std::{fs, io};

use bindguard_core::evidence::{FileIdentity, FileKind};
use bindguard_core::mount_table::{FsType, MountId};
use bindguard_core::paths::climbs;
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Statx, StatxAttributes, StatxFlags,
};
use rustix::io::Errno;

/// statx(2)'s `STATX_MNT_ID_UNIQUE`: the kernel never reuses this id.
const UNIQUE_MOUNT_ID: StatxFlags = StatxFlags::from_bits_retain(0x4000);

/// The fields of [`Lasting`].
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
    lasting: OnceLock<Lasting>,
}

/// The attributes that cannot change while the descriptor is open, read once.
#[derive(Debug, Clone, Copy)]
struct Lasting {
    unique_mount_id: Option<u64>,
    is_mount_root: Option<bool>,
    identity: FileIdentity,
    is_symlink: bool,
}

impl Handle {
    /// Opens the file that `path` leads to; follows a final symlink.
    ///
    /// # Errors
    /// open(2)'s.
    pub fn follow(path: &Path) -> Result<Self, HandleError> {
        Self::open(path, OFlags::empty())
    }

    /// Opens `path` itself; does not follow a final symlink.
    ///
    /// # Errors
    /// open(2)'s.
    pub fn of(path: &Path) -> Result<Self, HandleError> {
        Self::open(path, OFlags::NOFOLLOW)
    }

    /// Opens `path` itself, and records if it has no symlink: then its
    /// [`resolved_path`](Handle::resolved_path) needs no readlink(2). `path` has no `..` in it.
    ///
    /// # Errors
    /// open(2)'s.
    pub(crate) fn as_written(path: &Path) -> Result<Self, HandleError> {
        match openat2(path, OFlags::NOFOLLOW, ResolveFlags::NO_SYMLINKS) {
            Ok(fd) => Ok(Self {
                is_as_written: true,
                ..Self::from_fd(fd, path.to_owned())
            }),
            Err(Errno::NOENT) => Err(open_error(path, Errno::NOENT)),
            // A symlink, or a kernel or a seccomp filter that does not know the call.
            Err(_) => Self::of(path),
        }
    }

    /// Opens the file that an absolute path leads to, a final symlink followed, if the kernel has
    /// the whole path in its cache: openat2(2), `RESOLVE_CACHED`. `None` if a disk, a server or a
    /// daemon would have to answer.
    pub fn cached(path: &Path) -> Option<Self> {
        Self::try_cached(path).ok()
    }

    /// As [`Handle::cached`], with the error.
    ///
    /// # Errors
    /// `WouldBlock` if a disk, a server or a daemon would have to answer; otherwise the kernel's
    /// error, which is certain.
    pub fn try_cached(path: &Path) -> io::Result<Self> {
        let open = |resolve| openat2(path, OFlags::empty(), ResolveFlags::CACHED | resolve);
        // Most paths have no link in them. Then readlink(2) is not needed for the kernel's own
        // path.
        if !climbs(path) {
            match open(ResolveFlags::NO_SYMLINKS) {
                Ok(fd) => {
                    return Ok(Self {
                        is_as_written: true,
                        ..Self::from_fd(fd, path.to_owned())
                    });
                }
                Err(Errno::NOENT) => return Err(Errno::NOENT.into()),
                Err(_) => {}
            }
        }
        Ok(Self::from_fd(open(ResolveFlags::empty())?, path.to_owned()))
    }

    /// True if the kernel's cache shows that no symlink is on the way to `path`, or that `path`
    /// does not exist.
    pub fn has_one_name(path: &Path) -> bool {
        match openat2(
            path,
            OFlags::empty(),
            ResolveFlags::CACHED | ResolveFlags::NO_SYMLINKS,
        ) {
            Ok(_) => !climbs(path),
            Err(errno) => errno == Errno::NOENT,
        }
    }

    fn open(path: &Path, flags: OFlags) -> Result<Self, HandleError> {
        match rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC | flags, Mode::empty()) {
            Ok(fd) => Ok(Self::from_fd(fd, path.to_owned())),
            Err(errno) => Err(open_error(path, errno)),
        }
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

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The id of the mount that it is on, as mountinfo has it. Valid while this handle is open.
    ///
    /// # Errors
    /// statx(2)'s, and a kernel that is too old.
    pub fn mount_id(&self) -> Result<MountId, HandleError> {
        if self.is_unqueried() {
            return self.mount_id_of_descriptor();
        }
        let stat = self.statx(StatxFlags::MNT_ID)?;
        let id = u32::try_from(stat.stx_mnt_id)
            .ok()
            .filter(|_| has(&stat, StatxFlags::MNT_ID));
        id.map(MountId).ok_or_else(|| self.too_old("ids of mounts"))
    }

    /// The id of the mount that it is on, as statmount(2) takes it. `None` before Linux 6.8.
    ///
    /// # Errors
    /// statx(2)'s.
    pub(crate) fn unique_mount_id(&self) -> Result<Option<u64>, HandleError> {
        Ok(self.lasting()?.unique_mount_id)
    }

    /// True if the file is the root of its mount: the path is a mount point.
    ///
    /// # Errors
    /// statx(2)'s, and a kernel that is too old.
    pub fn is_mount_root(&self) -> Result<bool, HandleError> {
        self.lasting()?
            .is_mount_root
            .ok_or_else(|| self.too_old("roots of mounts"))
    }

    /// The identity of the file. Uses cached attributes instead of waiting for a server.
    ///
    /// # Errors
    /// statx(2)'s.
    pub fn identity(&self) -> Result<FileIdentity, HandleError> {
        Ok(self.lasting()?.identity)
    }

    /// The identity of a name in a directory, if it is no symlink and is on the same mount as this
    /// handle. `None` otherwise, if statx(2) fails, and before Linux 6.8.
    pub(crate) fn identity_on_same_mount(
        &self,
        directory: impl AsFd,
        name: &Path,
    ) -> Option<FileIdentity> {
        let mount = self.unique_mount_id().ok()??;
        let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT | AtFlags::STATX_DONT_SYNC;
        let file = Lasting::of(&rustix::fs::statx(directory, name, flags, LASTING).ok()?);
        (file.unique_mount_id == Some(mount) && !file.is_symlink).then_some(file.identity)
    }

    /// True if the file itself is a symlink.
    ///
    /// # Errors
    /// statx(2)'s.
    pub(crate) fn is_symlink(&self) -> Result<bool, HandleError> {
        Ok(self.lasting()?.is_symlink)
    }

    /// Reads the symlink that this value has open, for the effect on the access time.
    pub(crate) fn read_link(&self) {
        let _ = rustix::fs::readlinkat(&self.fd, c"", Vec::new());
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

    /// Its lasting attributes, read at the first call.
    fn lasting(&self) -> Result<Lasting, HandleError> {
        if let Some(lasting) = self.lasting.get() {
            return Ok(*lasting);
        }
        let lasting = self.statx(LASTING).map(|stat| Lasting::of(&stat))?;
        Ok(*self.lasting.get_or_init(|| lasting))
    }

    fn statx(&self, mask: StatxFlags) -> Result<Statx, HandleError> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let stat = rustix::fs::statx(&self.fd, "", flags, mask);
        stat.map_err(|errno| HandleError::Stat {
            path: self.path.clone(),
            source: errno.into(),
        })
    }

    fn too_old(&self, what: &str) -> HandleError {
        let source = io::Error::new(
            io::ErrorKind::Unsupported,
            format!("this kernel does not report {what}: it is too old"),
        );
        HandleError::Stat {
            path: self.path.clone(),
            source,
        }
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
}

impl Lasting {
    fn of(stat: &Statx) -> Self {
        let file_type = FileType::from_raw_mode(stat.stx_mode.into());
        let tells_mount_roots = stat
            .stx_attributes_mask
            .contains(StatxAttributes::MOUNT_ROOT);
        Self {
            unique_mount_id: has(stat, UNIQUE_MOUNT_ID).then_some(stat.stx_mnt_id),
            is_mount_root: tells_mount_roots
                .then(|| stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT)),
            identity: FileIdentity {
                device: rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor),
                inode: stat.stx_ino,
                kind: if file_type == FileType::Directory {
                    FileKind::Directory
                } else {
                    FileKind::File
                },
            },
            is_symlink: file_type == FileType::Symlink,
        }
    }
}

impl AsFd for Handle {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn openat2(path: &Path, flags: OFlags, resolve: ResolveFlags) -> Result<OwnedFd, Errno> {
    rustix::fs::openat2(
        CWD,
        path,
        OFlags::PATH | OFlags::CLOEXEC | flags,
        Mode::empty(),
        resolve,
    )
}

/// The id of the mount that a file is on, as statmount(2) takes it. `None` before Linux 6.8.
pub(crate) fn unique_mount_id(file: impl AsFd) -> Option<u64> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let stat = rustix::fs::statx(file, c"", flags, UNIQUE_MOUNT_ID).ok()?;
    has(&stat, UNIQUE_MOUNT_ID).then_some(stat.stx_mnt_id)
}

fn has(stat: &Statx, field: StatxFlags) -> bool {
    StatxFlags::from_bits_retain(stat.stx_mask).contains(field)
}

// An error while a file is opened or inspected.

/// An error while a file is opened or inspected.
#[derive(Debug, thiserror::Error)]
pub enum HandleError {
    /// open(2)
    #[error("open {}", path.display())]
    Open {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// statx(2)
    #[error("stat {}", path.display())]
    Stat {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

impl HandleError {
    /// True if the kernel reported that there is no such file.
    pub fn is_not_found(&self) -> bool {
        self.kind() == io::ErrorKind::NotFound
    }

    /// The kind of the kernel's error.
    pub(crate) fn kind(&self) -> io::ErrorKind {
        match self {
            Self::Open { source, .. } | Self::Stat { source, .. } => source.kind(),
        }
    }

    pub(crate) fn into_io(self) -> io::Error {
        match self {
            Self::Open { source, .. } | Self::Stat { source, .. } => source,
        }
    }
}

fn open_error(path: &Path, errno: Errno) -> HandleError {
    HandleError::Open {
        path: path.to_owned(),
        source: errno.into(),
    }
}

// Facts about a file from the kernel's own tables, for filesystems that may query a server for
// attributes.

/// True if this kernel has a filesystem that [queries its
/// server](FsType::queries_server_for_attributes) for attributes. Few nodes load these modules. A
/// single read(2) returns all of proc_filesystems(5).
static HAS_QUERYING_FILESYSTEM: LazyLock<bool> = LazyLock::new(|| {
    let mut known = [0; 4096];
    let length = File::open("/proc/filesystems")
        .and_then(|mut file| file.read(&mut known))
        .unwrap_or(0);
    let name = |line: &str| line.split('\t').nth(1).map(|name| FsType(name.to_owned()));
    String::from_utf8_lossy(&known[..length])
        .lines()
        .filter_map(name)
        .any(|fs_type| fs_type.queries_server_for_attributes())
});

impl Handle {
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

    /// The id of the mount that it is on, as the kernel's table of open files has it:
    /// proc_pid_fdinfo(5).
    fn mount_id_of_descriptor(&self) -> Result<MountId, HandleError> {
        let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", self.fd.as_raw_fd()));
        let info = info.map_err(|source| HandleError::Stat {
            path: self.path.clone(),
            source,
        })?;
        let id = info
            .lines()
            .find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok());
        id.map(MountId).ok_or_else(|| self.too_old("ids of mounts"))
    }

    /// True if the path of the file is `mount_point`: the file is the root of the mount there.
    pub(crate) fn is_at(&self, mount_point: &Path) -> bool {
        let Ok(resolved) = self.resolved_path() else {
            return false;
        };
        // The kernel appends this to the path of a deleted file that a mount still shows.
        let deleted = resolved.as_os_str().as_bytes().strip_suffix(b" (deleted)");
        resolved == mount_point || deleted == Some(mount_point.as_os_str().as_bytes())
    }

    /// The kind of the file, without a query to the filesystem.
    ///
    /// # Errors
    /// open(2)'s.
    pub(crate) fn kind(&self) -> Result<FileKind, HandleError> {
        match Self::open(&self.magic_path(), OFlags::DIRECTORY) {
            Ok(_) => Ok(FileKind::Directory),
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => Ok(FileKind::File),
            Err(error) => Err(error),
        }
    }
}
