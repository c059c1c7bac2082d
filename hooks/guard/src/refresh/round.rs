//! A child's visit to a container: opens every stale mount, attaches every new mount, then detaches
//! the stale mounts.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bindguard_core::evidence::FilePlace;
use bindguard_core::mount_table::{MountEntry, MountTable};
use bindguard_core::refresh::{
    KeptMounts, Refused, RefusedReason, SpecBind, SubpathInContainer, changed_by_tuck,
};
use bindguard_core::refresh_request::Notify;
use bindguard_core::spec::SpecUsers;
use bindguard_sys::enter::{
    Abandoned, Action, ContainerNamespace, EnterError, Entered, HeldProcess, HelperProcess,
};
use bindguard_sys::replace::ReplaceError;
use bindguard_sys::{Handle, MountError, Mounts, fault, selinux_denies_read};

use crate::rebind::MAX_FAILURES;
use crate::refresh::current_files::CurrentFiles;
use crate::refresh::outcome::{AttachMethod, NotNotified, NotReplaced, RefreshError};
use crate::refresh::records::TuckRecords;

/// A child's visit to the container.
pub(super) struct Round<'r, 'a, 's> {
    pub(super) refresh: &'r mut ContainerRefresh<'a>,
    pub(super) subpaths: &'r [&'s SubpathInContainer],
    /// The mounts below each when the new mounts were made.
    pub(super) below: &'r [Option<KeptMounts>],
    pub(super) entered: &'r Entered,
}

