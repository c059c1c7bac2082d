//! The running containers of the node: one that may write a folder of the host can lead the names
//! in it elsewhere.

use std::fmt::Debug;
use std::time::Duration;

use bindguard_core::refresh::ContainerTable;
use bindguard_sys::enter::{HeldProcess, ProcessError};
use rustix::param::clock_ticks_per_second;
use rustix::time::{ClockId, Timespec, clock_gettime};

/// Finds the running containers. A refresh needs them only if the way to a file has a symlink or
/// another folder than before.
pub trait RunningContainers: Debug {
    /// The pids of their init processes at this moment.
    fn inits(&self) -> Vec<u32>;

    /// Their mount tables. A container that ended meanwhile is left out.
    ///
    /// # Errors
    /// If a table cannot be read.
    fn tables(&self) -> Result<Vec<ContainerTable>, ProcessError> {
        let mut tables = Vec::new();
        for init in self.inits() {
            match HeldProcess::open(init).and_then(|process| process.mounts()) {
                Ok(table) => tables.push(ContainerTable { init, table }),
                Err(ProcessError::Ended(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(tables)
    }
}

/// The containers with these init processes.
impl RunningContainers for Vec<u32> {
    fn inits(&self) -> Vec<u32> {
        self.clone()
    }
}

/// The time since 1970 at which a process started; none if that cannot be read.
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
