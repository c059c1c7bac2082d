//! The running containers of the node: a container that may write a folder of the host can lead the
//! names in the folder elsewhere.

use std::fmt::Debug;
use std::time::Duration;

use bindguard_core::mount_table::MountTable;
use bindguard_core::refresh::ContainerTable;
use bindguard_core::spec::SpecUsers;
use bindguard_sys::enter::HeldProcess;
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

/// Finds the running containers. A refresh needs the running containers only if the way to a file
/// has a symlink or a new folder.
pub trait RunningContainers: Debug {
    /// The containers at this moment.
    fn running(&self) -> Vec<RunningContainer>;

    /// The containers' mount tables. Each table may be large, so `next` reads a single table. A
    /// container that ended meanwhile is left out.
    ///
    /// An item is an error if the table cannot be read, or is not that of the mount namespace that
    /// the runtime made: a container can hide its mounts in a namespace of its own, and still write
    /// through an open directory.
    fn tables(&self) -> Box<dyn Iterator<Item = Result<ContainerTable, RefreshError>>> {
        let tables = self.running().into_iter().map(table_of);
        Box::new(tables.filter_map(Result::transpose))
    }
}

impl RunningContainers for Vec<RunningContainer> {
    fn running(&self) -> Vec<RunningContainer> {
        self.clone()
    }
}

/// `None` if the container ended.
fn table_of(container: RunningContainer) -> Result<Option<ContainerTable>, RefreshError> {
    let RunningContainer { init, spec } = container;
    let Ok(process) = HeldProcess::open(init) else {
        return Ok(None);
    };
    match mounts_by_runtime(&process, spec) {
        Err(_) if !process.is_alive() => Ok(None),
        table => table.map(|table| Some(ContainerTable { init, table })),
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
