//! Detaches the mounts below a pod's emptyDirs when the pod's sandbox has ended.
//!
//! The kubelet removes an emptyDir with all files below, also those of a mount that the host or a
//! privileged container made there (kubernetes#129550, #115054).
//!
//! The pod's containers chose the names below an emptyDir. So a mount is found in the mount table, by
//! the kernel's name of its place, and unmounted only if no symlink is on the way and the mount at the
//! end has the listed id.

use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use bindguard_core::error_chain;
use bindguard_core::identity::{CONTAINER_TYPE, Identity};
use bindguard_core::mount_table::{MountEntry, MountId, MountTable};
use bindguard_core::paths::below;
use bindguard_core::places::Places;
use bindguard_core::report::{Actor, ReleaseLine, ReleaseResult, ReleasedCopy};
use bindguard_core::spec::SpecView;
use bindguard_sys::bundle::read_spec;
use bindguard_sys::leftovers::{UnmountError, detach_or_unmount};
use bindguard_sys::read_mount_table_in_part;

use crate::directories::kubelet_roots_by_all_names;
use crate::probes::Probes;

const EMPTY_DIRS: &str = "volumes/kubernetes.io~empty-dir";
/// The time limit for each umount. containerd gives up the end of a sandbox after ten seconds.
const UNMOUNT_TIMEOUT: Duration = Duration::from_millis(500);

/// A mount that was below an emptyDir.
#[derive(Debug)]
pub struct Detached {
    /// The pod.
    pub pod: Identity,
    /// The mount, as it was listed.
    pub mount: MountEntry,
    /// The result.
    pub result: DetachResult,
}

/// The result for a mount.
#[derive(Debug)]
pub enum DetachResult {
    /// It is unmounted.
    Unmounted,
    /// It was in use, or did not answer, and is detached.
    Lazily,
    /// It is still there.
    Left(UnmountError),
}

impl Detached {
    /// The line of the journal.
    pub fn line(&self, id: &str) -> ReleaseLine {
        let (result, error) = match &self.result {
            DetachResult::Unmounted | DetachResult::Lazily => (ReleaseResult::Released, None),
            DetachResult::Left(UnmountError::Busy) => (ReleaseResult::Busy, None),
            DetachResult::Left(error) => (ReleaseResult::Refused, Some(error_chain(error))),
        };
        let mut line = ReleaseLine::new(Actor::Guard, id, self.pod.clone());
        line.copies.push(ReleasedCopy {
            mount_point: self.mount.mount_point.to_string_lossy().into_owned(),
            fs_type: self.mount.fs_type.0.clone(),
            device: self.mount.device.to_string(),
            result,
            error,
        });
        line
    }
}

