//! `--stay`: the process of a DaemonSet's pod. The process does the work, then waits for SIGTERM
//! and ends without a further change.
//!
//! A DaemonSet's pod must not end by itself. Its end means nothing for the node: pods are evicted,
//! upgraded and replaced.

use std::os::fd::AsFd;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use bindguard_operator::terminal::print_remark;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::SignalFd;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::report::Progress;

/// The first pause before unfinished work is tried again: a runtime restarts, or the shim of a
/// removed pod ends. Each pause doubles up to [`CHECK_INTERVAL`]: an operator may be needed, and
/// pods run for months.
const RETRY: Duration = Duration::from_secs(5);

/// The interval between two checks for changes by other tools.
const CHECK_INTERVAL: Duration = Duration::from_secs(60);

/// SIGTERM and SIGINT, from the first moment on. A signal during the work takes effect after the
/// work.
#[derive(Debug)]
pub struct Stay(SignalFd);

impl Stay {
    /// Blocks the signals.
    pub fn prepare() -> Result<Self> {
        let signals = SigSet::from_iter([Signal::SIGTERM, Signal::SIGINT]);
        signals.thread_block().context("block SIGTERM")?;
        Ok(Self(
            SignalFd::new(&signals).context("create a descriptor for SIGTERM")?,
        ))
    }

    /// Does the work until it succeeds, then calls `check`, and again once a minute, until a signal comes.
    ///
    /// # Errors
    /// If the work fails. The kubelet then starts the container again.
    pub fn after(
        &self,
        mut work: impl FnMut() -> Result<Progress>,
        mut check: impl FnMut(),
    ) -> Result<Progress> {
        let mut last = None;
        let mut pause = RETRY;
        loop {
            let progress = work()?;
            let is_new = last.replace(progress) != Some(progress);
            if is_new {
                pause = RETRY;
            }
            match progress {
                Progress::Done => {
                    print_remark("done; waiting for SIGTERM, which changes nothing on this node");
                    loop {
                        check();
                        if self.signal_within(CHECK_INTERVAL)? {
                            return Ok(progress);
                        }
                    }
                }
                Progress::KeptForPods if is_new => print_remark(
                    "done but for what running pods need; waiting for SIGTERM or their end",
                ),
                Progress::NameKept if is_new => print_remark(
                    "done but for a name that containers have; waiting for SIGTERM or their end",
                ),
                Progress::NameKept | Progress::KeptForPods | Progress::Unfinished => {}
            }
            // the pods of a fleet start at the same time, and query one API server
            let clock = SystemTime::now().duration_since(UNIX_EPOCH);
            let random = clock.map_or(0, |now| now.subsec_micros() % 1000);
            if self.signal_within(pause.mul_f64(1.0 - f64::from(random) / 2000.0))? {
                return Ok(progress);
            }
            pause = CHECK_INTERVAL.min(pause * 2);
        }
    }

    fn signal_within(&self, limit: Duration) -> Result<bool> {
        let limit = Timespec::try_from(limit).context("wait for SIGTERM")?;
        loop {
            let mut fds = [PollFd::from_borrowed_fd(self.0.as_fd(), PollFlags::IN)];
            match poll(&mut fds, Some(&limit)) {
                Ok(ready) => return Ok(ready > 0),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno).context("wait for SIGTERM"),
            }
        }
    }
}
