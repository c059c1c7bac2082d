//! The running containers of the node: a container that may write a folder of the host can lead the
//! names in the folder elsewhere.

use std::fmt::Debug;
use std::io;
use std::iter::once;
use std::path::PathBuf;
use std::time::Duration;

use bindguard_core::mount_table::MountTable;
use bindguard_core::spec::SpecUsers;
use bindguard_sys::enter::{HeldProcess, ProcessError};
use bindguard_sys::observe::SubpathsError;
use rustix::param::clock_ticks_per_second;
use rustix::time::{ClockId, Timespec, clock_gettime};

use super::outcome::RefreshError;

/// A running container, as its runtime has recorded it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunningContainer {
    /// The pid of its init.
    pub init: u32,
    /// The user namespaces in its spec; `None` if the spec is not known.
    pub spec: Option<SpecUsers>,
}

/// Why the mounts of the running containers are not all known.
#[derive(Debug, thiserror::Error)]
pub enum RunningError {
    /// The folders of their states could not be listed.
    #[error("list the running containers")]
    List(#[from] SubpathsError),
    /// The state of a container could not be read.
    #[error("read the state of a container in {}", path.display())]
    State {
        /// The folder.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: io::Error,
    },
    /// The mount table of a container could not be read.
    #[error(transparent)]
    Table(#[from] RefreshError),
}

/// Finds the running containers. A refresh needs them only if the way to a file has a symlink or
/// another folder than before.
pub trait RunningContainers: Debug {
    /// The containers at this moment.
    ///
    /// # Errors
    /// If a container may be missing.
    fn running(&self) -> Result<Vec<RunningContainer>, RunningError>;

    /// The containers' mount tables. Each table may be large, so `next` reads a single table. A
    /// container that ended meanwhile is left out.
    ///
    /// An item is an error if the containers cannot be listed, or the table cannot be read, or is not
    /// that of the mount namespace that the runtime made: a container can hide its mounts in a
    /// namespace of its own, and still write through an open directory.
    fn tables(&self) -> Box<dyn Iterator<Item = Result<MountTable, RunningError>>> {
        match self.running() {
            Ok(running) => Box::new(
                running
                    .into_iter()
                    .filter_map(|it| table_of(it).transpose()),
            ),
            Err(error) => Box::new(once(Err(error))),
        }
    }
}

impl RunningContainers for Vec<RunningContainer> {
    fn running(&self) -> Result<Vec<RunningContainer>, RunningError> {
        Ok(self.clone())
    }
}

/// `None` if the container ended.
fn table_of(container: RunningContainer) -> Result<Option<MountTable>, RunningError> {
    let RunningContainer { init, spec } = container;
    let process = match HeldProcess::open(init) {
        Err(ProcessError::Ended(_)) => return Ok(None),
        process => process.map_err(RefreshError::from)?,
    };
    match mounts_by_runtime(&process, spec) {
        Err(_) if !process.is_alive() => Ok(None),
        table => Ok(Some(table?)),
    }
}

fn mounts_by_runtime(
    process: &HeldProcess,
    spec: Option<SpecUsers>,
) -> Result<MountTable, RefreshError> {
    let spec = spec.ok_or(RefreshError::NoSpec)?;
    let namespace = process.mount_namespace()?;
    Ok(namespace.accepted(process, spec.namespace())?.mounts()?)
}

/// The time since 1970 at which a process started; `None` if the start time is unreadable.
pub(super) fn started(pid: u32) -> Option<Duration> {
    let ticks = HeldProcess::open(pid).ok()?.start_time().ok()?;
    let since_boot =
        Duration::from_millis(ticks.checked_mul(1000)? / clock_ticks_per_second().max(1));
    let boot = duration(clock_gettime(ClockId::Realtime))?
        .checked_sub(duration(clock_gettime(ClockId::Boottime))?)?;
    boot.checked_add(since_boot)
}

fn duration(time: Timespec) -> Option<Duration> {
    Some(Duration::new(
        u64::try_from(time.tv_sec).ok()?,
        u32::try_from(time.tv_nsec).ok()?,
    ))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::process::Command;
    use std::thread;

    use bindguard_testing::deny_call;
    use nix::errno::Errno;
    use nix::libc;

    use super::*;

    /// An agent without a free descriptor took every container for one that ended.
    #[test]
    fn a_container_that_cannot_be_opened_is_not_left_out() {
        let mut ended = Command::new("true").spawn().unwrap();
        ended.wait().unwrap();
        let of = |init| vec![RunningContainer { init, spec: None }];
        assert_eq!(of(ended.id()).tables().count(), 0);
        let denied = thread::spawn(move || {
            deny_call(libc::SYS_pidfd_open, Errno::EMFILE);
            of(std::process::id())
                .tables()
                .map(|it| it.is_err())
                .collect()
        });
        let denied: Vec<bool> = denied.join().unwrap();
        assert_eq!(denied, [true]);
    }
}
