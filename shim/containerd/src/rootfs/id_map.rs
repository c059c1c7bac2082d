//! Id-mapped mounts: `uidmap=0:100000:65536` and `gidmap=…`, which containerd sends for containers
//! in a user namespace.
//!
//! ```text
//!   child in a new user namespace ── /proc/PID/uid_map, gid_map ── /proc/PID/ns/user ──► fd, the child is killed
//!   open_tree(CLONE) ── mount_setattr(IDMAP, fd) ── move_mount
//! ```
//! The kernel accepts a mapping only as a user namespace, and only for a detached mount. So a clone
//! is mapped and attached. An overlay cannot be mapped itself; its lower directories are. Their
//! common parent is cloned, mapped and mounted beside the root filesystem until the overlay, which
//! keeps references, is mounted. See mount_setattr(2), "ID-mapped mounts", and user_namespaces(7).

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use bindguard_sys::map_ids;
use rustix::fs::CWD;
use rustix::mount::{MoveMountFlags, OpenTreeFlags, UnmountFlags, move_mount, open_tree, unmount};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

use super::overlay::{common_parent, lower_directories, with_lower};
use crate::kernel::child_in_user_namespace;

/// A mapping as a user namespace, the only form that the kernel accepts.
#[derive(Debug)]
pub(super) struct MappedNamespace {
    namespace: File,
}

impl MappedNamespace {
    /// Parses the options' values: `container:host:size`, several separated by commas.
    pub(super) fn new(users: &str, groups: &str) -> io::Result<Self> {
        let [users, groups] = [lines(users)?, lines(groups)?];
        let child = NamespaceChild(child_in_user_namespace()?);
        fs::write(child.file("uid_map"), users)?;
        fs::write(child.file("gid_map"), groups)?;
        Ok(Self {
            namespace: File::open(child.file("ns/user"))?,
        })
    }

    /// Maps the ids of the mount on `target`. No process may use the mount yet, because a mapped
    /// clone replaces the mount.
    pub(super) fn apply(&self, target: &Path) -> io::Result<()> {
        let mapped = self.clone_of(target, false)?;
        unmount(target, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)?;
        attach(&mapped, target)
    }

    /// Names the lower directories by a mapped mount at `directory`. Drop it when the overlay is
    /// mounted.
    pub(super) fn layers(
        &self,
        words: &[String],
        directory: PathBuf,
    ) -> io::Result<(MappedLayers, Vec<String>)> {
        let unusable = |why| io::Error::new(io::ErrorKind::InvalidInput, why);
        let lower = lower_directories(words).ok_or_else(|| unusable("no lowerdir to map"))?;
        let parent = common_parent(&lower)
            .ok_or_else(|| unusable("the lower directories have no common parent"))?;
        let mapped = self.clone_of(&parent, true)?;
        DirBuilder::new().mode(0o700).create(&directory)?;
        let layers = MappedLayers { directory };
        attach(&mapped, &layers.directory)?;
        let names: Vec<String> = lower
            .iter()
            .filter_map(|path| path.strip_prefix(&parent).ok())
            .map(|path| layers.name(path))
            .collect();
        Ok((layers, with_lower(words, &names.join(":"))))
    }

    fn clone_of(&self, path: &Path, read_only: bool) -> io::Result<OwnedFd> {
        let flags = OpenTreeFlags::OPEN_TREE_CLONE
            | OpenTreeFlags::OPEN_TREE_CLOEXEC
            | OpenTreeFlags::AT_RECURSIVE;
        let clone = open_tree(CWD, path, flags)?;
        map_ids(clone.as_fd(), self.namespace.as_fd(), read_only)?;
        Ok(clone)
    }
}

/// The mapped parent of an overlay's lower directories; unmounted when dropped.
#[derive(Debug)]
pub(super) struct MappedLayers {
    directory: PathBuf,
}

impl MappedLayers {
    fn name(&self, layer: &Path) -> String {
        self.directory.join(layer).display().to_string()
    }
}

impl Drop for MappedLayers {
    fn drop(&mut self) {
        // Unmounted already, or never mounted; without the directory there is nothing to remove
        // either.
        let _ = unmount(
            &self.directory,
            UnmountFlags::DETACH | UnmountFlags::NOFOLLOW,
        );
        if let Err(error) = fs::remove_dir(&self.directory) {
            tracing::warn!(path = %self.directory.display(), %error, "cannot remove the mount point of an overlay's mapped layers");
        }
    }
}

fn attach(tree: &OwnedFd, target: &Path) -> io::Result<()> {
    Ok(move_mount(
        tree,
        "",
        CWD,
        target,
        MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH,
    )?)
}

/// `container host size`, the format of /proc/PID/uid_map.
fn lines(mapping: &str) -> io::Result<String> {
    let line = |range: &str| {
        let numbers: Vec<u32> = range
            .split(':')
            .map(|number| number.parse().ok())
            .collect::<Option<_>>()?;
        let [inside, outside, size] = numbers[..] else {
            return None;
        };
        Some(format!("{inside} {outside} {size}\n"))
    };
    mapping
        .split(',')
        .map(line)
        .collect::<Option<String>>()
        .ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{mapping:?} is no mapping of ids (container:host:size)"),
            )
        })
}

/// The child for which the kernel creates a user namespace.
struct NamespaceChild(Pid);

impl NamespaceChild {
    fn file(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{name}", self.0.as_raw_nonzero()))
    }
}

impl Drop for NamespaceChild {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::KILL);
        // ECHILD: the reaper of orphans was faster.
        let _ = waitpid(Some(self.0), WaitOptions::empty());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_are_read_or_refused() {
        assert_eq!(
            lines("0:1000:1,1:100000:65535").unwrap(),
            "0 1000 1\n1 100000 65535\n"
        );
        for wrong in ["", "0:1", "0:1:2:3", "a:b:c", "0:-1:1"] {
            assert!(lines(wrong).is_err(), "{wrong}");
        }
    }
}
