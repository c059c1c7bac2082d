//! Opens or probes the kubelets' roots that a spec names, and reads their mounts.

use std::cell::OnceCell;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use bindguard_core::mount_table::MountEntry;
use bindguard_core::places::Places;
use bindguard_core::policy::Scope;
use bindguard_sys::{Handle, MountError, Mounts, open_without_waiting};

use crate::probes::Probes;

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
        let (mut held, mut others) = (Vec::new(), Vec::new());
        for root in places.kubelet_roots().filter(|root| is_wanted(root)) {
            match open_without_waiting(root, |handle| mounts.is_local(handle)) {
                Ok(handle) if mounts.is_local(&handle) => held.push(handle),
                // It does not exist, or the kernel cannot detect that.
                Err(error) if error.kind() != ErrorKind::WouldBlock => {}
                Ok(_) | Err(_) => others.push(root.to_owned()),
            }
        }
        let paths_to_probe: Vec<_> = others.iter().map(|root| vec![root.join("pods")]).collect();
        let answers = probes.probe(&paths_to_probe);
        let silent = others
            .into_iter()
            .zip(answers)
            .filter(|(_, answers)| !answers.reach().is_answer());
        Self {
            held,
            silent: silent.map(|(root, _)| root).collect(),
            mounts: OnceCell::new(),
        }
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
