//! The inits of running containers, for surveys that read the containers' mount tables.
//!
//! A survey takes a while, and containers end meanwhile: these containers are skipped. A container
//! that cannot be read, for example because its mount table is too large, is kept with the reason.

use std::collections::BTreeMap;

use bindguard_core::report::RefreshedMount;
use bindguard_guard::refresh::{CurrentFiles, RefreshError, find_stale};
use bindguard_sys::enter::{HeldProcess, ProcessError};

use crate::node::{NotInit, hold_init, inits_of};
use crate::pods::PodContainer;

/// The inits of running containers, and the containers that could not be read.
pub(crate) struct ContainerInits<'p> {
    inits: BTreeMap<&'p str, u32>,
    unread: Vec<UnreadContainer>,
}

/// A container whose init or mount table could not be read, for example because the table is too
/// large.
#[derive(Debug)]
pub struct UnreadContainer {
    /// The container, with its pod.
    pub container: PodContainer,
    pub why: ProcessError,
}

impl<'p> ContainerInits<'p> {
    /// Finds the inits of these containers.
    pub(crate) fn of(containers: impl IntoIterator<Item = &'p PodContainer>) -> Self {
        let ids = containers
            .into_iter()
            .map(|container| container.id.as_str());
        Self {
            inits: inits_of(ids),
            unread: Vec::new(),
        }
    }

    /// Opens the init of a container. `None` if the container ended, or is unread.
    pub(crate) fn hold(&mut self, container: &PodContainer) -> Option<HeldProcess> {
        let init = *self.inits.get(container.id.as_str())?;
        let process = match hold_init(&container.id, init) {
            Ok(process) => Ok(process),
            Err(NotInit::Process(error)) => Err(error),
            // The kernel gave the pid to another process after the container had ended.
            Err(NotInit::Cgroup { .. } | NotInit::Record { .. }) => Err(ProcessError::Ended(init)),
        };
        self.unless_ended(container, process)
    }

    /// The result of reading a container. `None` if the container ended, or is unread.
    pub(crate) fn unless_ended<T>(
        &mut self,
        container: &PodContainer,
        result: Result<T, ProcessError>,
    ) -> Option<T> {
        match result {
            Ok(read) => Some(read),
            Err(ProcessError::Ended(_)) => None,
            Err(why) => {
                let container = container.clone();
                self.unread.push(UnreadContainer { container, why });
                None
            }
        }
    }

    /// The containers that could not be read.
    pub(crate) fn into_unread(self) -> Vec<UnreadContainer> {
        self.unread
    }

    /// The containers that could not be read, for people.
    pub(crate) fn into_problems(self) -> impl Iterator<Item = String> {
        let unread = self.unread.into_iter();
        unread.map(|unread| unread.container.problem(&unread.why))
    }
}

/// The mounts of a container that do not show these files. Empty for a container that every refresh
/// refuses.
pub(crate) fn stale_mounts(
    process: &HeldProcess,
    files: &dyn CurrentFiles,
) -> Result<Vec<RefreshedMount>, ProcessError> {
    match find_stale(process, &[files]) {
        Ok(seen) => Ok(seen.mounts),
        Err(RefreshError::Process(error)) => Err(error),
        Err(
            RefreshError::MountsOfNode(_)
            | RefreshError::Sandbox(_)
            | RefreshError::Locked(_)
            | RefreshError::NoSpec
            | RefreshError::OldKernel(_)
            | RefreshError::Namespace(_),
        ) => Ok(Vec::new()),
    }
}

#[cfg(test)]
mod tests {
    use bindguard_core::identity::PodName;

    use super::*;

    #[test]
    fn a_container_that_ended_is_no_problem() {
        let container = PodContainer {
            id: "no-such-container".to_owned(),
            name: Some("app".to_owned()),
            state: None,
            attempt: None,
            pod: PodName::of_uid("u-1"),
            guarded: None,
            shim_version: None,
        };
        let mut running = ContainerInits::of([&container]);
        assert!(running.hold(&container).is_none());
        // A process of the node, as if the kernel had given the init's pid to it.
        running.inits = BTreeMap::from([(container.id.as_str(), std::process::id())]);
        assert!(running.hold(&container).is_none());
        running.inits = BTreeMap::from([(container.id.as_str(), u32::MAX)]);
        assert!(running.hold(&container).is_none());
        let ended = Err::<(), _>(ProcessError::Ended(7));
        assert_eq!(running.unless_ended(&container, ended), None);
        assert!(running.unread.is_empty(), "{:?}", running.unread);
        let name = "mountinfo";
        let blocked = Err::<(), _>(ProcessError::Blocked { pid: 7, name });
        assert_eq!(running.unless_ended(&container, blocked), None);
        let problems: Vec<String> = running.into_problems().collect();
        assert!(
            problems[0].contains("read mountinfo of process 7"),
            "{problems:?}"
        );
    }
}
