//! Facts about a file from the kernel's own tables, for filesystems that may query a server for
//! attributes.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::LazyLock;

use bindguard_core::evidence::FileKind;
use bindguard_core::mount_table::{FsType, MountId};
use rustix::fs::OFlags;

use super::{Handle, HandleError};

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
    pub(super) fn mount_id_of_descriptor(&self) -> Result<MountId, HandleError> {
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
