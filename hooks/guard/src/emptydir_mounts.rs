//! Detaches the mounts below a pod's emptyDirs when the pod's sandbox has ended.
//!
//! The kubelet removes an emptyDir with all files below, also those of a mount that the host or a
//! privileged container made there (kubernetes#129550, #115054).
//!
//! The pod's containers chose the names below an emptyDir. So a mount is found in the mount table, by
//! the kernel's name of its place, and unmounted only if no symlink is on the way and the mount at the
//! end has the listed id.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use bindguard_core::error_chain;
use bindguard_core::identity::{CONTAINER_TYPE, Identity};
use bindguard_core::mount_table::{MountEntry, MountTable};
use bindguard_core::places::Places;
use bindguard_core::report::{Actor, ReleaseLine, ReleaseResult, ReleasedCopy};
use bindguard_core::spec::SpecView;
use bindguard_core::text::below;
use bindguard_sys::files::{read_spec, spec_of};
use bindguard_sys::read_mount_table_in_part;
use bindguard_sys::replace::{UnmountFlags, unmount_within};

use crate::inspect::OpenError;
use crate::probes::{Probes, kubelet_roots_by_all_names};

const EMPTY_DIRS: &str = "volumes/kubernetes.io~empty-dir";
/// The time limit for each umount. containerd gives up the end of a sandbox after ten seconds.
const UNMOUNT_TIMEOUT: Duration = Duration::from_millis(500);

/// Why no mount was detached.
#[derive(Debug, thiserror::Error)]
pub enum NotDetached {
    /// The sandbox or a container of the pod has a bundle.
    #[error("the pod lives: {} is another container of the pod", .0.display())]
    PodLives(PathBuf),
    /// A bundle could not be read, which may be of the pod.
    #[error(transparent)]
    Spec(#[from] OpenError),
    /// The folder of all bundles could not be read.
    #[error("list the bundles beside the pod's")]
    Bundles(#[from] io::Error),
    /// The mount table could not be read.
    #[error("read the mount table")]
    Mounts(#[from] bindguard_sys::Failure),
}

/// Detaches the mounts strictly below the emptyDirs of the pod whose sandbox `id` has this bundle.
/// Returns a line of the journal for each mount.
///
/// # Errors
/// If a container of the pod is left, or if this is not known.
pub fn detach_below_emptydirs(
    bundle: &Path,
    id: &str,
    places: &Places,
) -> Result<Vec<ReleaseLine>, NotDetached> {
    let (identity, is_sandbox) = names_in(bundle)?;
    let Some(uid) = identity.pod.uid.as_deref() else {
        return Ok(Vec::new());
    };
    let mut names = Path::new(uid).components();
    let is_name = matches!(names.next(), Some(Component::Normal(name)) if name == uid);
    if !is_sandbox || !is_name {
        return Ok(Vec::new());
    }
    let mut volumes = kubelet_roots_by_all_names(places, &Probes::for_create());
    for root in &mut volumes {
        *root = root.join("pods").join(uid).join(EMPTY_DIRS);
    }
    let table = read_mount_table_in_part()?;
    let listed = mounts_below(&table, &volumes);
    if listed.is_empty() {
        return Ok(Vec::new());
    }
    // After the list: what a new sandbox mounts from now on is not in the list.
    refuse_other_containers(bundle, uid)?;
    let unmount = |mount: &MountEntry, how| {
        unmount_within(UNMOUNT_TIMEOUT, &mount.mount_point, mount.id, how)
    };
    let mut left = listed.clone();
    loop {
        let before = left.len();
        left.retain(|mount| unmount(mount, UnmountFlags::empty()).is_err());
        // Of a stack, only the topmost mount can be unmounted.
        if left.is_empty() || left.len() == before {
            break;
        }
    }
    let mut errors = Vec::new();
    // The outermost mount first: its lazy umount also detaches the mounts on it.
    for mount in left.iter().rev() {
        if let Err(error) = unmount(mount, UnmountFlags::DETACH) {
            errors.push((mount.id, error));
        }
    }
    // An umount of a peer unmounts a mount, too, so the table decides.
    let now = read_mount_table_in_part()?;
    let now = mounts_below(&now, &volumes);
    let mut lines = Vec::new();
    for mount in listed {
        let error = errors.iter().find(|(id, _)| *id == mount.id);
        let (result, error) = match error {
            _ if !now.iter().any(|left| left.id == mount.id) => (ReleaseResult::Released, None),
            Some((_, error)) if error.kind() == ErrorKind::ResourceBusy => {
                (ReleaseResult::Busy, None)
            }
            error => (
                ReleaseResult::Refused,
                error.map(|(_, error)| error_chain(error)),
            ),
        };
        let mut line = ReleaseLine::new(Actor::Guard, id, identity.clone());
        line.copies.push(ReleasedCopy {
            mount_point: mount.mount_point.to_string_lossy().into_owned(),
            fs_type: mount.fs_type.0.clone(),
            device: mount.device.to_string(),
            result,
            error,
        });
        lines.push(line);
    }
    Ok(lines)
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
    for entry in fs::read_dir(own.parent().unwrap_or(own))? {
        let bundle = entry?.path();
        if bundle.file_name() == own.file_name() {
            continue;
        }
        match names_in(&bundle) {
            Ok((other, _)) if other.pod.uid.as_deref() != Some(uid) => {}
            Ok(_) => return Err(NotDetached::PodLives(bundle)),
            // Its container ended meanwhile, or is about to be created.
            Err(_) if spec_of(&bundle).try_exists().is_ok_and(|is| !is) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// The names of a bundle's container; true if it is a pod's sandbox.
fn names_in(bundle: &Path) -> Result<(Identity, bool), OpenError> {
    let bytes = read_spec(bundle)?;
    let spec = SpecView::from_bytes(&bytes)?;
    let is_sandbox = spec.annotation(CONTAINER_TYPE) == Some("sandbox");
    Ok((Identity::from_spec(&spec), is_sandbox))
}
