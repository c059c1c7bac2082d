//! A file that is held without being opened: `O_PATH`, see open(2).

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use bindguard_core::evidence::{FileIdentity, FileKind};
use bindguard_core::mount_table::MountId;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, StatxFlags};

/// An `O_PATH` descriptor. While it is open, the mount that it was reached through keeps its id.
#[derive(Debug)]
pub struct Handle {
    fd: OwnedFd,
    path: PathBuf,
}

/// What could not be learned about a file.
#[derive(Debug, thiserror::Error)]
pub enum HandleError {
    /// open(2)
    #[error("open {} to look at it", path.display())]
    Open {
        /// The path as given.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// `/proc/self/fdinfo`, proc_pid_fdinfo(5)
    #[error("read the mount id of {}", path.display())]
    MountId {
        /// The path as given.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// statx(2)
    #[error("stat {}", path.display())]
    Stat {
        /// The path as given.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
}

impl HandleError {
    /// The kernel said that there is no such file.
    pub fn is_not_found(&self) -> bool {
        match self {
            Self::Open { source, .. } | Self::MountId { source, .. } | Self::Stat { source, .. } => {
                source.kind() == io::ErrorKind::NotFound
            }
        }
    }

    /// The error and what the kernel said, in one line.
    pub fn in_full(&self) -> String {
        match self {
            Self::Open { source, .. } | Self::MountId { source, .. } | Self::Stat { source, .. } => {
                format!("{self}: {source}")
            }
        }
    }
}

impl Handle {
    /// Holds what `path` leads to, a final symlink followed.
    ///
    /// # Errors
    /// open(2)'s.
    pub fn follow(path: &Path) -> Result<Self, HandleError> {
        Self::open(path, OFlags::empty())
    }

    /// Holds `path` itself; a final symlink is held, not followed.
    ///
    /// # Errors
    /// open(2)'s.
    pub fn of(path: &Path) -> Result<Self, HandleError> {
        Self::open(path, OFlags::NOFOLLOW)
    }

    fn open(path: &Path, flags: OFlags) -> Result<Self, HandleError> {
        match rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC | flags, Mode::empty()) {
            Ok(fd) => Ok(Self { fd, path: path.to_owned() }),
            Err(errno) => Err(HandleError::Open { path: path.to_owned(), source: errno.into() }),
        }
    }

    pub(crate) fn from_fd(fd: OwnedFd, path: PathBuf) -> Self {
        Self { fd, path }
    }

    /// The path that it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The id of the mount that it is on, valid as long as this handle is.
    ///
    /// # Errors
    /// When `/proc` cannot be read or says no `mnt_id`.
    pub fn mount_id(&self) -> Result<MountId, HandleError> {
        let failed = |source| HandleError::MountId { path: self.path.clone(), source };
        let fdinfo = fs::read_to_string(format!("/proc/self/fdinfo/{}", self.fd.as_raw_fd())).map_err(failed)?;
        let id = fdinfo.lines().find_map(|line| line.strip_prefix("mnt_id:")).and_then(|id| id.trim().parse().ok());
        id.map(MountId).ok_or_else(|| failed(io::Error::new(io::ErrorKind::InvalidData, "no mnt_id in fdinfo")))
    }

    /// Which file it is. A server that does not answer is not waited for: what is cached is taken.
    ///
    /// # Errors
    /// statx(2)'s.
    pub fn identity(&self) -> Result<FileIdentity, HandleError> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let stat = rustix::fs::statx(&self.fd, "", flags, StatxFlags::TYPE | StatxFlags::INO)
            .map_err(|errno| HandleError::Stat { path: self.path.clone(), source: errno.into() })?;
        let directory = FileType::from_raw_mode(stat.stx_mode.into()) == FileType::Directory;
        Ok(FileIdentity {
            device: rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor),
            inode: stat.stx_ino,
            kind: if directory { FileKind::Directory } else { FileKind::File },
        })
    }

    /// The path by which the kernel knows it, symlinks resolved. Of no use for a file that was deleted.
    ///
    /// # Errors
    /// readlink(2)'s.
    pub fn resolved_path(&self) -> io::Result<PathBuf> {
        fs::read_link(self.magic_path())
    }

    /// A path that leads to this very file and mount, whatever its name leads to by now: proc_pid_fd(5).
    pub(crate) fn magic_path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.fd.as_raw_fd()))
    }
}

impl AsFd for Handle {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
