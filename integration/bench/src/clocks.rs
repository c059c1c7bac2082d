//! CPU time of processes, in milliseconds. See clock_getcpuclockid(3), getrusage(2).

use anyhow::{Context, Result};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use nix::time::{ClockId, clock_getcpuclockid, clock_gettime};
use nix::unistd::Pid;

pub fn of_this_process() -> Result<f64> {
    read(ClockId::CLOCK_PROCESS_CPUTIME_ID)
}

/// Of a process with all threads it ever had.
pub fn of_process(pid: u32) -> Result<f64> {
    let pid = Pid::from_raw(pid.try_into().context("a pid")?);
    read(clock_getcpuclockid(pid).with_context(|| format!("find the CPU clock of {pid}"))?)
}

/// The CPU time of children that have ended, and of their children.
pub fn of_children() -> Result<f64> {
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN).context("read the CPU time of children")?;
    Ok((usage.user_time() + usage.system_time()).num_microseconds() as f64 / 1e3)
}

fn read(clock: ClockId) -> Result<f64> {
    Ok(clock_gettime(clock)
        .context("read a CPU clock")?
        .num_nanoseconds() as f64
        / 1e6)
}