/// Why no mount was detached.
#[derive(Debug, thiserror::Error)]
pub enum NotDetached {
    /// The sandbox or a container of the pod has a bundle.
    #[error("the pod lives: {} is another container of the pod", bundle.display())]
    PodLives {
        /// The bundle.
        bundle: PathBuf,
    },
    /// A bundle could not be read, which may be of the pod.
    #[error("read the spec of {}", bundle.display())]
    Spec {
        /// The bundle.
        bundle: PathBuf,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// The mount table could not be read.
    #[error("read the mount table")]
    Mounts(#[source] bindguard_sys::MountinfoError),
}

/// Detaches the mounts strictly below the emptyDirs of the pod whose sandbox has this bundle.
///
/// # Errors
/// If a container of the pod is left, or if this is not known.
pub fn detach_below_emptydirs(
    bundle: &Path,
    places: &Places,
) -> Result<Vec<Detached>, NotDetached> {
    let (identity, is_sandbox) = names_in(bundle)?;
    let uid = identity.pod.uid.as_ref();
    let Some(uid) = uid.filter(|uid| is_sandbox && is_name(uid)) else {
        return Ok(Vec::new());
    };
    let mut volumes = kubelet_roots_by_all_names(places, &Probes::for_create());
    for root in &mut volumes {
        *root = root.join("pods").join(uid).join(EMPTY_DIRS);
    }
    let table = read_mount_table_in_part().map_err(NotDetached::Mounts)?;
    let listed = mounts_below(&table, &volumes);
    if listed.is_empty() {
        return Ok(Vec::new());
    }
    // After the list: what a new sandbox mounts from now on is not in the list.
    refuse_other_containers(bundle, uid)?;
    let mut left = listed.clone();
    loop {
        let before = left.len();
        left.retain(|mount| unmount(mount, false).is_err());
        // Of a stack, only the topmost mount can be unmounted.
        if left.is_empty() || left.len() == before {
            break;
        }
    }
    let is_in = |table: &MountTable, id: MountId| {
        let mounts = mounts_below(table, &volumes);
        mounts.iter().any(|mount| mount.id == id)
    };
    let now = read_mount_table_in_part().map_err(NotDetached::Mounts)?;
    let mut lazily = Vec::new();
    for mount in left {
        // The umount of a peer may have unmounted this mount, too.
        if is_in(&now, mount.id) {
            lazily.push(mount);
        }
    }
    let mut errors = Vec::new();
    // The outermost mount first: its lazy umount also detaches the mounts on it.
    for mount in lazily.iter().rev() {
        errors.extend(unmount(mount, true).err().map(|error| (mount.id, error)));
    }
    let now = read_mount_table_in_part().map_err(NotDetached::Mounts)?;
    let mut detached = Vec::new();
    for mount in listed {
        let is_there = is_in(&now, mount.id);
        let error = errors.iter().position(|(id, _)| *id == mount.id);
        let result = match error.map(|index| errors.swap_remove(index).1) {
            error if is_there => DetachResult::Left(error.unwrap_or(UnmountError::Changed)),
            _ if lazily.iter().any(|it| it.id == mount.id) => DetachResult::Lazily,
            _ => DetachResult::Unmounted,
        };
        let mount = mount.clone();
        let pod = identity.clone();
        detached.push(Detached { pod, mount, result });
    }
    Ok(detached)
}

fn unmount(mount: &MountEntry, lazily: bool) -> Result<(), UnmountError> {
    detach_or_unmount(&mount.mount_point, mount.id, lazily, UNMOUNT_TIMEOUT)
}

/// The mounts strictly below the emptyDirs, the last one first. The emptyDir itself may be a mount: a
/// tmpfs.
fn mounts_below<'t>(table: &'t MountTable, volumes: &[PathBuf]) -> Vec<&'t MountEntry> {
    let mut found = Vec::new();
    for mount in table.entries().iter().rev() {
        let in_volume = |folder: &PathBuf| below(&mount.mount_point, folder);
        let path = volumes.iter().find_map(in_volume);
        if path.is_some_and(|path| path.components().count() > 1) {
            found.push(mount);
        }
    }
    found
}

/// The bundles of a containerd lie beside each other.
fn refuse_other_containers(own: &Path, uid: &str) -> Result<(), NotDetached> {
    let unread = |source| NotDetached::Spec {
        bundle: own.to_owned(),
        source,
    };
    let folder = own.parent().unwrap_or(own);
    for entry in fs::read_dir(folder).map_err(unread)? {
        let bundle = entry.map_err(unread)?.path();
        if bundle.file_name() == own.file_name() {
            continue;
        }
        match names_in(&bundle) {
            Ok((other, _)) if other.pod.uid.as_deref() != Some(uid) => {}
            Ok(_) => return Err(NotDetached::PodLives { bundle }),
            // Its container ended meanwhile, or is about to be created.
            Err(_) if bundle.join("config.json").try_exists().is_ok_and(|is| !is) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The names of a bundle's container; true if it is a pod's sandbox.
fn names_in(bundle: &Path) -> Result<(Identity, bool), NotDetached> {
    let unread = |source| NotDetached::Spec {
        bundle: bundle.to_owned(),
        source,
    };
    let bytes = read_spec(bundle).map_err(|error| unread(io::Error::other(error)))?;
    let spec = SpecView::from_bytes(&bytes).map_err(|error| unread(io::Error::other(error)))?;
    let is_sandbox = spec.annotation(CONTAINER_TYPE) == Some("sandbox");
    Ok((Identity::from_spec(&spec), is_sandbox))
}

/// True for a single name of a folder.
fn is_name(uid: &str) -> bool {
    let mut parts = Path::new(uid).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(name)), None) if name == uid)
}
