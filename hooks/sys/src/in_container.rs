//! The mounts of a container, seen from outside: its mount table and `/proc/PID/root`, see
//! proc_pid_root(5).
//!
//! The walk to a destination may wait for any filesystem mounted on the way: use this only in a
//! process that can be abandoned.

use std::io;
use std::path::{Path, PathBuf};

use bindguard_core::error_chain;
use bindguard_core::evidence::Observed;
use bindguard_core::mount_table::{MountTable, Propagation};
use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::enter::{HeldProcess, ProcessError, open_process_file};
use crate::handle::Handle;
use crate::process_files::ProcessFile;

/// Why the mounts of a container could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ContainerMountsError {
    /// Its root could not be opened.
    #[error("open {}", path.display())]
    Open {
        /// The path of the root.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// It ended, or its mount table could not be read.
    #[error(transparent)]
    Process(#[from] ProcessError),
}

/// The mount namespace of a container's init.
#[derive(Debug)]
pub struct ContainerMounts {
    root: Handle,
    table: MountTable,
}

impl ContainerMounts {
    /// Reads the mounts of the process with this pid.
    ///
    /// # Errors
    /// For example if the process ended meanwhile.
    pub fn of(pid: u32) -> Result<Self, ContainerMountsError> {
        // It is alive after both were opened: no other process had its pid meanwhile.
        let process = HeldProcess::open(pid)?;
        let root = ProcessFile::of(pid, "root");
        let held = open_process_file(&root).map_err(|source| ContainerMountsError::Open {
            path: root.path.clone(),
            source,
        })?;
        let table = process.mounts()?;
        Ok(Self {
            root: Handle::from_fd(held, root.path),
            table,
        })
    }

    /// The propagation of the mount that is seen at a destination, its symlinks followed as the
    /// container would.
    pub fn at(&self, destination: &Path) -> Observed<Propagation> {
        let inside = destination.strip_prefix("/").unwrap_or(destination);
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let in_root = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        let handle = match rustix::fs::openat2(&self.root, inside, flags, Mode::empty(), in_root) {
            Ok(fd) => Handle::from_fd(fd, destination.to_owned()),
            Err(Errno::NOENT | Errno::NOTDIR) => return Observed::Absent,
            Err(errno) => {
                return Observed::Unreadable(format!(
                    "open {} in it: {errno}",
                    destination.display()
                ));
            }
        };
        match (handle.is_mount_root(), handle.mount_id()) {
            (Ok(false), _) => Observed::Absent,
            (Ok(true), Ok(id)) => match self.table.mount(id) {
                Some(entry) => Observed::Seen(entry.propagation.clone()),
                None => Observed::Unreadable(format!("mount {} is not in its mount table", id.0)),
            },
            (Err(error), _) | (_, Err(error)) => Observed::Unreadable(error_chain(&error)),
        }
    }
}
