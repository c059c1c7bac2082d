//! All volume-subpaths of a node, by the kubelet's folders.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use bindguard_core::kubelet::VolumeSubpath;

use crate::read_file::unless_absent;

/// Why a kubelet's folders could not be listed.
#[derive(Debug, thiserror::Error)]
#[error("list {}", directory.display())]
pub struct SubpathsError {
    /// The folder.
    pub directory: PathBuf,
    /// The kernel's error.
    #[source]
    pub source: io::Error,
}

/// Lists the volume-subpaths below a kubelet root, sorted. A missing root has no subpaths.
///
/// The folders above a subpath are the kubelet's own and on its disk; the subpaths themselves are
/// not touched.
///
/// # Errors
/// If a directory cannot be read. A directory that is removed meanwhile is no error: its pod goes
/// away.
pub fn list_subpaths(kubelet_root: &Path) -> Result<Vec<VolumeSubpath>, SubpathsError> {
    let mut found = Vec::new();
    for pod in children(&kubelet_root.join("pods"))? {
        for volume in children(&pod.join("volume-subpaths"))? {
            for container in children(&volume)? {
                let paths = children(&container)?;
                found.extend(
                    paths
                        .iter()
                        .filter_map(|path| VolumeSubpath::from_path(path, [kubelet_root])),
                );
            }
        }
    }
    found.sort_by_key(VolumeSubpath::path);
    Ok(found)
}

/// True if a subpath is still in its directory. The kubelet removes those of a pod that goes away.
///
/// It reads the directory, which is on the kubelet's disk: opening the subpath itself may wait for
/// a server.
pub fn is_listed(subpath: &VolumeSubpath) -> bool {
    let path = subpath.path();
    let siblings = path.parent().map(children);
    siblings.is_none_or(|siblings| siblings.is_ok_and(|siblings| siblings.contains(&path)))
}

/// The paths in a directory; none if it is missing or a plain file.
///
/// # Errors
/// If the directory cannot be read.
pub fn children(directory: &Path) -> Result<Vec<PathBuf>, SubpathsError> {
    let failed = |source| SubpathsError {
        directory: directory.to_owned(),
        source,
    };
    let entries = unless_absent(fs::read_dir(directory)).map_err(failed)?;
    entries
        .into_iter()
        .flatten()
        .map(|entry| entry.map(|entry| entry.path()).map_err(failed))
        .collect()
}
