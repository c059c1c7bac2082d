//! The directories of kubelets and runtimes by all their names.
//!
//! `/var/lib/kubelet` is a link to a larger disk on many nodes, or a link is made to where a distribution has it. A spec has
//! the name that the kubelet was started with, the mount table the kernel's, and a config either.

use std::collections::{BTreeSet, HashMap};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use bindguard_core::kubelet::VolumeSubpath;
use bindguard_core::mount_table::MountTable;
use bindguard_core::policy::Policy;
use bindguard_sys::probe::{Answer, probe_side_by_side};
use bindguard_sys::{Handle, Mounts, hold_known, is_at_hand};

use crate::ask::Asking;

/// How long a kubelet's folders may take to answer an operator.
const PATIENCE: Duration = Duration::from_millis(700);

/// A policy that knows its directories by the kernel's names, too; `None` when those are the names that it has.
pub(crate) fn by_all_names(policy: &Policy, asking: &Asking) -> Option<Policy> {
    // On nearly every node that is none.
    let directories: Vec<&Path> = policy.directories().filter(|directory| !Handle::has_one_name(directory)).collect();
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

/// A policy without the kubelets' roots that are wanted and do not answer; `None` when there are none.
///
/// What lies below such a root is for it as anything else on the node: it is asked, and never walked to.
pub(crate) fn without_silent(
    policy: &Policy,
    is_wanted: impl Fn(&Path) -> bool,
    mounts: &Mounts,
    asking: &Asking,
) -> Option<Policy> {
    let is_quick = |root: &Path| is_at_hand(root, |handle| mounts.is_local(handle));
    let wanted = policy.kubelet_roots().filter(|root| is_wanted(root) && !is_quick(root));
    let to_ask: Vec<_> = wanted.map(|root| vec![root.join("pods")]).collect();
    let answers = asking.ask(&to_ask);
    let silent = |root: &PathBuf| {
        let asked = to_ask.iter().zip(&answers).find(|(paths, _)| paths[0].parent() == Some(root));
        asked.is_some_and(|(_, answers)| !answers.reach().is_answer())
    };
    policy.kubelet_roots.iter().any(silent).then(|| {
        let mut policy = policy.clone();
        policy.kubelet_roots.retain(|root| !silent(root));
        policy
    })
}

/// The roots of this node's kubelets that are there and answer, each directory once.
#[derive(Debug, Default)]
pub(crate) struct Roots {
    known: Vec<Root>,
    /// What keeps others from being looked at.
    pub(crate) problems: Vec<String>,
}

/// A kubelet's root.
#[derive(Debug)]
struct Root {
    /// The first of the names that policy has for it.
    named: PathBuf,
    /// The kernel's name.
    real: PathBuf,
}

impl Roots {
    /// Asks each root, by a process apart.
    pub(crate) fn of(policy: &Policy) -> Self {
        let names: Vec<PathBuf> = policy.kubelet_roots().map(Path::to_owned).collect();
        let mut roots = Self::default();
        // Without a process to ask with, they are taken for what they are called.
        let Ok(answers) = probe_side_by_side(&names, PATIENCE) else {
            roots.known = names.into_iter().map(|name| Root { real: name.clone(), named: name }).collect();
            return roots;
        };
        let mut seen = BTreeSet::new();
        for (named, answer) in names.into_iter().zip(answers) {
            match answer {
                Answer::Reached(real) if seen.insert(real.clone()) => roots.known.push(Root { named, real }),
                Answer::Reached(_) => {}
                Answer::Refused(error) if error.kind() == ErrorKind::NotFound => {}
                Answer::Refused(error) => roots.problems.push(format!("look at {}: {error}", named.display())),
                Answer::Silent(_) | Answer::NotAsked => roots.problems.push(format!(
                    "{} did not answer within {} ms: its pods are not looked at",
                    named.display(),
                    PATIENCE.as_millis()
                )),
            }
        }
        roots
    }

    /// Their names.
    pub(crate) fn names(&self) -> impl Iterator<Item = &Path> {
        self.known.iter().map(|root| root.named.as_path())
    }

    /// The mount table with these names in the place of the kernel's.
    pub(crate) fn name_mounts(&self, table: MountTable) -> MountTable {
        let renamed = |table: MountTable, root: &Root| match root.named == root.real {
            true => table,
            false => table.with_name(&root.real, &root.named),
        };
        self.known.iter().fold(table, renamed)
    }

    /// The subpath that a path is, by whichever name.
    fn subpath(&self, path: &Path) -> Option<VolumeSubpath> {
        self.known.iter().find_map(|root| {
            let subpath = VolumeSubpath::from_path(path, [root.named.as_path(), &root.real])?;
            Some(subpath.at_root(&root.named))
        })
    }
}

/// A policy with those of its kubelets' roots alone that are there and answer, and what keeps others from being looked at.
pub fn kubelets_here(policy: &Policy) -> (Policy, Vec<String>) {
    let roots = Roots::of(policy);
    (Policy { kubelet_roots: roots.names().map(Path::to_owned).collect(), ..policy.clone() }, roots.problems)
}

/// The volume-subpath that an operator means, whichever name of a kubelet's root they use.
///
/// # Errors
/// When the path is none; or, in one line, when the kubelet's folders do not answer.
pub fn named_subpath(path: &Path, policy: &Policy) -> Result<VolumeSubpath, String> {
    let roots = Roots::of(policy);
    let found = roots.subpath(path).or_else(|| roots.subpath(&in_real_folder(path, &Asking::of_a_create())?));
    found.ok_or_else(|| {
        let not_one = format!(
            "{} is not a volume-subpath below a kubelet root: see [kubelet] roots in config.toml",
            path.display()
        );
        roots.problems.into_iter().next().unwrap_or(not_one)
    })
}