impl Round<'_, '_, '_> {
    /// Returns true if the child gave no answer and may still change mounts.
    pub(super) fn run(&mut self) -> Result<bool, RefreshError> {
        let all: Vec<usize> = (0..self.subpaths.len()).collect();
        let mut open = Vec::new();
        let mut is_silent = false;
        for (index, opened) in all.iter().zip(self.entered.call_all(Action::Open, &all)) {
            match opened {
                Ok(()) => open.push(*index),
                Err(error) => {
                    is_silent |= error.is_over();
                    self.fail(*index, error.into());
                }
            }
        }
        if is_silent {
            return Ok(true);
        }
        // The mounts are open by now and keep their ids: what the table says of an id is said of
        // the open mount.
        let table = self.refresh.namespace.mounts()?;
        let (same, other): (Vec<usize>, Vec<usize>) = open
            .into_iter()
            .partition(|index| is_same_mount(self.subpaths[*index], &table));
        other
            .into_iter()
            .for_each(|index| self.fail(index, NotReplaced::Changed));
        let same = self.without_changes_below(same, &table);
        let attached = self.attach(&same, &table)?;
        self.detach(&attached);
        // Without a table, the child may still change mounts.
        Ok(self.entered.is_over() && !self.has_detached(&attached).unwrap_or(false))
    }

    /// True if the table has no stale mount of these any more. The end of a stale mount may still
    /// wait for a dead server.
    fn has_detached(&self, attached: &[(usize, AttachMethod)]) -> Result<bool, RefreshError> {
        let table = self.refresh.namespace.mounts()?;
        let is_gone = |(index, _): &(usize, AttachMethod)| {
            let stale = &self.subpaths[*index].mount;
            let now = table.mount(stale.id);
            now.is_none_or(|now| now.unique_id != stale.unique_id)
        };
        Ok(!attached.is_empty() && attached.iter().all(is_gone))
    }

    /// Refuses the stale mounts whose mounts below changed: a replacement would lose those mounts.
    fn without_changes_below(&mut self, indices: Vec<usize>, table: &MountTable) -> Vec<usize> {
        let mut same = Vec::with_capacity(indices.len());
        for index in indices {
            let volumes = self.refresh.volumes;
            match volumes.mounts_below(self.subpaths[index], table) {
                Ok(below) if below == self.below[index] => same.push(index),
                Ok(_) => self.fail(index, NotReplaced::Changed),
                Err(why) => self.fail(index, why),
            }
        }
        same
    }

    /// Attaches every new mount. Those of a volume that changed meanwhile are left to the next
    /// round.
    fn attach(
        &mut self,
        indices: &[usize],
        table: &MountTable,
    ) -> Result<Vec<(usize, AttachMethod)>, RefreshError> {
        let (finished, new): (Vec<usize>, Vec<usize>) = indices
            .iter()
            .partition(|index| self.subpaths[**index].covers_its_equal);
        let mut attached = Vec::new();
        for index in finished {
            let SubpathInContainer { mount, parent, .. } = self.subpaths[index];
            let progress = self.refresh.progress_at(&mount.mount_point);
            // umount2(2) has one error for a mount that is gone, and for a locked mount.
            if progress.replaced.take().is_some() {
                let refused = Refused::new(RefusedReason::Locked, &mount.mount_point);
                self.fail(index, refused.into());
                continue;
            }
            let beneath = parent.as_ref();
            if self.is_noted(index, beneath) {
                attached.push((index, AttachMethod::Finished));
            }
        }
        let mut impossible = Vec::new();
        for (index, result) in self.attach_beneath(&new) {
            match result {
                Ok(()) => attached.push((index, AttachMethod::Beneath)),
                Err(error) if error.is_target_gone() => {}
                Err(error) if error.is_not_possible() => impossible.push(index),
                Err(error) => self.fail(index, error.into()),
            }
        }
        attached.extend(self.tuck(&impossible, table)?);
        Ok(attached)
    }

    /// The kernel's own method; only a try shows if the kernel has this method. The kernel does not
    /// lock the flags of the new mount. The mounts of a container with a user namespace of its own
    /// have locked flags, and root there could remove them from the new mount. The tuck locks the
    /// flags, because the new mount arrives from another user namespace.
    fn attach_beneath(&self, indices: &[usize]) -> Vec<(usize, Result<(), EnterError>)> {
        let results = match fault::denies_beneath() || self.refresh.namespace.has_own_users() {
            true => indices
                .iter()
                .map(|_| Err(ReplaceError::NO_BENEATH.into()))
                .collect(),
            false => self.entered.call_all(Action::AttachBeneath, indices),
        };
        indices.iter().copied().zip(results).collect()
    }

    /// The way for kernels before 6.5. Mounts become shared for a moment: the record of their
    /// propagation comes first.
    fn tuck(
        &mut self,
        indices: &[usize],
        table: &MountTable,
    ) -> Result<Vec<(usize, AttachMethod)>, RefreshError> {
        if self.refresh.namespace.has_own_users() && bindguard_sys::propagation_takes_locks() {
            for index in indices {
                let place = &self.subpaths[*index].mount.mount_point;
                let refused = Refused::new(RefusedReason::KernelFault, place);
                self.fail(*index, refused.into());
            }
            return Ok(Vec::new());
        }
        if indices.is_empty() {
            return Ok(Vec::new());
        }
        let subpaths: Vec<_> = indices.iter().map(|index| self.subpaths[*index]).collect();
        let changed = changed_by_tuck(table, &subpaths);
        if let Err(error) =
            self.refresh
                .records
                .keep(self.refresh.process, self.refresh.namespace, changed)
        {
            let error = Arc::new(error);
            indices
                .iter()
                .for_each(|index| self.fail(*index, NotReplaced::NotRecorded(Arc::clone(&error))));
            return Ok(Vec::new());
        }
        let mut tucked = Vec::new();
        for index in indices.iter().copied() {
            match self.entered.call(Action::Tuck, index) {
                Ok(()) => tucked.push(index),
                Err(error) if error.is_target_gone() => {}
                Err(error) => self.fail(index, error.into()),
            }
        }
        self.arrived(tucked)
    }

    /// Success of a tuck does not mean that the mount arrived.
    fn arrived(&mut self, tucked: Vec<usize>) -> Result<Vec<(usize, AttachMethod)>, RefreshError> {
        let table = self.refresh.namespace.mounts()?;
        let mut arrived = Vec::with_capacity(tucked.len());
        for index in tucked {
            let subpath = self.subpaths[index];
            let stale = table.mount(subpath.mount.id);
            let beneath = stale.and_then(|stale| table.mount(stale.parent));
            let beneath = beneath.filter(|it| it.mount_point == subpath.mount.mount_point);
            // A stale mount that is gone was detached by the kernel: the file beneath was removed.
            if stale.is_some() && beneath.is_none() {
                self.fail(index, NotReplaced::DidNotArrive);
            } else if self.is_noted(index, beneath) {
                arrived.push((index, AttachMethod::Tucked));
            }
        }
        Ok(arrived)
    }

    /// True if the next refresh will know the mount beneath a stale mount.
    fn is_noted(&mut self, index: usize, beneath: Option<&MountEntry>) -> bool {
        let Some(beneath) = beneath else {
            return true;
        };
        let noted = self
            .refresh
            .volumes
            .note_arrived(self.subpaths[index], beneath);
        match noted {
            Ok(()) => true,
            Err(why) => {
                self.fail(index, why);
                false
            }
        }
    }

    fn detach(&mut self, attached: &[(usize, AttachMethod)]) {
        let attached = self.with_private_trees(attached);
        let indices: Vec<usize> = attached.iter().map(|(index, _)| *index).collect();
        for ((index, method), detached) in attached
            .iter()
            .zip(self.entered.call_all(Action::Detach, &indices))
        {
            match detached {
                Ok(()) => self.finish(*index, *method),
                Err(error) => {
                    if error.is_over() {
                        let place = &self.subpaths[*index].mount.mount_point;
                        self.refresh.progress_at(place).unanswered = Some(*method);
                    }
                    self.fail(*index, error.into());
                }
            }
        }
    }

    /// The steps after the detach.
    fn finish(&mut self, index: usize, method: AttachMethod) {
        let place = &self.subpaths[index].mount.mount_point;
        self.refresh.progress_at(place).replace(method);
        match self.keep_propagation(index, method) {
            Ok(()) => self.touch(index),
            Err(error) => self.fail(index, error.into()),
        }
    }

    /// Makes the stale mounts that have mounts below private, with these. If that fails, the stale
    /// mount stays, and the next round goes on.
    fn with_private_trees(
        &mut self,
        attached: &[(usize, AttachMethod)],
    ) -> Vec<(usize, AttachMethod)> {
        let mut private = Vec::with_capacity(attached.len());
        for (index, method) in attached.iter().copied() {
            let made = match self.below[index] {
                Some(_) => self.entered.call(Action::MakePrivate, index),
                None => Ok(()),
            };
            match made {
                Ok(()) => private.push((index, method)),
                Err(error) => self.fail(index, error.into()),
            }
        }
        private
    }

    /// A mount that is attached to a shared mount becomes shared. The mounts of a tree have their
    /// propagation before: no tree is attached to a shared mount, or replaces a shared mount.
    fn keep_propagation(&self, index: usize, method: AttachMethod) -> Result<(), EnterError> {
        let subpath = self.subpaths[index];
        let was_shared = subpath.mount.propagation.peer_group.is_some();
        match method {
            AttachMethod::Beneath | AttachMethod::Tucked if is_on_shared(subpath) => {}
            AttachMethod::Tucked if was_shared => {}
            _ => return Ok(()),
        }
        self.entered.call(Action::SetPropagation, index)
    }

    /// Only through a mount that the container can write: otherwise it would reach more than it
    /// may, through the agent.
    fn touch(&mut self, index: usize) {
        if self.refresh.notify != Notify::Touch {
            return;
        }
        let SubpathInContainer { mount, parent, .. } = self.subpaths[index];
        if parent.as_ref().is_none_or(MountEntry::is_read_only) {
            self.refresh.not_notified = Some(NotNotified::ReadOnly(mount.mount_point.clone()));
        } else if let Err(error) = self.entered.call(Action::Touch, index) {
            self.refresh.not_notified = Some(error.into());
        }
    }

    fn fail(&mut self, index: usize, why: NotReplaced) {
        self.refresh.fail(self.subpaths[index], why);
    }
}

