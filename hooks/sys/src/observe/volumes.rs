//! All volumes of a node that have to be mounted, by the kubelet's folders.

use std::path::{Path, PathBuf};

use bindguard_core::kubelet::MountedVolume;

use super::subpaths::{SubpathsError, children};

/// Lists the volumes below one kubelet root that are nothing without a mount, sorted. A root that is not there has none.
///
/// The folders above a volume are the kubelet's own and on its disk; the volumes themselves are not touched.
///
/// # Errors
/// When a folder cannot be read.
pub fn list_volumes(kubelet_root: &Path) -> Result<Vec<MountedVolume>, SubpathsError> {
    let mut found = Vec::new();
    for pod in children(&kubelet_root.join("pods"))? {
        for plugin in children(&pod.join("volumes"))? {
            found.extend(children(&plugin)?.into_iter().filter_map(|volume| mounted(&volume, kubelet_root)));
        }
    }
    found.sort_by(|one: &MountedVolume, other| one.mount_point().cmp(other.mount_point()));
    Ok(found)
}

/// CSI mounts one folder deeper than the others.
fn mounted(volume: &Path, kubelet_root: &Path) -> Option<MountedVolume> {
    let places: [PathBuf; 2] = [volume.to_owned(), volume.join("mount")];
    places.iter().find_map(|place| MountedVolume::from_path(place, [kubelet_root]))
}
