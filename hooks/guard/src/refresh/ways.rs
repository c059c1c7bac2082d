//! The ways to sources on the host. A container or a user that may write a folder of a way can lead
//! the way to another file.

use std::path::Path;

use bindguard_core::evidence::FilePlace;
use bindguard_core::refresh::{
    Refused, RefusedReason, ReliedOn, SubpathInContainer, Way, WayFolder, can_lead,
};
use bindguard_sys::{Handle, Mounts, WalkedFolder, walk_host_path};

use super::bound_file_error::BoundFileError;
use super::outcome::NotReplaced;
use super::place::place_of;
use super::running::{RunningContainers, Writer, WriterReach};

/// Refuses a way to a file if a running container may write a folder that the way relies on, and
/// has no access to the file. With `to_write`, read access is no access.
pub(super) fn refuse_writable_way(
    way: &Way,
    relied_on: &[ReliedOn<'_>],
    (file, to_write): (&FilePlace, bool),
    others: &dyn RunningContainers,
) -> Result<(), Refused> {
    if relied_on.is_empty() {
        return Ok(());
    }
    let mut first: Option<(usize, RefusedReason, String)> = None;
    for Writer { name, reach } in others.writers() {
        let leads = |folder: &FilePlace| match &reach {
            WriterReach::Mounts { table, hidden } => {
                can_lead(table, hidden, folder, file, to_write)
            }
            WriterReach::Spec(places) => places.iter().any(|place| folder.lies_in(place)),
            WriterReach::Unknown => true,
        };
        let mut folders = relied_on.iter();
        let Some(led) = folders.position(|it| leads(&it.folder.place)) else {
            continue;
        };
        if first.as_ref().is_none_or(|(first, ..)| led < *first) {
            let reason = match reach {
                WriterReach::Mounts { .. } => relied_on[led].reason,
                WriterReach::Spec(_) | WriterReach::Unknown => RefusedReason::MountsUnknown,
            };
            first = Some((led, reason, name));
        }
        if led == 0 {
            break;
        }
    }
    match first {
        Some((led, reason, name)) => Err(way.refusal(&relied_on[led], reason).with_error(name)),
        None => Ok(()),
    }
}

/// Refuses the mount point of a stale mount's source if a container or a user may have led the way
/// to `root` elsewhere.
pub(super) fn refuse_unsafe_way(
    stale: &SubpathInContainer,
    root: &Handle,
    others: &dyn RunningContainers,
) -> Result<(), NotReplaced> {
    let source = &stale.volume;
    let (Some(directory), Some(name)) = (source.parent(), source.file_name()) else {
        return Err(NotReplaced::Changed);
    };
    let way = way_to_folder(directory)?.to_mount_point(name);
    let way = way.ok_or(NotReplaced::Changed)?;
    let relied_on = way.all_relied_on()?;
    let place = place_of(root, &Mounts::default()).map_err(BoundFileError::from)?;
    let to_write = !stale.mount.is_read_only();
    Ok(refuse_writable_way(
        &way,
        &relied_on,
        (&place, to_write),
        others,
    )?)
}

/// The way to a folder of the host.
pub(super) fn way_to_folder(folder: &Path) -> Result<Way, BoundFileError> {
    let walk = walk_host_path(folder)?;
    Ok(Way {
        folders: folders_on_the_way(&walk.folders, &Mounts::default())?,
        look_ups: walk.look_ups,
    })
}

pub(super) fn folders_on_the_way(
    folders: &[WalkedFolder],
    mounts: &Mounts,
) -> Result<Vec<WayFolder>, BoundFileError> {
    let folder = |folder: &WalkedFolder| {
        Ok(WayFolder {
            path: folder.handle.path().to_owned(),
            place: place_of(&folder.handle, mounts)?,
            owner: folder.owner,
            mode: folder.mode,
            born: folder.born,
        })
    };
    folders.iter().map(folder).collect()
}
