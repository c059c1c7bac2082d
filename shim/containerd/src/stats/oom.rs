//! Hearing of the kernel's out-of-memory kills in a container.
//!
//! Version 2: `memory.events` of the cgroup is a file that poll(2) calls exceptional when it has changed. Version 1: an
//! eventfd, registered in `cgroup.event_control`, see the kernel's admin-guide/cgroup-v1/memory. In both the count of kills
//! decides. It is also looked at once more when the init has ended, so that the reason of an end is told before the end.

use std::{
    fs::{self, File},
    io,
    os::fd::{AsRawFd, OwnedFd},
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::Duration,
};

use rustix::event::{EventfdFlags, eventfd};
use tokio::io::{Interest, unix::AsyncFd};

use super::{Membership, ROOT, StatsError, keyed::Keyed, membership_of};

/// Version 1 tells that memory has run out; the kill, and its count, follow.
const KILL_FOLLOWS: Duration = Duration::from_millis(20);

/// A container's memory cgroup under watch.
#[derive(Debug)]
pub(crate) struct OomWatch {
    signal: AsyncFd<OwnedFd>,
    interest: Interest,
    /// Version 1 forgets the registration when this is closed.
    _control: Option<File>,
    directory: PathBuf,
    file: &'static str,
    kills: AtomicU64,
    gone: AtomicBool,
}

impl OomWatch {
    /// Watches the cgroup this process is in; None where there is no memory controller.
    pub(crate) fn of_process(pid: u32) -> Result<Option<Self>, StatsError> {
        let watched = match membership_of(pid)? {
            Membership::V2(directory) if directory == Path::new(ROOT) => None,
            Membership::V2(directory) => Some(Self::version_2(directory)),
            Membership::V1(controllers) => {
                let memory = controllers.into_iter().find(|(name, _)| name == "memory");
                memory.map(|(_, directory)| Self::version_1(directory))
            }
        };
        watched.transpose().map_err(StatsError::Oom)
    }

    fn version_2(directory: PathBuf) -> io::Result<Self> {
        let events = File::open(directory.join("memory.events"))?;
        Self::new(events.into(), Interest::PRIORITY, None, directory, "memory.events")
    }

    fn version_1(directory: PathBuf) -> io::Result<Self> {
        let control = File::open(directory.join("memory.oom_control"))?;
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let registration = format!("{} {}", event.as_raw_fd(), control.as_raw_fd());
        fs::write(directory.join("cgroup.event_control"), registration)?;
        Self::new(event, Interest::READABLE, Some(control), directory, "memory.oom_control")
    }

    fn new(
        signal: OwnedFd,
        interest: Interest,
        control: Option<File>,
        directory: PathBuf,
        file: &'static str,
    ) -> io::Result<Self> {
        let signal = crate::kernel::watch(signal, interest)?;
        let (kills, gone) = (AtomicU64::new(0), AtomicBool::new(false));
        let watch = Self { signal, interest, _control: control, directory, file, kills, gone };
        watch.has_killed();
        Ok(watch)
    }

    /// Resolves when there may be something new, and never again once the cgroup is gone.
    pub(crate) async fn changed(&self) {
        if self.gone.load(Ordering::Relaxed) {
            return std::future::pending().await;
        }
        match self.signal.ready(self.interest).await {
            Ok(mut ready) => {
                self.acknowledge();
                ready.clear_ready();
            }
            Err(error) => {
                tracing::warn!(%error, "out-of-memory kills are told at the end of the container only");
                self.gone.store(true, Ordering::Relaxed);
            }
        }
        if self.interest.is_readable() {
            tokio::time::sleep(KILL_FOLLOWS).await;
        }
    }

    /// The signal stays up until the file, or the eventfd, has been read.
    fn acknowledge(&self) {
        let mut content = [0; 1024];
        let read = match self.interest.is_readable() {
            true => rustix::io::read(self.signal.get_ref(), &mut content),
            false => rustix::io::pread(self.signal.get_ref(), &mut content, 0),
        };
        // ENODEV: the cgroup was removed, and its file is in a state of exception for ever.
        if read.is_err_and(|errno| errno != rustix::io::Errno::AGAIN) {
            self.gone.store(true, Ordering::Relaxed);
        }
    }

    /// Has there been a kill since this was asked last?
    pub(crate) fn has_killed(&self) -> bool {
        let Some(lines) = Keyed::read(&self.directory, self.file) else {
            self.gone.store(true, Ordering::Relaxed);
            return false;
        };
        let kills = lines.of("oom_kill");
        kills > self.kills.swap(kills, Ordering::Relaxed)
    }
}
