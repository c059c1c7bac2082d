//! The directories of kubelets and runtimes by all their names.
//!
//! `/var/lib/kubelet` is a link to a larger disk on many nodes, or a link leads to the place that a
//! distribution uses. A spec has the name that the kubelet was started with, the mount table has
//! the kernel's name, and a config may have either.

use std::collections::HashMap;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use bindguard_core::places::Places;
use bindguard_sys::{Handle, Mounts, open_without_waiting};

use crate::probes::Probes;
use crate::roots_in_use::RootsInUse;

/// The places with the kernel's names of their directories added; `None` if the kernel has no
/// further names.
pub(crate) fn by_all_names(places: &Places, roots: &RootsInUse, probes: &Probes) -> Option<Places> {
    // On nearly every node this is empty.
    let has_one_name =
        |directory: &&Path| roots.have_one_name(directory) || Handle::has_one_name(directory);
    let directories: Vec<&Path> = places
        .directories()
        .filter(|directory| !has_one_name(directory))
        .collect();
    if directories.is_empty() {
        return None;
    }
    let real: HashMap<&Path, PathBuf> = directories
        .iter()
        .copied()
        .zip(real_names(&directories, probes))
        .filter_map(|(name, real)| Some((name, real?)))
        .collect();
    places.with_names(|directory| real.get(directory).cloned())
}

/// A path whose directory has no links in it. Its last name is unchanged: the kernel has none for a
/// deleted file.
pub fn in_real_folder(path: &Path, probes: &Probes) -> Option<PathBuf> {
    Some(
        real_names(&[path.parent()?], probes)
            .pop()??
            .join(path.file_name()?),
    )
}

/// The kubelets' roots by the names of the places, and by the kernel's names.
pub fn kubelet_roots_by_all_names(places: &Places, probes: &Probes) -> Vec<PathBuf> {
    let named: Vec<&Path> = places.kubelet_roots().collect();
    let real = real_names(&named, probes).into_iter().flatten();
    let mut names: Vec<PathBuf> = named.iter().map(|root| root.to_path_buf()).collect();
    for root in real {
        if !names.contains(&root) {
            names.push(root);
        }
    }
    names
}

/// The kernel's names of these paths. Most names are in the kernel's cache. The remaining paths are
/// probed in a separate process, because a server may have to answer. The kernel counts reading a
/// link as an access, so a cached link may still not be followed.
fn real_names(paths: &[&Path], probes: &Probes) -> Vec<Option<PathBuf>> {
    let mounts = Mounts::default();
    let known: Vec<_> = paths
        .iter()
        .map(|path| open_without_waiting(path, |folder| mounts.is_local(folder)))
        .collect();
    let is_cold = |known: &io::Result<Handle>| {
        known
            .as_ref()
            .is_err_and(|error| error.kind() != ErrorKind::NotFound)
    };
    let cold = paths
        .iter()
        .zip(&known)
        .filter(|(_, known)| is_cold(known))
        .map(|(path, _)| vec![path.to_path_buf()]);
    let mut probed = probes.probe(&cold.collect::<Vec<_>>()).into_iter();
    let mut name = |known: io::Result<Handle>| match known {
        Ok(handle) => handle.resolved_path().ok(),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(_) => probed.next()?.resolved().map(Path::to_owned),
    };
    known.into_iter().map(&mut name).collect()
}
