//! The roots of this node's kubelets, as far as they answer.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bindguard_core::evidence::FileIdentity;
use bindguard_core::kubelet::VolumeSubpath;
use bindguard_core::mount_table::MountTable;
use bindguard_core::places::Places;
use bindguard_guard::{Probes, in_real_folder};
use bindguard_sys::Handle;
use bindguard_sys::probe::{Answer, probe_side_by_side};

/// Time limit for a kubelet's directories when an operator waits.
const PROBE_TIMEOUT: Duration = Duration::from_millis(700);

/// The roots of this node's kubelets that exist and answer, each directory once.
#[derive(Debug, Default)]
pub(crate) struct Roots {
    known: Vec<Root>,
    /// The reasons why other roots are not inspected.
    pub(crate) problems: Vec<String>,
}

/// A kubelet's root.
#[derive(Debug)]
struct Root {
    /// The first name that the places have for it.
    named: PathBuf,
    /// The kernel's name.
    real: PathBuf,
}

impl Roots {
    /// Probes each root in a separate process.
    pub(crate) fn of(places: &Places) -> Self {
        let names: Vec<PathBuf> = places.kubelet_roots().map(Path::to_owned).collect();
        let mut roots = Self::default();
        // If no process can be started, the configured names are used unchecked.
        let Ok(answers) = probe_side_by_side(&names, PROBE_TIMEOUT) else {
            roots.known = names
                .into_iter()
                .map(|name| Root {
                    real: name.clone(),
                    named: name,
                })
                .collect();
            return roots;
        };
        let mut seen = Vec::new();
        for (named, answer) in names.into_iter().zip(answers) {
            match answer {
                Answer::Reached(real) => {
                    // A bind, as on minikube, is another name as much as a symlink is.
                    let identity = Handle::of(&real).and_then(|handle| handle.identity()).ok();
                    let is_known = |(path, file): &(PathBuf, Option<FileIdentity>)| {
                        *path == real || identity.is_some() && *file == identity
                    };
                    if !seen.iter().any(is_known) {
                        seen.push((real.clone(), identity));
                        roots.known.push(Root { named, real });
                    }
                }
                Answer::Refused(error) if error.kind() == ErrorKind::NotFound => {}
                Answer::Refused(error) => roots
                    .problems
                    .push(format!("probe {}: {error}", named.display())),
                Answer::Silent(_) | Answer::NotProbed => roots.problems.push(format!(
                    "{} did not answer within {} ms: its pods are not checked",
                    named.display(),
                    PROBE_TIMEOUT.as_millis()
                )),
            }
        }
        roots
    }

    /// Their names.
    pub(crate) fn names(&self) -> impl Iterator<Item = &Path> + Clone {
        self.known.iter().map(|root| root.named.as_path())
    }

    /// The mount table with these names instead of the kernel's.
    pub(crate) fn name_mounts(&self, table: MountTable) -> MountTable {
        let renamed = |table: MountTable, root: &Root| match root.named == root.real {
            true => table,
            false => table.with_name(&root.real, &root.named),
        };
        self.known.iter().fold(table, renamed)
    }

    /// The subpath at a path, given by any name.
    fn subpath(&self, path: &Path) -> Option<VolumeSubpath> {
        self.known.iter().find_map(|root| {
            let subpath = VolumeSubpath::from_path(path, [root.named.as_path(), &root.real])?;
            Some(subpath.at_root(&root.named))
        })
    }

    fn not_a_subpath(self, path: &Path) -> NotASubpath {
        let problem = self.problems.into_iter().next();
        problem.map_or_else(
            || NotASubpath::Other(path.to_owned()),
            NotASubpath::Unchecked,
        )
    }
}

/// The kubelet roots that exist and answer, and the reasons why other roots are not inspected.
pub fn kubelets_here(places: &Places) -> (Vec<PathBuf>, Vec<String>) {
    let roots = Roots::of(places);
    (roots.names().map(Path::to_owned).collect(), roots.problems)
}

/// Why an operator's path was not accepted.
#[derive(Debug, thiserror::Error)]
pub enum NotASubpath {
    /// A kubelet's directories could not be checked.
    #[error("{0}")]
    Unchecked(String),
    /// The path is no exact path of a volume-subpath.
    #[error("{} is not a volume-subpath below a kubelet root: see [kubelet] roots in config.toml", .0.display())]
    Other(PathBuf),
}

/// The volume-subpath at a path that is written as the kubelet or the mount table writes it: below
/// a kubelet's root, without symlinks, `..`, `.` or doubled slashes.
///
/// # Errors
/// If the path is no such path, or if the kubelet's directories do not answer.
pub fn exact_subpath(path: &Path, places: &Places) -> Result<VolumeSubpath, NotASubpath> {
    let roots = Roots::of(places);
    let normal: PathBuf = path.components().collect();
    let is_exact =
        |_: &VolumeSubpath| normal.as_os_str() == path.as_os_str() && !is_below_a_link(path);
    let found = roots.subpath(path).filter(is_exact);
    found.ok_or_else(|| roots.not_a_subpath(path))
}

/// True if a folder between a kubelet's root and the subpath is a symlink. The subpath itself may
/// be on a server that does not answer; where it is a symlink, no mount is at its path.
fn is_below_a_link(subpath: &Path) -> bool {
    /// `pods/UID/volume-subpaths/VOLUME/CONTAINER`
    const FOLDERS: usize = 5;
    let is_link = |folder: &Path| {
        folder
            .symlink_metadata()
            .is_ok_and(|metadata| metadata.is_symlink())
    };
    subpath.ancestors().skip(1).take(FOLDERS).any(is_link)
}

/// The volume-subpath at an operator's path, given by any name of a kubelet's root.
///
/// # Errors
/// If the path is no volume-subpath, or if the kubelet's directories do not answer.
pub fn named_subpath(path: &Path, places: &Places) -> Result<VolumeSubpath, NotASubpath> {
    let roots = Roots::of(places);
    let found = roots
        .subpath(path)
        .or_else(|| roots.subpath(&in_real_folder(path, &Probes::for_create())?));
    found.ok_or_else(|| roots.not_a_subpath(path))
}
