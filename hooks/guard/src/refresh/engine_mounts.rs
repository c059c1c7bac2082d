//! The binds of a container of Docker or Podman whose source is a mount point of the host that was
//! mounted anew: an NFS share, a FUSE filesystem.
//!
//! A user of the host or a container may be able to rename a folder of the path, which then leads to
//! another mount. So a source is followed only if root alone may write every folder of the path, and
//! no symlink is followed.

use std::path::Path;

use bindguard_core::evidence::FileKind;
use bindguard_core::mount_table::MountTable;
use bindguard_core::places::Places;
use bindguard_core::policy::Scope;
use bindguard_core::refresh::{KeptMounts, NestedBind, SubpathInContainer};
use bindguard_sys::replace::CloneSettings;
use bindguard_sys::{Handle, Mounts, OpenedTarget, open_without_waiting};

use super::current_files::{CurrentFiles, OpenedNested};
use super::files::{place_of, refuse_writable_way, way_to_folder};
use super::host_roots::HostRoots;
use super::mounts::BoundMounts;
use super::outcome::NotReplaced;
use super::running::RunningContainers;
use super::specified_bind::SpecifiedBind;

/// The binds of a container of an engine.
#[derive(Debug)]
pub struct EngineMounts<'a> {
    mounts: BoundMounts,
    others: &'a dyn RunningContainers,
}

impl<'a> EngineMounts<'a> {
    /// The binds of directories of the container with this bundle. Left out are the host-root binds:
    /// the binds of `roots`, and of directories in or above which a kubelet or a runtime mounts
    /// (`places`). `others` are the running containers that may be able to write a folder on the way
    /// to a source. None if the bundle has no spec.
    pub fn open(
        bundle: &Path,
        others: &'a dyn RunningContainers,
        places: &Places,
        roots: Option<&HostRoots>,
    ) -> Option<Self> {
        let is_root = |source: &Path| {
            places.holds_runtime_mounts(source, Scope::RuntimeDirectories)
                || roots.is_some_and(|roots| roots.has(source))
        };
        let is_volume =
            |source: &Path| source.is_absolute() && !is_root(source) && !is_of_file(source);
        let mounts = BoundMounts::with_binds(bundle, |bind| {
            SpecifiedBind::of(bind, is_volume(bind.source()))
        })?;
        Some(Self { mounts, others })
    }

    /// Refuses a source if a container or a user may have led the way to `root` elsewhere.
    fn judge(&self, stale: &SubpathInContainer, root: &Handle) -> Result<(), NotReplaced> {
        let source = &stale.volume;
        let (Some(directory), Some(name)) = (source.parent(), source.file_name()) else {
            return Err(NotReplaced::Changed);
        };
        let way = way_to_folder(directory)?.to_mount_point(name);
        let way = way.ok_or(NotReplaced::Changed)?;
        let relied_on = way.all_relied_on()?;
        let place = place_of(root, &Mounts::default())?;
        let to_write = !stale.mount.is_read_only();
        Ok(refuse_writable_way(
            &way,
            &relied_on,
            (&place, to_write),
            self.others,
        )?)
    }
}

impl CurrentFiles for EngineMounts<'_> {
    fn shown_in(&self, table: &MountTable) -> Vec<SubpathInContainer> {
        self.mounts.shown_in(table)
    }

    fn open_current(
        &self,
        stale: &SubpathInContainer,
    ) -> Option<Result<OpenedTarget, NotReplaced>> {
        let opened = self.mounts.open_current(stale)?;
        Some(opened.and_then(|target| match &target.file {
            Some(root) => self.judge(stale, root).map(|()| target),
            None => Ok(target),
        }))
    }

    fn probe_sources(&self, stale: &[&SubpathInContainer]) {
        self.mounts.probe_sources(stale);
    }

    fn note_replacement(
        &self,
        stale: &SubpathInContainer,
        file: &Handle,
    ) -> Result<(), NotReplaced> {
        self.mounts.note_replacement(stale, file)
    }

    fn note_attached(&self, new: &SubpathInContainer, table: &MountTable) {
        self.mounts.note_attached(new, table);
    }

    fn mounts_below(
        &self,
        stale: &SubpathInContainer,
        table: &MountTable,
    ) -> Result<Option<KeptMounts>, NotReplaced> {
        self.mounts.mounts_below(stale, table)
    }

    fn open_nested(&self, nested: &NestedBind) -> Result<OpenedNested, NotReplaced> {
        self.mounts.open_nested(nested)
    }

    fn clone_settings(&self, stale: &SubpathInContainer) -> CloneSettings {
        self.mounts.clone_settings(stale)
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