/// True if a new mount at the same place becomes shared.
pub(super) fn is_on_shared(subpath: &SubpathInContainer) -> bool {
    let parent = subpath.parent.as_ref();
    parent.is_some_and(|parent| parent.propagation.peer_group.is_some())
}

/// True if the mount of this id still shows the same part of the same volume at the same place.
fn is_same_mount(subpath: &SubpathInContainer, table: &MountTable) -> bool {
    table.mount(subpath.mount.id).is_some_and(|now| {
        let (was, now) = (&subpath.mount, now);
        was.device == now.device
            && was.root.path == now.root.path
            && was.mount_point == now.mount_point
    })
}

// The place of an open file or directory in its filesystem.

/// Why the place of a file is not known.
#[derive(Debug, thiserror::Error)]
pub enum PlaceError {
    /// The path could not be resolved.
    #[error("resolve {}", path.display())]
    Resolve {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The mount could not be read.
    #[error("find the mount of {}", path.display())]
    Mount {
        path: PathBuf,
        #[source]
        source: MountError,
    },
    /// The path is not below the mount that shows the file.
    #[error("{} is not below its mount", .0.display())]
    NotBelow(PathBuf),
}

/// The place of a file in its filesystem.
pub(super) fn place_of(file: &Handle, mounts: &Mounts) -> Result<FilePlace, PlaceError> {
    let path = || file.path().to_owned();
    let mount = mounts.mount_of(file).map_err(|source| {
        let path = path();
        PlaceError::Mount { path, source }
    })?;
    let resolved = file.resolved_path().map_err(|source| {
        let path = path();
        PlaceError::Resolve { path, source }
    })?;
    let place = mount.entry.place_in_filesystem(&resolved);
    Ok(FilePlace {
        device: mount.entry.device,
        path: place.ok_or_else(|| PlaceError::NotBelow(path()))?,
    })
}

// A running refresh of a container: the stale mounts and the results so far.

/// Time limit of a step in the container.
pub(super) const STEP_TIMEOUT: Duration = Duration::from_secs(1);

/// The refresh of a container.
pub(super) struct ContainerRefresh<'a> {
    pub(super) helper: &'a HelperProcess,
    pub(super) process: &'a HeldProcess,
    pub(super) namespace: &'a ContainerNamespace,
    pub(super) spec: &'a SpecUsers,
    pub(super) volumes: &'a dyn CurrentFiles,
    pub(super) records: &'a TuckRecords,
    /// The container's mounts when they were judged last.
    pub(super) table: MountTable,
    /// The progress at each mount point at which something was done or failed.
    pub(super) progress: BTreeMap<PathBuf, MountProgress>,
    pub(super) notify: Notify,
    pub(super) not_notified: Option<NotNotified>,
    pub(super) until: Instant,
    pub(super) overlooked: usize,
    pub(super) abandoned: Option<Abandoned>,
    /// The binds of the spec that are gone.
    pub(super) missing: Vec<SpecBind>,
}

