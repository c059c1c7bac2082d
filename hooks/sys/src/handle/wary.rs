//! What is told of a file without its filesystem, which might ask a server first.

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

/// Whether this kernel knows a filesystem that [asks](FsType::asks_for_attributes): they are modules that few nodes need.
/// proc_filesystems(5), which fits into one read(2) many times.
static HAS_ASKING_FILESYSTEM: LazyLock<bool> = LazyLock::new(|| {
    let mut known = [0; 4096];
    let length = File::open("/proc/filesystems").and_then(|mut file| file.read(&mut known)).unwrap_or(0);
    let name = |line: &str| line.split('\t').nth(1).map(|name| FsType(name.to_owned()));
    String::from_utf8_lossy(&known[..length]).lines().filter_map(name).any(|fs_type| fs_type.asks_for_attributes())
});

impl Handle {
    /// The same file. On which mount it is will be told without its filesystem, where a filesystem might ask a server first.
    /// That is dearer.
    #[must_use]
    pub fn wary(self) -> Self {
        Self { is_wary: true, ..self }
    }

    /// Whether its filesystem may ask a server before it says anything.
    pub(crate) fn is_wary(&self) -> bool {
        self.is_wary && *HAS_ASKING_FILESYSTEM
    }

    /// The id of the mount that it is on, as the kernel's table of open files has it: proc_pid_fdinfo(5).
    pub(super) fn mount_id_of_descriptor(&self) -> Result<MountId, HandleError> {
        let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", self.fd.as_raw_fd()));
        let info = info.map_err(|source| HandleError::Stat { path: self.path.clone(), source })?;
        let id = info.lines().find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok());
        id.map(MountId).ok_or_else(|| self.too_old("ids of mounts"))
    }

    /// Whether it is the root of the mount at this place, told by its path.
    pub(crate) fn is_at(&self, mount_point: &Path) -> bool {
        let Ok(resolved) = self.resolved_path() else { return false };
        // So the kernel names what a mount shows and nobody finds any more.
        let deleted = resolved.as_os_str().as_bytes().strip_suffix(b" (deleted)");
        resolved == mount_point || deleted == Some(mount_point.as_os_str().as_bytes())
    }

    /// Whether it is a directory, as far as the kernel knows by itself.
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
