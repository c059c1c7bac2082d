//! The mounts and directories of an ended pod: listed, or removed.

use std::cmp::Reverse;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use bindguard_core::mount_table::{MountEntry, MountTable};
use bindguard_core::paths::below;
use bindguard_sys::leftovers::{UnmountError, UnmountFlags, empty_directories, unmount_within};

use super::{AbsentPod, EndedPod, LeftMount, LeftOutcome, PodFolders};

/// Time limit for a umount(2).
const UNMOUNT_TIMEOUT: Duration = Duration::from_secs(5);

/// The action for the leftovers of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeftoversAct {
    /// None: they are listed.
    List,
    /// Those of a pod that has ended are removed.
    Remove,
}

/// The mounts and directories that a pod left. `table` has the kernel's names.
pub fn left_by(
    pod: AbsentPod,
    folders: &PodFolders,
    table: &MountTable,
    act: LeftoversAct,
) -> EndedPod {
    let folder = folders.of(&pod.uid);
    let confirmed = pod.is_confirmed();
    let removes = confirmed && act == LeftoversAct::Remove;
    let mounts = mounts_below(&folder, table)
        .into_iter()
        .map(|entry| LeftMount {
            mount_point: entry.mount_point.clone(),
            fs_type: entry.fs_type.0.clone(),
            source: entry.source.to_string_lossy().into_owned(),
            outcome: outcome(entry, &folder, removes),
        })
        .collect();
    let left = empty_directories(&folder, removes);
    EndedPod {
        uid: pod.uid,
        folder,
        absent_s: pod.absent_s,
        confirmed,
        mounts,
        removed: removes,
        empty_directories: left.empty,
        files: left.files,
        file_count: left.file_count,
        problems: left.problems,
    }
}

/// The deepest first, and of a stack the topmost: the table lists it last.
fn mounts_below<'t>(folder: &Path, table: &'t MountTable) -> Vec<&'t MountEntry> {
    let mut mounts: Vec<_> = table
        .entries()
        .iter()
        .enumerate()
        .filter(|(_, entry)| below(&entry.mount_point, folder).is_some())
        .collect();
    mounts.sort_by_key(|(place, entry)| Reverse((entry.mount_point.components().count(), *place)));
    mounts.into_iter().map(|(_, entry)| entry).collect()
}

fn outcome(entry: &MountEntry, folder: &Path, removes: bool) -> LeftOutcome {
    if is_block_device_of_csi(entry, folder) {
        return LeftOutcome::BlockDevice;
    }
    if !removes {
        return LeftOutcome::Left;
    }
    let how = UnmountFlags::empty();
    match unmount_within(UNMOUNT_TIMEOUT, &entry.mount_point, entry.id, how) {
        Ok(()) => LeftOutcome::Unmounted,
        Err(UnmountError::Busy) => LeftOutcome::Busy,
        Err(error) => LeftOutcome::Failed {
            error: error.to_string(),
        },
    }
}

/// Only the driver detaches the device, after its own NodeUnpublishVolume. btrfs has no device
/// number of its own in the table, so the source counts as well.
fn is_block_device_of_csi(entry: &MountEntry, folder: &Path) -> bool {
    let names: Vec<&OsStr> = below(&entry.mount_point, folder)
        .map(|path| path.iter().collect())
        .unwrap_or_default();
    let is_on_device = entry.device.major != 0 || entry.source.as_bytes().starts_with(b"/dev/");
    match names.as_slice() {
        [kind, ..] if *kind == "volumeDevices" => true,
        [kind, plugin, ..] => *kind == "volumes" && *plugin == "kubernetes.io~csi" && is_on_device,
        _ => false,
    }
}