/// The progress of the replacement at a mount point.
#[derive(Debug, Default)]
pub(super) struct MountProgress {
    /// The method that replaced the mount.
    pub(super) replaced: Option<AttachMethod>,
    /// The method that attached the new mount, if the call that detaches the old mount gave no
    /// answer.
    pub(super) unanswered: Option<AttachMethod>,
    /// The last failure since the mount was replaced.
    pub(super) failure: Option<NotReplaced>,
    /// The number of failures since the mount was replaced.
    failures: u32,
}

impl<'a> ContainerRefresh<'a> {
    pub(super) fn new(
        helper: &'a HelperProcess,
        process: &'a HeldProcess,
        namespace: &'a ContainerNamespace,
        spec: &'a SpecUsers,
        volumes: &'a dyn CurrentFiles,
        records: &'a TuckRecords,
        time: Duration,
    ) -> Self {
        Self {
            helper,
            process,
            namespace,
            spec,
            volumes,
            records,
            table: MountTable::default(),
            progress: BTreeMap::new(),
            notify: Notify::None,
            not_notified: None,
            until: Instant::now() + time,
            overlooked: 0,
            abandoned: None,
            missing: Vec::new(),
        }
    }

    /// Refuses a file that SELinux denies the container: its label is never changed for a refresh.
    pub(super) fn refuse_unreadable(&self, file: &Handle) -> Result<(), Refused> {
        match selinux_denies_read(self.process, file) {
            true => Err(Refused::new(RefusedReason::SelinuxDenies, file.path())),
            false => Ok(()),
        }
    }

    pub(super) fn progress_at(&mut self, mount_point: &Path) -> &mut MountProgress {
        self.progress.entry(mount_point.to_owned()).or_default()
    }

    /// A failure after the end of the time is not counted: the mount may be replaced in the next
    /// turn.
    pub(super) fn fail(&mut self, subpath: &SubpathInContainer, why: NotReplaced) {
        let is_in_time = Instant::now() < self.until;
        let progress = self.progress_at(&subpath.mount.mount_point);
        progress.failures += u32::from(is_in_time);
        progress.failure = Some(why);
    }
}

impl MountProgress {
    pub(super) fn of_failure(why: NotReplaced) -> Self {
        Self {
            failure: Some(why),
            failures: 1,
            ..Self::default()
        }
    }

    /// The new mount is there, and the old mount is not.
    pub(super) fn replace(&mut self, method: AttachMethod) {
        self.replaced = Some(method);
        self.failure = None;
        self.failures = 0;
    }

    /// True if a further round may replace the mount.
    pub(super) fn may_try_again(&self) -> bool {
        self.failures < MAX_FAILURES && !matches!(self.failure, Some(NotReplaced::KeyGone))
    }
}
