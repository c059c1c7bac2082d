//! Unmounts, in a container, copies of mounts that the host has unmounted.
//!
//! A copy is known by the record of the create alone: its unique id is below the number that was
//! recorded after the runtime had made its mounts. Without a record nothing is unmounted. The umount
//! goes by the name in the folder of the parent mount, and fails with EBUSY while the mount is in
//! use.

use std::time::{Duration, Instant};

use bindguard_core::mount_table::{MountEntry, MountIndex, MountTable};
use bindguard_core::spec::SpecUsers;
use bindguard_sys::enter::{
    Action, ContainerNamespace, EnterError, Entered, HeldProcess, HelperProcess, Replacement,
};

use super::container::wait_for_lock;
use super::host_roots::{HostRoots, PrivateCopy};
use super::outcome::RefreshError;
use crate::rebind::REPLACE_TIMEOUT;
use crate::refresh::host_roots::HostRootError;
use crate::refresh::round::STEP_TIMEOUT;
use crate::refresh::running::refuse_sandbox;

/// The extent of a release.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Release {
    /// Report the copies.
    Look,
    /// Unmount the copies that are not in use.
    Unmount,
    /// Detach the copies. A file that is open keeps the device busy, and no mount table shows that.
    Detach,
}

/// A copy of a mount of the host, and what was done about it.
#[derive(Debug)]
pub struct Released {
    /// The number of the container's mount namespace.
    pub namespace: u64,
    /// Its line in the container's mount table.
    pub mount: MountEntry,
    pub outcome: ReleaseOutcome,
}

impl Released {
    /// Corrects the outcome by the mount table after the release.
    ///
    /// An umount by name takes the topmost mount there. A mount keeps its unique id whatever the
    /// container changes of the mount. An umount that waits for a dead server has taken the mount
    /// out of the table before.
    fn check_against(&mut self, table: &MountTable) {
        let id = self.mount.unique_id;
        let now = table.mount(self.mount.id);
        let is_there = now.is_some_and(|now| now.unique_id == id);
        match &self.outcome {
            ReleaseOutcome::Released if is_there => {
                self.outcome = NotReleased::Covered.into();
            }
            ReleaseOutcome::NotReleased(NotReleased::Enter(error))
                if error.is_over() && !is_there =>
            {
                self.outcome = ReleaseOutcome::Released;
            }
            ReleaseOutcome::Released | ReleaseOutcome::Kept | ReleaseOutcome::NotReleased(_) => {}
        }
    }
}

/// The outcome for a copy.
#[derive(Debug)]
pub enum ReleaseOutcome {
    /// The container no longer has the copy.
    Released,
    /// The copy can be released; this run only checks.
    Kept,
    NotReleased(NotReleased),
}

impl From<NotReleased> for ReleaseOutcome {
    fn from(why: NotReleased) -> Self {
        Self::NotReleased(why)
    }
}

