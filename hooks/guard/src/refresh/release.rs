//! Unmounts, in a container, copies of mounts that the host has unmounted.
//!
//! A copy is known by the record of the create alone: its unique id is below the number that was
//! recorded after the runtime had made its mounts. Without a record nothing is unmounted. The umount
//! goes by the name in the folder of the parent mount, and fails with EBUSY while the mount is in
//! use.

use std::time::Instant;

use bindguard_core::error_chain;
use bindguard_core::mount_table::{MountEntry, MountIndex, MountTable};
use bindguard_core::report::ReleaseResult;
use bindguard_core::spec::SpecUsers;
use bindguard_sys::enter::{
    Action, ContainerNamespace, EnterError, Entered, HeldProcess, HelperProcess, Replacement,
};

use crate::SourceError;
use crate::rebind::REPLACE_TIMEOUT;
use crate::refresh::container::{Container, RefreshError, STEP_TIMEOUT};
use crate::refresh::host_roots::{HostRoots, PrivateCopy};

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
    pub result: ReleaseResult,
    /// Why the copy is not released.
    pub error: Option<String>,
    /// True if the child in the container gave no answer.
    is_unanswered: bool,
}

impl Released {
    fn set(&mut self, result: ReleaseResult, error: impl Into<String>) {
        self.result = result;
        self.error = Some(error.into());
    }

    /// Corrects the result by the mount table after the release.
    ///
    /// An umount by name takes the topmost mount there. A mount keeps its unique id whatever the
    /// container changes of the mount. An umount that waits for a dead server has taken the mount
    /// out of the table before.
    fn check_against(&mut self, table: &MountTable) {
        let now = table.mount(self.mount.id);
        let is_there = now.is_some_and(|now| now.unique_id == self.mount.unique_id);
        if self.result == ReleaseResult::Released && is_there {
            let error = "the container mounted over the copy meanwhile";
            self.set(ReleaseResult::Refused, error);
        } else if self.is_unanswered && !is_there {
            self.result = ReleaseResult::Released;
            self.error = None;
        }
    }
}

/// Why no copy of a container can be judged.
#[derive(Debug, thiserror::Error)]
pub enum ReleaseError {
    /// The container cannot be entered.
    #[error(transparent)]
    Container(#[from] RefreshError),
    /// Its mounts cannot be compared with the host's.
    #[error(transparent)]
    Compare(#[from] SourceError),
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
    let container = Container::open(process, spec)?;
    let until = Instant::now() + REPLACE_TIMEOUT;
    let lock = container.lock(until)?;
    let namespace = &container.namespace;
    let table = namespace.mounts().map_err(RefreshError::from)?;
    let index = MountIndex::of(&table);
    let mut released = Vec::new();
    for copy in roots.copies(&table)? {
        if !is_wanted(&copy.mount, &index) {
            continue;
        }
        let mut done = Released {
            namespace: namespace.number().unwrap_or_default(),
            mount: copy.mount.clone(),
            result: ReleaseResult::Kept,
            error: None,
            is_unanswered: false,
        };
        if let Some(why) = refusal(&copy, roots) {
            done.set(ReleaseResult::Refused, why);
        } else if extent != Release::Look && Instant::now() >= until {
            let limit = REPLACE_TIMEOUT.as_secs();
            let why = format!("no time was left after {limit} s; run the command again");
            done.set(ReleaseResult::Refused, why);
        } else if extent != Release::Look {
            match release(helper, namespace, &copy, extent, until) {
                Ok(true) => done.result = ReleaseResult::Released,
                Ok(false) => done.set(ReleaseResult::Busy, "it is in use"),
                Err(error) => {
                    done.is_unanswered = error.is_over();
                    done.set(ReleaseResult::Refused, error_chain(&error));
                }
            }
        }
        released.push(done);
    }
    // A single read for all copies: a container may have thousands of mounts.
    if let Ok(table) = namespace.mounts() {
        for copy in &mut released {
            copy.check_against(&table);
        }
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
    let namespace = Container::open(process, spec)?.namespace;
    let table = namespace.mounts().map_err(RefreshError::from)?;
    let mut copies = roots.copies(&table)?;
    copies.retain(|copy| refusal(copy, roots).is_none());
    Ok(copies.into_iter().map(|copy| copy.mount).collect())
}

fn refusal(copy: &PrivateCopy, roots: &HostRoots) -> Option<&'static str> {
    let is_on_private = |parent: &MountEntry| parent.propagation.peer_group.is_none();
    if !roots.has_record() {
        Some("the create of the container was not recorded: the container may have made the mount")
    } else if !copy.is_recorded {
        Some("the record of the create lacks the mount: the container may have made the mount")
    } else if !copy.parent.as_ref().is_some_and(is_on_private) {
        Some("the parent mount is shared: an umount would reach other mount namespaces")
    } else {
        None
    }
}

/// Returns false if the copy is in use.
fn release(
    helper: &HelperProcess,
    namespace: &ContainerNamespace,
    copy: &PrivateCopy,
    extent: Release,
    until: Instant,
) -> Result<bool, EnterError> {
    let mount = Replacement {
        stale: &copy.mount,
        parent: copy.parent.as_ref(),
        new: None,
    };
    // A child for each: the folder that a child has open is in use.
    let entered = Entered::enter(helper, namespace, vec![mount], STEP_TIMEOUT, until)?;
    entered.call(Action::Open, 0)?;
    if extent == Release::Detach {
        // A detach would take mounts along that may be the container's own.
        let is_on_copy = |it: &MountEntry| it.parent == copy.mount.id;
        if namespace
            .mounts()
            .map_or(true, |table| table.entries().iter().any(is_on_copy))
        {
            return Ok(false);
        }
        entered.call(Action::MakePrivate, 0)?;
        entered.call(Action::Detach, 0)?;
        return Ok(true);
    }
    match entered.call(Action::Unmount, 0) {
        Ok(()) => Ok(true),
        Err(error) if error.is_busy() => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::*;

    const COPY: &str = "7 1 8:2 / /host/mnt rw - ext4 d rw\n";

    #[test]
    fn the_table_decides_if_a_copy_is_released() {
        let table = |text: &str| MountTable::from_mountinfo(text.as_bytes()).unwrap();
        let remounted = COPY.replace(" rw - ", " ro - ");
        let others = COPY.replace("7 1", "8 1");
        for (result, is_unanswered, afterwards, is_released) in [
            (ReleaseResult::Released, false, others.as_str(), true),
            (ReleaseResult::Released, false, COPY, false),
            (ReleaseResult::Released, false, &remounted, false),
            (ReleaseResult::Refused, true, &others, true),
            (ReleaseResult::Refused, true, COPY, false),
            (ReleaseResult::Busy, false, &others, false),
        ] {
            let mut copy = Released {
                namespace: 1,
                mount: table(COPY).entries()[0].clone(),
                result,
                error: None,
                is_unanswered,
            };
            copy.check_against(&table(afterwards));
            let is = copy.result == ReleaseResult::Released;
            assert_eq!(is, is_released, "{result:?}, {afterwards}");
        }
    }
}
