//! The directories of kubelets and runtimes by all their names.
//!
//! `/var/lib/kubelet` is a link to a larger disk on many nodes, or a link leads to the place that a
//! distribution uses. A spec has the name that the kubelet was started with, the mount table has
//! the kernel's name, and a config may have either.

use std::cell::OnceCell;
use std::collections::HashMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use bindguard_core::mount_table::MountEntry;
use bindguard_core::places::Places;
use bindguard_core::policy::Scope;
use bindguard_sys::{Handle, MountError, Mounts};

use crate::probes::Probes;

/// The places with the kernel's names of their directories added; `None` if the kernel has no
/// further names.
pub(crate) fn by_all_names(places: &Places, roots: &RootsInUse, probes: &Probes) -> Option<Places> {
    // On nearly every node this is empty.
    let mut directories: Vec<&Path> = places.directories().collect();
    directories
        .retain(|directory| !roots.have_one_name(directory) && !Handle::has_one_name(directory));
    if directories.is_empty() {
        return None;
    }
    let mut real = HashMap::new();
    for (name, kernels) in directories.iter().zip(real_names(&directories, probes)) {
        real.extend(kernels.map(|kernels| (*name, kernels)));
    }
    places.with_names(|directory| real.get(directory).cloned())
}

/// A path whose directory has no links in it. Its last name is unchanged: the kernel has none for a
/// deleted file.
pub fn in_real_folder(path: &Path, probes: &Probes) -> Option<PathBuf> {
    let folder = real_names(&[path.parent()?], probes).pop()??;
    Some(folder.join(path.file_name()?))
}

/// The kubelets' roots by the names of the places, and by the kernel's names.
pub fn kubelet_roots_by_all_names(places: &Places, probes: &Probes) -> Vec<PathBuf> {
    let named: Vec<&Path> = places.kubelet_roots().collect();
    let mut names: Vec<PathBuf> = named.iter().map(|root| root.to_path_buf()).collect();
    for root in real_names(&named, probes).into_iter().flatten() {
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
    let (mut names, mut cold) = (Vec::with_capacity(paths.len()), Vec::new());
    for (index, path) in paths.iter().enumerate() {
        let known = mounts.open_without_waiting(path);
        if known
            .as_ref()
            .is_err_and(|error| error.kind() != ErrorKind::NotFound)
        {
            cold.push((index, vec![path.to_path_buf()]));
        }
        names.push(known.ok().and_then(|handle| handle.resolved_path().ok()));
    }
    let (indices, cold): (Vec<_>, Vec<_>) = cold.into_iter().unzip();
    for (index, answers) in indices.into_iter().zip(probes.probe(&cold)) {
        names[index] = answers.resolved().map(Path::to_owned);
    }
    names
}

// Opens or probes the kubelets' roots that a spec names, and reads their mounts.

/// Those roots.
#[derive(Debug, Default)]
pub(crate) struct RootsInUse {
    held: Vec<Handle>,
    silent: Vec<PathBuf>,
    mounts: OnceCell<Result<Vec<Rc<MountEntry>>, Rc<MountError>>>,
}

impl RootsInUse {
    /// Opens the wanted roots that can be reached without waiting, and probes the remaining roots.
    pub(crate) fn of(
        places: &Places,
        is_wanted: impl Fn(&Path) -> bool,
        mounts: &Mounts,
        probes: &Probes,
    ) -> Self {
        let (mut roots, mut others) = (Self::default(), Vec::new());
        for root in places.kubelet_roots().filter(|root| is_wanted(root)) {
            match mounts.open_without_waiting(root) {
                Ok(handle) if mounts.is_local(&handle) => roots.held.push(handle),
                // It does not exist, or the kernel cannot detect that.
                Err(error) if error.kind() != ErrorKind::WouldBlock => {}
                Ok(_) | Err(_) => others.push(root.to_owned()),
            }
        }
        let paths: Vec<_> = others.iter().map(|root| root.join("pods")).collect();
        for (root, reach) in others.into_iter().zip(probes.reaches(&paths)) {
            if !reach.is_answer() {
                roots.silent.push(root);
            }
        }
        roots
    }

    /// The places without the roots that do not answer; `None` if all answer.
    ///
    /// A path below such a root is then like any path of the node: the guard probes the path, and
    /// never walks to it.
    pub(crate) fn without_silent(&self, places: &Places) -> Option<Places> {
        let is_silent = |root: &PathBuf| self.silent.contains(root);
        places.kubelet_roots.iter().any(is_silent).then(|| {
            let mut places = places.clone();
            places.kubelet_roots.retain(|root| !is_silent(root));
            places
        })
    }

    /// True if a path is an open root, and contains no symlink.
    pub(crate) fn have_one_name(&self, path: &Path) -> bool {
        self.held
            .iter()
            .any(|root| root.path_as_written() == Some(path))
    }

    /// True if a path, as the kernel prints it, is another name of a directory above these
    /// kubelets' mounts. Their roots are bound from a larger disk, as on Container-Optimized OS,
    /// and a mount shows at both names.
    ///
    /// # Errors
    /// If the mount of the path or of a root is not known.
    pub(crate) fn show_below(
        &self,
        held: &Handle,
        path: &Path,
        mounts: &Mounts,
        places: &Places,
        scope: Scope,
    ) -> Result<bool, Rc<MountError>> {
        let roots = self.mounts(mounts).as_ref().map_err(Rc::clone)?;
        let mount = mounts.mount_of(held).map_err(Rc::new)?;
        let mut names = roots
            .iter()
            .filter_map(|other| mount.entry.name_at_origin(path, other));
        Ok(names.any(|name| places.holds_runtime_mounts(&name, scope)))
    }

    fn mounts(&self, mounts: &Mounts) -> &Result<Vec<Rc<MountEntry>>, Rc<MountError>> {
        let mount = |root: &Handle| Ok(mounts.mount_of(root).map_err(Rc::new)?.entry);
        self.mounts
            .get_or_init(|| self.held.iter().map(mount).collect())
    }
}