/// Why a copy is not released.
#[derive(Debug, thiserror::Error)]
pub enum NotReleased {
    /// No record of the create shows that the mount is a copy.
    #[error("the create of the container was not recorded: the container may have made the mount")]
    NoRecord,
    /// The record of the create does not show that the mount is a copy.
    #[error("the record of the create lacks the mount: the container may have made the mount")]
    NotRecorded,
    /// The umount would reach other namespaces.
    #[error("the parent mount is shared: an umount would reach other mount namespaces")]
    ParentIsShared,
    /// A process uses the copy, or a mount is on the copy.
    #[error("it is in use")]
    Busy,
    /// A step in the container failed.
    #[error(transparent)]
    Enter(#[from] EnterError),
    /// Earlier copies took the whole time.
    #[error("no time was left after {} s; run the command again", .0.as_secs())]
    OutOfTime(Duration),
    /// The umount succeeded, and the mount is still there.
    #[error("the container mounted over the copy meanwhile")]
    Covered,
}

/// Why no copy of a container can be judged.
#[derive(Debug, thiserror::Error)]
pub enum ReleaseError {
    /// The container cannot be entered.
    #[error(transparent)]
    Container(#[from] RefreshError),
    /// Its mounts cannot be compared with the host's.
    #[error(transparent)]
    Compare(#[from] HostRootError),
}

/// Releases the copies of mounts that the host has unmounted, as far as they are wanted, from the
/// container with this init. The innermost copy comes first.
///
/// # Errors
/// If the container cannot be entered, or its mounts cannot be compared with the host's.
pub fn release_copies(
    helper: &HelperProcess,
    process: &HeldProcess,
    spec: Option<&SpecUsers>,
    roots: &HostRoots,
    is_wanted: impl Fn(&MountEntry, &MountIndex<'_>) -> bool,
    extent: Release,
) -> Result<Vec<Released>, ReleaseError> {
    let namespace = process.mount_namespace().map_err(RefreshError::from)?;
    refuse_sandbox(process, &namespace)?;
    let spec = spec.ok_or(RefreshError::NoSpec)?;
    let namespace = namespace
        .accepted(process, spec.namespace())
        .map_err(RefreshError::from)?;
    let until = Instant::now() + REPLACE_TIMEOUT;
    let lock = wait_for_lock(&namespace, until)?;
    let table = namespace.mounts().map_err(RefreshError::from)?;
    let index = MountIndex::of(&table);
    let copies = roots.copies(&table)?.into_iter();
    let wanted = copies.filter(|copy| is_wanted(&copy.mount, &index));
    let number = namespace.number().unwrap_or_default();
    let releasing = Releasing {
        helper,
        namespace: &namespace,
        extent,
        has_record: roots.has_record(),
        until,
    };
    let released = wanted.map(|copy| Released {
        namespace: number,
        outcome: releasing.release(&copy).unwrap_or_else(Into::into),
        mount: copy.mount,
    });
    let mut released: Vec<_> = released.collect();
    // A single read for all copies: a container may have thousands of mounts.
    if let Ok(table) = namespace.mounts() {
        released
            .iter_mut()
            .for_each(|copy| copy.check_against(&table));
    }
    drop(lock);
    Ok(released)
}

/// The copies that [`release_copies`] would release while no process uses them. Nothing is entered.
///
/// # Errors
/// As there.
pub fn releasable_copies(
    process: &HeldProcess,
    spec: Option<&SpecUsers>,
    roots: &HostRoots,
) -> Result<Vec<MountEntry>, ReleaseError> {
    let namespace = process.mount_namespace().map_err(RefreshError::from)?;
    refuse_sandbox(process, &namespace)?;
    let spec = spec.ok_or(RefreshError::NoSpec)?;
    let namespace = namespace
        .accepted(process, spec.namespace())
        .map_err(RefreshError::from)?;
    let table = namespace.mounts().map_err(RefreshError::from)?;
    let mut copies = roots.copies(&table)?;
    copies.retain(|copy| check_copy(copy, roots.has_record()).is_ok());
    Ok(copies.into_iter().map(|copy| copy.mount).collect())
}

fn check_copy(copy: &PrivateCopy, has_record: bool) -> Result<(), NotReleased> {
    match copy {
        _ if !has_record => Err(NotReleased::NoRecord),
        copy if !copy.is_recorded => Err(NotReleased::NotRecorded),
        PrivateCopy {
            parent: Some(parent),
            ..
        } if parent.propagation.peer_group.is_none() => Ok(()),
        _ => Err(NotReleased::ParentIsShared),
    }
}

/// The release of the copies of a container.
struct Releasing<'a> {
    helper: &'a HelperProcess,
    namespace: &'a ContainerNamespace,
    extent: Release,
    has_record: bool,
    until: Instant,
}

impl Releasing<'_> {
    fn release(&self, copy: &PrivateCopy) -> Result<ReleaseOutcome, NotReleased> {
        check_copy(copy, self.has_record)?;
        if self.extent == Release::Look {
            return Ok(ReleaseOutcome::Kept);
        }
        if Instant::now() >= self.until {
            return Err(NotReleased::OutOfTime(REPLACE_TIMEOUT));
        }
        let mount = Replacement {
            stale: &copy.mount,
            parent: copy.parent.as_ref(),
            new: None,
        };
        // A child for each: the folder that a child has open is in use.
        let entered = Entered::enter(
            self.helper,
            self.namespace,
            vec![mount],
            STEP_TIMEOUT,
            self.until,
        )?;
        entered.call(Action::Open, 0)?;
        let done = match self.extent {
            Release::Detach if self.has_mounts_on(&copy.mount) => return Err(NotReleased::Busy),
            Release::Detach => entered
                .call(Action::MakePrivate, 0)
                .and_then(|()| entered.call(Action::Detach, 0)),
            Release::Look | Release::Unmount => entered.call(Action::Unmount, 0),
        };
        match done {
            Ok(()) => Ok(ReleaseOutcome::Released),
            Err(error) if error.is_busy() => Err(NotReleased::Busy),
            Err(error) => Err(error.into()),
        }
    }

    /// A detach would take mounts along that may be the container's own.
    fn has_mounts_on(&self, mount: &MountEntry) -> bool {
        let table = self.namespace.mounts();
        table.map_or(true, |table| {
            table.entries().iter().any(|it| it.parent == mount.id)
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::*;

    const COPY: &str = "7 1 8:2 / /host/mnt rw - ext4 d rw\n";

    fn checked(outcome: ReleaseOutcome, afterwards: &str) -> ReleaseOutcome {
        let table = |text: &str| MountTable::from_mountinfo(text.as_bytes()).unwrap();
        let mut copy = Released {
            namespace: 1,
            mount: table(COPY).entries()[0].clone(),
            outcome,
        };
        copy.check_against(&table(afterwards));
        copy.outcome
    }

    #[test]
    fn the_table_decides_if_a_copy_is_released() {
        let silent = || NotReleased::Enter(EnterError::Silent(STEP_TIMEOUT)).into();
        let remounted = COPY.replace(" rw - ", " ro - ");
        let others = COPY.replace("7 1", "8 1");
        for (outcome, afterwards, is_released) in [
            (ReleaseOutcome::Released, others.as_str(), true),
            (ReleaseOutcome::Released, COPY, false),
            (ReleaseOutcome::Released, &remounted, false),
            (silent(), &others, true),
            (silent(), COPY, false),
            (NotReleased::Busy.into(), &others, false),
        ] {
            let text = format!("{outcome:?}, {afterwards}");
            let outcome = checked(outcome, afterwards);
            let is = matches!(outcome, ReleaseOutcome::Released);
            assert_eq!(is, is_released, "{text}");
        }
    }
}
