//! All volumes of a node, by the kubelet's folders.

use std::path::{Path, PathBuf};

use bindguard_core::kubelet::MountedVolume;

use super::subpaths::{SubpathsError, children};

/// The volumes below a kubelet root, sorted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Volumes {
    /// The volumes that need a mount.
    pub mounted: Vec<MountedVolume>,
    /// The directories of volumes that need no mount: the content of the directory, on any
    /// filesystem, is the volume.
    pub plain: Vec<PathBuf>,
}

/// Lists the volumes below a kubelet root. A missing root has no volumes.
///
/// The folders above a volume are the kubelet's own and on its disk; the volumes themselves are not
/// touched.
///
/// # Errors
/// When a folder cannot be read.
pub fn list_volumes(kubelet_root: &Path) -> Result<Volumes, SubpathsError> {
    let mut found = Volumes::default();
    for pod in children(&kubelet_root.join("pods"))? {
        for plugin in children(&pod.join("volumes"))? {
            for volume in children(&plugin)? {
                match mounted(&volume, kubelet_root) {
                    Some(mounted) => found.mounted.push(mounted),
                    None => found.plain.push(volume),
                }
            }
        }
    }
    found
        .mounted
        .sort_by(|one, other| one.mount_point().cmp(other.mount_point()));
    found.plain.sort();
    Ok(found)
}

/// CSI mounts a volume one folder deeper than the in-tree plugins.
fn mounted(volume: &Path, kubelet_root: &Path) -> Option<MountedVolume> {
    let places: [PathBuf; 2] = [volume.to_owned(), volume.join("mount")];
    places
        .iter()
        .find_map(|place| MountedVolume::from_path(place, [kubelet_root]))
}
