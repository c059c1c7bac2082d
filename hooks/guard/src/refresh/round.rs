//! A child's visit to a container: opens every stale mount, attaches every new mount, then detaches
//! the stale mounts.

use std::sync::Arc;

use bindguard_core::mount_table::{MountEntry, MountTable};
use bindguard_core::refresh::{
    KeptMounts, Refused, RefusedReason, SubpathInContainer, changed_by_tuck,
};
use bindguard_core::refresh_request::Notify;
use bindguard_sys::enter::{Action, EnterError, Entered};
use bindguard_sys::fault;
use bindguard_sys::replace::ReplaceError;

use super::outcome::{AttachMethod, NotNotified, NotReplaced, RefreshError};
use super::progress::ContainerRefresh;

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
