//! The bind mount between a container and the sub path of a volume.
//!
//! Mirrors `doBindSubPath`, `prepareSubpathTarget` and `doCleanSubPaths` of
//! `pkg/volume/util/subpath/subpath_linux.go`. What differs between versions is what happens at a
//! container's restart, when the target is a mount point already: before PR 89629 (1.19) the
//! kubelet left it as it was.

use std::fs;
use std::io::ErrorKind;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::safe_open::safe_open;
use crate::mount_calls::{bind, unmount};
use crate::mounts;

/// A kubelet's treatment of a subpath that is mounted already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Behaviour {
    /// Up to 1.18: nothing. This is kubernetes#68211.
    Before1_19,
    /// Since PR 89629: where the mount's root is not the wanted path, it is unmounted and mounted
    /// again. The root is compared with a path of the host, so on a tmpfs or a partition of its own
    /// it never matches.
    Since1_19,
}

/// A `subPath` of a volume mount of a container.
#[derive(Clone, Debug)]
pub struct Subpath {
    volume: PathBuf,
    target: PathBuf,
    path: String,
}

impl Subpath {
    pub(super) fn new(volume: &Path, target: PathBuf, path: &str) -> Self {
        Self {
            volume: volume.to_path_buf(),
            target,
            path: path.to_owned(),
        }
    }

    /// `volume-subpaths/VOLUME/CONTAINER/INDEX`: the source that the container's spec gets.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// The mounts that lie on the target now, bottom first.
    pub fn mounts(&self) -> Result<Vec<mounts::Mount>> {
        // the table has resolved paths, the kubelet's root may be a symlink
        let parent = self
            .target
            .parent()
            .context("a subpath's target has a parent")?;
        let parent =
            fs::canonicalize(parent).with_context(|| format!("resolve {}", parent.display()))?;
        mounts::on(&parent.join(self.target.file_name().unwrap_or_default()))
    }

    /// Binds it, as for a container's first start, and returns the target.
    pub fn bind(&self) -> Result<&Path> {
        self.bind_again(Behaviour::Before1_19)
    }

    /// Binds it, as for a container's restart under a kubelet of that age.
    pub fn bind_again(&self, behaviour: Behaviour) -> Result<&Path> {
        let source = safe_open(&self.volume, &self.path)?;
        if self.is_mounted_well_enough_for(behaviour)? {
            return Ok(&self.target);
        }
        self.make_target()?;
        bind(
            format!("/proc/{}/fd/{}", std::process::id(), source.as_raw_fd()),
            &self.target,
        )?;
        Ok(&self.target)
    }

    fn is_mounted_well_enough_for(&self, behaviour: Behaviour) -> Result<bool> {
        if !self.target.exists() {
            return Ok(false);
        }
        let Some(top) = self.mounts()?.pop() else {
            return Ok(false);
        };
        let wanted =
            fs::canonicalize(self.volume.join(&self.path)).context("resolve the sub path")?;
        match behaviour {
            Behaviour::Before1_19 => Ok(true),
            Behaviour::Since1_19 if Path::new(&top.root) == wanted => Ok(true),
            Behaviour::Since1_19 => unmount(&self.target).map(|()| false),
        }
    }

    /// Makes the mount point: a directory, or an empty file for a file.
    fn make_target(&self) -> Result<()> {
        let parent = self
            .target
            .parent()
            .context("a subpath's target has a parent")?;
        fs::create_dir_all(parent).with_context(|| format!("create {}", parent.display()))?;
        let made = match self.volume.join(&self.path).is_dir() {
            true => fs::create_dir(&self.target),
            false => fs::write(&self.target, ""),
        };
        match made {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
            made => made.with_context(|| format!("create {}", self.target.display())),
        }
    }
}

/// Unmounts and removes every subpath of a pod. As in a kubelet, a second mount on a subpath makes
/// this fail.
pub(super) fn clean(subpaths: &Path) -> Result<()> {
    for volume in children(subpaths)? {
        for container in children(&volume)? {
            for target in children(&container)? {
                clean_one(&target)?;
            }
            remove_dir(&container)?;
        }
        remove_dir(&volume)?;
    }
    if subpaths.exists() {
        remove_dir(subpaths)
    } else {
        Ok(())
    }
}

/// `mount.CleanupMountPoint`: umount once, then the path must be no mount point any more.
fn clean_one(target: &Path) -> Result<()> {
    let resolved =
        fs::canonicalize(target).with_context(|| format!("resolve {}", target.display()))?;
    if !mounts::on(&resolved)?.is_empty() {
        unmount(target)?;
    }
    let removed = if target.is_dir() {
        fs::remove_dir(target)
    } else {
        fs::remove_file(target)
    };
    removed.with_context(|| format!("remove {}", target.display()))
}

fn children(folder: &Path) -> Result<Vec<PathBuf>> {
    match fs::read_dir(folder) {
        Ok(entries) => entries.map(|entry| Ok(entry?.path())).collect(),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error).with_context(|| format!("list {}", folder.display())),
    }
}

fn remove_dir(folder: &Path) -> Result<()> {
    fs::remove_dir(folder).with_context(|| format!("remove {}", folder.display()))
}
