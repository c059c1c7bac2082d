//! Version 1: an eventfd that the kernel raises when memory runs out, and the count of kills in
//! `memory.oom_control`, see "OOM Control" in admin-guide/cgroup-v1/memory.
//!
//! The eventfd alone reports too much and too early. The kernel raises it in every cgroup below the
//! limit that was reached (a pod's limit: all of its containers), before choosing a process to
//! kill. A removal of the cgroup raises it too. So the eventfd is only the alarm. The count of
//! kills decides, and is read repeatedly until the kill has happened.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::{KillCount, OomError};
use crate::cgroup::directory::{Directory, is_absent};
use crate::cgroup::text::FlatKeyed;

/// After an alarm the count is read again after these pauses, in milliseconds. The kill follows at
/// once, unless the kernel must search thousands of processes for the victim.
const CHECK_PAUSES: [u64; 6] = [2, 8, 30, 100, 300, 1000];

/// A memory cgroup under watch.
#[derive(Debug)]
pub(crate) struct Watch {
    directory: Directory,
    alarm: AsyncFd<OwnedFd>,
    kill_count: KillCount,
    /// The remaining pauses: the last elements of [`CHECK_PAUSES`].
    checks_left: usize,
    has_ended: bool,
}

impl Watch {
    pub(super) fn open(directory: Directory) -> Result<Self, OomError> {
        let path = directory.file("memory.oom_control");
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| OomError::io("make an eventfd for", &path)(errno.into()))?;
        // Counted before the registration: a kill between the two raises no alarm but is seen at
        // the next check.
        let kill_count = KillCount(
            match Control::read(&directory).map_err(OomError::io("read", &path))? {
                Control { kills: Some(_), .. } => kills_below(directory.path()),
                Control { kills: None, .. } => 0,
            },
        );
        register(&directory, &event)?;
        let alarm = crate::kernel::watch(event, Interest::READABLE)
            .map_err(OomError::io("wait for", &path))?;
        Ok(Self {
            directory,
            alarm,
            kill_count,
            checks_left: 0,
            has_ended: false,
        })
    }

    pub(super) async fn next(&mut self) -> bool {
        loop {
            if self.take_unreported() {
                return true;
            }
            if self.has_ended {
                return false;
            }
            match self.checks_left {
                0 => self.wait_for_alarm().await,
                left => {
                    tokio::time::sleep(Duration::from_millis(
                        CHECK_PAUSES[CHECK_PAUSES.len() - left],
                    ))
                    .await;
                    // Decremented after the pause: a cancelled pause is repeated.
                    self.checks_left = left - 1;
                }
            }
        }
    }

    async fn wait_for_alarm(&mut self) {
        match self.alarm.readable().await {
            // Cleared before the eventfd is read: an alarm in between wakes the task again.
            Ok(mut ready) => ready.clear_ready(),
            Err(_) => self.has_ended = true,
        }
    }

    pub(super) fn take_unreported(&mut self) -> bool {
        let alarms = take(self.alarm.get_ref());
        let control = match Control::read(&self.directory) {
            Ok(control) => control,
            Err(error) => return self.count_unreadable(&error, alarms),
        };
        let kills = control.kills.map(|_| kills_below(self.directory.path()));
        let grew = kills.is_some_and(|kills| self.kill_count.has_grown_to(kills));
        let is_new = grew || (alarms > 0 && control.alarm_is_enough());
        if is_new {
            self.checks_left = 0;
        } else if alarms > 0 {
            self.checks_left = CHECK_PAUSES.len();
        }
        is_new
    }

    /// The count cannot be read. If the cgroup is gone, its removal has raised the alarm, or soon
    /// will. More than one alarm means that memory had run out, and no file shows any more which
    /// process was killed.
    fn count_unreadable(&mut self, error: &io::Error, alarms: u64) -> bool {
        let pending = u64::from(self.checks_left > 0);
        if is_absent(error) {
            (self.has_ended, self.checks_left) = (true, 0);
            return alarms + pending > 1;
        }
        tracing::warn!(%error, path = %self.directory.path().display(), "memory.oom_control cannot be read");
        if alarms > 0 {
            self.checks_left = CHECK_PAUSES.len();
        }
        false
    }
}

