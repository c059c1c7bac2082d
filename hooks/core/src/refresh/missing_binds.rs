//! Binds of a spec that were mounted in a directory of a volume, and are gone.
//!
//! A container can bind a file of one configMap in the directory of another configMap. An update by
//! the kubelet removes the old directory. Since Linux 3.18 the removal detaches every mount in the
//! directory, in every mount namespace. The container then reads the directory's own file.

use std::path::PathBuf;

use super::SubpathInContainer;
use crate::mount_table::MountTable;
use crate::paths::lies_below;
use crate::spec::SpecView;

/// A bind of a container's spec.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpecBind {
    /// The path in the container.
    pub destination: PathBuf,
    /// The path on the host.
    pub source: PathBuf,
}

impl SpecBind {
    /// The binds of a spec.
    pub fn of_spec(spec: &SpecView<'_>) -> Vec<Self> {
        let bind = |destination: PathBuf, source: PathBuf| Self {
            destination,
            source,
        };
        spec.binds()
            .iter()
            .map(|it| bind(it.destination().to_owned(), it.source().to_owned()))
            .collect()
    }
}

/// The binds below the mount of a directory that the table has no longer. A directory whose
/// destination has a symlink is left out: the table has the resolved paths.
pub fn missing_binds<'b>(
    table: &MountTable,
    subpaths: &[SubpathInContainer],
    binds: &'b [SpecBind],
) -> Vec<&'b SpecBind> {
    let is_mounted = |bind: &SpecBind| table.stack_at(&bind.destination).next().is_some();
    let is_in = |bind: &SpecBind, directory: &PathBuf| lies_below(&bind.destination, directory);
    let outer: Vec<&PathBuf> = subpaths
        .iter()
        .map(|subpath| &subpath.mount.mount_point)
        .collect();
    let of_spec = |directory: &&&PathBuf| binds.iter().any(|bind| bind.destination == ***directory);
    let outer: Vec<&PathBuf> = outer.iter().filter(of_spec).copied().collect();
    let is_nested = |bind: &&SpecBind| outer.iter().any(|directory| is_in(bind, directory));
    binds
        .iter()
        .filter(is_nested)
        .filter(|bind| !is_mounted(bind))
        .collect()
}
