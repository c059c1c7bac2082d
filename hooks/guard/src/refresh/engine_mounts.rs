//! The binds of a container of Docker or Podman whose source is a mount point of the host that was
//! mounted anew: an NFS share, a FUSE filesystem.
//!
//! A user of the host or a container may be able to rename a folder of the path, which then leads to
//! another mount. So a source is followed only if root alone may write every folder of the path, and
//! no symlink is followed.

use std::path::Path;

use bindguard_core::evidence::FileKind;
use bindguard_core::places::Places;
use bindguard_core::policy::Scope;
use bindguard_core::spec::Bind;
use bindguard_sys::{Mounts, open_without_waiting};

use crate::admission::OpenError;

use super::host_roots::HostRoots;
use super::mounts::BoundMounts;
use super::running::RunningContainers;
use super::specified_bind::SpecifiedBind;

impl<'a> BoundMounts<'a> {
    /// The binds of directories of an engine's container with this bundle. Left out are the host-root
    /// binds: the binds of `roots`, and of directories in or above which a kubelet or a runtime
    /// mounts (`places`). `others` are the running containers.
    ///
    /// # Errors
    /// If the bundle has no spec.
    pub fn of_engine(
        bundle: &Path,
        others: &'a dyn RunningContainers,
        places: &Places,
        roots: Option<&HostRoots>,
    ) -> Result<Self, OpenError> {
        let is_root = |source: &Path| {
            places.holds_runtime_mounts(source, Scope::RuntimeDirectories)
                || roots.is_some_and(|roots| roots.has(source))
        };
        let is_volume =
            |source: &Path| source.is_absolute() && !is_root(source) && !is_of_file(source);
        let specified = |bind: &Bind<'_>| SpecifiedBind::of(bind, is_volume(bind.source()));
        Self::with_binds(bundle, specified, Some(others))
    }
}

/// True for a single file that can be reached without waiting: [`super::files`] follows these.
fn is_of_file(source: &Path) -> bool {
    let mounts = Mounts::default();
    let local = open_without_waiting(source, |handle| mounts.is_local(handle));
    let local = local.ok().filter(|handle| mounts.is_local(handle));
    let identity = local.and_then(|handle| handle.identity().ok());
    identity.is_some_and(|identity| identity.kind != FileKind::Directory)
}
