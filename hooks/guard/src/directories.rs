//! The directories of kubelets and runtimes by all their names.
//!
//! `/var/lib/kubelet` is a link to a larger disk on many nodes, or a link is made to where a distribution has it. A spec has
//! the name that the kubelet was started with, the mount table the kernel's, and a config either.

use std::collections::HashMap;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use bindguard_core::policy::Policy;
use bindguard_sys::{Handle, Mounts, hold_known};

use crate::ask::Asking;
use crate::roots_in_use::RootsInUse;

/// A policy that knows its directories by the kernel's names, too; `None` when those are the names that it has.
pub(crate) fn by_all_names(policy: &Policy, roots: &RootsInUse, asking: &Asking) -> Option<Policy> {
    // On nearly every node that is none.
    let has_one_name = |directory: &&Path| roots.have_one_name(directory) || Handle::has_one_name(directory);
    let directories: Vec<&Path> = policy.directories().filter(|directory| !has_one_name(directory)).collect();
    if directories.is_empty() {
        return None;
    }
    let real: HashMap<&Path, PathBuf> = directories
        .iter()
        .copied()
        .zip(real_names(&directories, asking))
        .filter_map(|(name, real)| Some((name, real?)))
        .collect();
    policy.with_names(|directory| real.get(directory).cloned())
}

/// A path whose folder has no links in it any more. Its last name is left as it is: the kernel has none for a file that was
/// deleted.
pub(crate) fn in_real_folder(path: &Path, asking: &Asking) -> Option<PathBuf> {
    Some(real_names(&[path.parent()?], asking).pop()??.join(path.file_name()?))
}

/// What the kernel calls these paths. It knows most by heart; of others it is asked by a process apart, lest a server has to
/// answer. It counts reading a link as an access, and so may know a link and not follow it.
fn real_names(paths: &[&Path], asking: &Asking) -> Vec<Option<PathBuf>> {
    let mounts = Mounts::default();
    let known: Vec<_> = paths.iter().map(|path| hold_known(path, |folder| mounts.is_local(folder))).collect();
    let is_cold = |known: &io::Result<Handle>| known.as_ref().is_err_and(|error| error.kind() != ErrorKind::NotFound);
    let cold = paths.iter().zip(&known).filter(|(_, known)| is_cold(known)).map(|(path, _)| vec![path.to_path_buf()]);
    let mut told = asking.ask(&cold.collect::<Vec<_>>()).into_iter();
    let mut name = |known: io::Result<Handle>| match known {
        Ok(handle) => handle.resolved_path().ok(),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(_) => told.next()?.resolved().map(Path::to_owned),
    };
    known.into_iter().map(&mut name).collect()
}
