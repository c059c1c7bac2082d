//! One visit of a child to a container: opens every stale mount, attaches every new one, then detaches the stale ones.

use bindguard_core::mount_table::MountTable;
use bindguard_core::refresh::{SubpathInContainer, SubpathState};
use bindguard_core::refresh_request::Notify;
use bindguard_sys::enter::{EnterError, Entered};
use bindguard_sys::fault;

use super::container::{ContainerRefresh, Failure};
use super::outcome::{AttachMethod, NotReplaced, RefreshError};

/// One visit of a child to the container.
pub(super) struct Round<'r, 'a, 's> {
    pub(super) refresh: &'r mut ContainerRefresh<'a>,
    pub(super) subpaths: &'r [&'s SubpathInContainer],
    pub(super) entered: &'r Entered,
}

impl Round<'_, '_, '_> {
    /// Returns true if the child gave no answer.
    pub(super) fn run(&mut self) -> Result<bool, RefreshError> {
        let mut open = Vec::new();
        for index in 0..self.subpaths.len() {
            match self.entered.open(index) {
                Ok(()) => open.push(index),
                Err(error) => {
                    let is_over = is_over(&error);
                    self.fail(index, error.into());
                    if is_over {
                        return Ok(true);
                    }
                }
            }
        }
        // The mounts are open by now and keep their ids: what the table says of an id is said of the open mount.
        let table = self.refresh.process.mounts()?;
        let (same, other): (Vec<usize>, Vec<usize>) =
            open.into_iter().partition(|index| is_same_mount(self.subpaths[*index], &table));
        other.into_iter().for_each(|index| self.fail(index, NotReplaced::Changed));
        let attached = self.attach(&same)?;
        attached.into_iter().for_each(|(index, method)| self.detach(index, method));
        Ok(false)
    }

    /// Attaches every new mount. Those of a volume that changed meanwhile are left to the next round.
    fn attach(&mut self, indices: &[usize]) -> Result<Vec<(usize, AttachMethod)>, RefreshError> {
        let mut attached = Vec::new();
        for index in indices.iter().copied() {
            let method = match self.subpaths[index].state {
                SubpathState::Covering(_) => Ok(AttachMethod::Finished),
                SubpathState::Stale | SubpathState::Current | SubpathState::Hidden => self.attach_one(index),
            };
            match method {
                Ok(method) => attached.push((index, method)),
                Err(error) if error.is_target_gone() => {}
                Err(error) => self.fail(index, error.into()),
            }
        }
        if attached.iter().any(|(_, method)| *method == AttachMethod::Tucked) {
            let table = self.refresh.process.mounts()?;
            let arrived = |subpath: &SubpathInContainer| {
                let stale = table.mount(subpath.mount.id);
                let parent = stale.and_then(|stale| table.mount(stale.parent));
                // A stale mount that is gone was detached by the kernel: the file beneath was removed.
                stale.is_none() || parent.is_some_and(|parent| parent.mount_point == subpath.mount.mount_point)
            };
            let lost = attached
                .extract_if(.., |(index, method)| *method == AttachMethod::Tucked && !arrived(self.subpaths[*index]));
            let lost: Vec<usize> = lost.map(|(index, _)| index).collect();
            lost.into_iter().for_each(|index| self.fail(index, NotReplaced::DidNotArrive));
        }
        Ok(attached)
    }

    /// The kernel's own method first; which kernels have it is found by trying.
    fn attach_one(&self, index: usize) -> Result<AttachMethod, EnterError> {
        let tucked = || self.entered.tuck(index).map(|()| AttachMethod::Tucked);
        if fault::denies_beneath() {
            return tucked();
        }
        match self.entered.attach_beneath(index) {
            Ok(()) => Ok(AttachMethod::Beneath),
            Err(error) if error.is_not_possible() => tucked(),
            Err(error) => Err(error),
        }
    }

    fn detach(&mut self, index: usize, method: AttachMethod) {
        // What is attached to a shared mount becomes shared.
        let on_shared = self.subpaths[index].parent.as_ref().is_some_and(|it| it.propagation.peer_group.is_some());
        let done = self.entered.detach(index).and_then(|()| match method {
            AttachMethod::Beneath if !on_shared => Ok(()),
            AttachMethod::Finished => Ok(()),
            AttachMethod::Beneath | AttachMethod::Tucked => self.entered.set_propagation(index),
        });
        match done {
            Ok(()) => {
                self.refresh.methods.insert(self.subpaths[index].mount.mount_point.clone(), method);
                self.touch(index);
            }
            Err(error) => self.fail(index, error.into()),
        }
    }

    fn touch(&mut self, index: usize) {
        if self.refresh.notify == Notify::Touch
            && let Err(error) = self.entered.touch(index)
        {
            self.refresh.not_notified = Some(error.into());
        }
    }

    fn fail(&mut self, index: usize, why: NotReplaced) {
        self.refresh.fail(self.subpaths[index], Failure::NotReplaced(why));
    }
}

/// True if the child serves no further request.
fn is_over(error: &EnterError) -> bool {
    matches!(error, EnterError::Silent(_) | EnterError::Ended)
}

/// True if the mount of this id still shows the same part of the same volume at the same place.
fn is_same_mount(subpath: &SubpathInContainer, table: &MountTable) -> bool {
    table.mount(subpath.mount.id).is_some_and(|now| {
        let (was, now) = (&subpath.mount, now);
        was.device == now.device && was.root.path == now.root.path && was.mount_point == now.mount_point
    })
}