/// The content of `memory.oom_control`.
#[derive(Debug, PartialEq, Eq)]
struct Control {
    /// The kills in this very cgroup; kernels before 4.13 do not count them.
    kills: Option<u64>,
    kills_disabled: bool,
}

impl Control {
    fn read(directory: &Directory) -> io::Result<Self> {
        fs::read(directory.file("memory.oom_control"))
            .map(|text| Self::parse(&String::from_utf8_lossy(&text)))
    }

    fn parse(text: &str) -> Self {
        let lines = FlatKeyed::parse(text);
        Self {
            kills: lines.get("oom_kill"),
            kills_disabled: lines.of("oom_kill_disable") != 0,
        }
    }

    /// True if kills are never counted: the kernel cannot, or may not kill and lets the container
    /// wait for memory for ever.
    fn alarm_is_enough(&self) -> bool {
        self.kills.is_none() || self.kills_disabled
    }
}

/// The kills in a cgroup and its descendants: version 1 does not add them up. The kills of a cgroup
/// that is removed meanwhile are lost.
fn kills_below(directory: &Path) -> u64 {
    let own = Control::read(&Directory::at(directory))
        .ok()
        .and_then(|control| control.kills)
        .unwrap_or(0);
    let Ok(entries) = fs::read_dir(directory) else {
        return own;
    };
    let is_directory = |entry: &fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_dir());
    let below = entries
        .filter_map(Result::ok)
        .filter(is_directory)
        .map(|entry| kills_below(&entry.path()));
    below.fold(own, u64::saturating_add)
}

/// Lets the kernel raise the eventfd. The kernel keeps neither descriptor: dropping the eventfd
/// ends the registration.
fn register(directory: &Directory, event: &OwnedFd) -> Result<(), OomError> {
    let path = directory.file("memory.oom_control");
    let control = fs::File::open(&path).map_err(OomError::io("open", path))?;
    let path = directory.file("cgroup.event_control");
    let line = format!("{} {}", event.as_raw_fd(), control.as_raw_fd());
    fs::write(&path, line).map_err(OomError::io("write", path))
}

/// The count since the last read, see eventfd(2).
fn take(event: &OwnedFd) -> u64 {
    let mut count = [0; 8];
    // EAGAIN: no alarm since.
    rustix::io::read(event, &mut count).map_or(0, |_| u64::from_ne_bytes(count))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroup::live::Fixture;

    #[test]
    fn the_alarm_alone_counts_where_kills_are_not_counted() {
        let newer = Control::parse("oom_kill_disable 0\nunder_oom 1\noom_kill 3\n");
        assert_eq!((newer.kills, newer.alarm_is_enough()), (Some(3), false));
        assert!(Control::parse("oom_kill_disable 0\nunder_oom 1\n").alarm_is_enough());
        assert!(Control::parse("oom_kill_disable 1\nunder_oom 1\noom_kill 0\n").alarm_is_enough());
    }

    #[test]
    fn kills_are_added_up_over_the_tree() {
        let fixture = Fixture::of(&[("memory.oom_control", "oom_kill 1\n")]);
        for (name, kills) in [("a", 2), ("a/b", 4), ("c", 8)] {
            let directory = fixture.directory().file(name);
            fs::create_dir(&directory).unwrap();
            fs::write(
                directory.join("memory.oom_control"),
                format!("oom_kill {kills}\n"),
            )
            .unwrap();
        }
        assert_eq!(kills_below(fixture.directory().path()), 15);
        assert_eq!(kills_below(Path::new("/nowhere/at/all")), 0);
    }
}
