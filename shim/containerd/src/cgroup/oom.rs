//! Detects out-of-memory kills in a container.
//!
//! The task that waits for the init's end owns the watch, so it reports a kill before the end that
//! the kill caused:
//!
//! ```text
//! let exit = loop {
//!     tokio::select! {
//!         exit = init.exit() => break exit,
//!         true = ooms.next() => send(TaskOOM),
//!     }
//! };
//! if ooms.take_unreported() { send(TaskOOM) }      // at once, and again just before TaskExit if something was awaited
//! send(TaskExit)
//! ```
//! The watch reports processes that the kernel *killed* in this container, for the container's, the
//! pod's or the node's limit. Version 1 also raises an alarm for a kill in a neighbour for the
//! pod's limit. The watch does not report this kill: containerd would write "OOMKilled" beside the
//! container's next exit, whatever the cause. Several kills between two checks become a single
//! report.
//!
//! The watch has 1 open descriptor (version 1) or 2 (version 2), and no inotify instance, of which
//! a node has few. A drop closes the descriptors, and the kernel forgets the registration.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::Cgroup;
use super::figures::{FlatKeyed, is_absent};
use crate::work::{Result, StepError, failed};

const WATCH: &str = "watch for out-of-memory kills";

/// After an alarm the count is read again after these pauses, in milliseconds. The kill follows at
/// once, unless the kernel must search thousands of processes for the victim.
const CHECK_PAUSES: [u64; 6] = [2, 8, 30, 100, 300, 1000];

/// The files of a [`PolledFile`] have a dozen short lines.
const MAX_CONTENT: usize = 4096;

const CONTROL: &str = "memory.oom_control";
/// The key that counts the kills.
const KILLS: &str = "oom_kill";

/// A container's memory under watch. Kills from before it was opened are not reported.
pub struct OomWatch {
    source: KillSource,
    /// The kills seen so far.
    kills: u64,
    /// The cgroup is empty or gone: no process is left that the kernel could kill.
    has_ended: bool,
}

enum KillSource {
    /// Version 1: an eventfd that the kernel raises when memory runs out, and the count of kills in
    /// `memory.oom_control`, see "OOM Control" in admin-guide/cgroup-v1/memory.
    ///
    /// The eventfd alone reports too much and too early. The kernel raises it in every cgroup below
    /// the limit that was reached (a pod's limit: all of its containers), before choosing a process
    /// to kill. A removal of the cgroup raises it too. So the eventfd is only the alarm. The count
    /// of kills decides, and is read repeatedly until the kill has happened.
    V1 {
        directory: PathBuf,
        alarm: AsyncFd<OwnedFd>,
        /// The remaining pauses: the last elements of [`CHECK_PAUSES`].
        checks_left: usize,
    },
    /// Version 2: `memory.events` counts the kills in the whole tree, and `cgroup.events` reports
    /// when the tree has no process left.
    V2 {
        memory: PolledFile,
        population: PolledFile,
    },
}

fn watch_failed(what: &str, path: &Path) -> impl FnOnce(io::Error) -> StepError {
    failed(format!("{WATCH}: {what} {}", path.display()))
}

impl OomWatch {
    /// Watches for kills from now on; earlier kills are not reported. Call this inside the event
    /// loop. Fails if the cgroup has no memory controller, and so no limit of its own.
    pub fn open(version: &Cgroup) -> Result<Self> {
        let opened = match version {
            Cgroup::V1(controllers) => {
                let memory = controllers.get("memory");
                memory.map(|memory| Self::open_v1(memory)).transpose()?
            }
            Cgroup::V2(directory) => Self::open_v2(directory)?,
        };
        let (source, kills) =
            opened.ok_or_else(|| format!("{WATCH}: the cgroup has no memory controller"))?;
        Ok(Self {
            source,
            kills,
            has_ended: false,
        })
    }

    fn open_v1(directory: &Path) -> Result<(KillSource, u64)> {
        let path = directory.join(CONTROL);
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| watch_failed("make an eventfd for", &path)(errno.into()))?;
        // Counted before the registration: a kill between the two raises no alarm but is seen at
        // the next check.
        let control = read_control(directory).map_err(watch_failed("read", &path))?;
        let kills = kills_if_counted(directory, &control).unwrap_or(0);
        // The kernel keeps neither descriptor: dropping the eventfd ends the registration.
        let control = File::open(&path).map_err(watch_failed("open", &path))?;
        let registry = directory.join("cgroup.event_control");
        let line = format!("{} {}", event.as_raw_fd(), control.as_raw_fd());
        fs::write(&registry, line).map_err(watch_failed("write", &registry))?;
        let source = KillSource::V1 {
            directory: directory.to_owned(),
            alarm: crate::kernel::watch(event, Interest::READABLE)
                .map_err(watch_failed("wait for", &path))?,
            checks_left: 0,
        };
        Ok((source, kills))
    }

    /// `None` if the cgroup has no memory controller.
    fn open_v2(directory: &Path) -> Result<Option<(KillSource, u64)>> {
        let path = directory.join("memory.events");
        let memory = match PolledFile::open(&path) {
            Err(error) if is_absent(&error) => return Ok(None),
            opened => opened.map_err(watch_failed("open", &path))?,
        };
        let events = memory.read().map_err(watch_failed("read", &path))?;
        let kills = events.of(KILLS);
        let path = directory.join("cgroup.events");
        let population = PolledFile::open(&path).map_err(watch_failed("open", &path))?;
        Ok(Some((KillSource::V2 { memory, population }, kills)))
    }

    /// Waits for the next kill. Returns false from the moment that the cgroup is gone, or empty for
    /// good. The future may be dropped at any time and created again: no kill is lost.
    pub async fn next(&mut self) -> bool {
        loop {
            if let KillSource::V2 { population, .. } = &self.source {
                // The population is read first: a kill that emptied the cgroup has been counted by
                // then.
                let population = population.read();
                self.has_ended |=
                    !population.is_ok_and(|events| events.get("populated") != Some(0));
            }
            if self.take_unreported() {
                return true;
            }
            if self.has_ended {
                return false;
            }
            let changed = match &mut self.source {
                KillSource::V1 { checks_left, .. } if *checks_left > 0 => {
                    let pause = CHECK_PAUSES[CHECK_PAUSES.len() - *checks_left];
                    tokio::time::sleep(Duration::from_millis(pause)).await;
                    // Decremented after the pause: a cancelled pause is repeated.
                    *checks_left -= 1;
                    Ok(())
                }
                // Cleared before the eventfd is read: an alarm in between wakes the task again.
                KillSource::V1 { alarm, .. } => {
                    let ready = alarm.readable().await;
                    ready.map(|mut ready| ready.clear_ready())
                }
                KillSource::V2 { memory, population } => tokio::select! {
                    changed = memory.changed() => changed,
                    changed = population.changed() => changed,
                },
            };
            self.has_ended |= changed.is_err();
        }
    }

    /// Checks once, now: true if there was a kill that neither this nor [`Self::next`] has
    /// reported.
    ///
    /// The kernel counts a kill before it kills, so after the victim was reaped its kill is
    /// visible. A cgroup that is gone has no count any more, and systemd removes a scope as soon as
    /// it is empty: call this before anything else.
    pub fn take_unreported(&mut self) -> bool {
        match &mut self.source {
            KillSource::V1 {
                directory,
                alarm,
                checks_left,
            } => {
                // The count since the last read, see eventfd(2). EAGAIN: no alarm since.
                let mut count = [0; 8];
                let read = rustix::io::read(alarm.get_ref(), &mut count);
                let alarms = read.map_or(0, |_| u64::from_ne_bytes(count));
                let is_new = match read_control(directory) {
                    Ok(control) => {
                        let kills = kills_if_counted(directory, &control);
                        kills.is_some_and(|kills| has_grown(&mut self.kills, kills))
                            || (alarms > 0 && alarm_is_enough(&control))
                    }
                    // If the cgroup is gone, its removal has raised the alarm, or soon will. More
                    // than one alarm means that memory had run out, and no file shows any more which
                    // process was killed.
                    Err(error) if is_absent(&error) => {
                        let pending = u64::from(*checks_left > 0);
                        self.has_ended = true;
                        *checks_left = 0;
                        return alarms + pending > 1;
                    }
                    Err(error) => {
                        log::warn!(
                            error:%, path:% = directory.display();
                            "memory.oom_control cannot be read"
                        );
                        false
                    }
                };
                if is_new {
                    *checks_left = 0;
                } else if alarms > 0 {
                    *checks_left = CHECK_PAUSES.len();
                }
                is_new
            }
            KillSource::V2 { memory, .. } => match memory.read() {
                Ok(events) => has_grown(&mut self.kills, events.of(KILLS)),
                Err(error) => {
                    if !is_absent(&error) {
                        log::warn!(error:%; "memory.events cannot be read");
                    }
                    self.has_ended = true;
                    false
                }
            },
        }
    }
}

/// Records the current count; true if it is more than before. It may be less, after a cgroup below
/// was removed.
fn has_grown(count: &mut u64, kills: u64) -> bool {
    kills > std::mem::replace(count, kills)
}

fn read_control(directory: &Path) -> io::Result<FlatKeyed> {
    let text = fs::read(directory.join(CONTROL))?;
    Ok(FlatKeyed::parse(&String::from_utf8_lossy(&text)))
}

/// True if kills are never counted: the kernel cannot (before 4.13), or may not kill and lets the
/// container wait for memory for ever.
fn alarm_is_enough(control: &FlatKeyed) -> bool {
    control.get(KILLS).is_none() || control.of("oom_kill_disable") != 0
}

/// The kills in a cgroup and below, if this kernel counts the kills of the cgroup itself.
fn kills_if_counted(directory: &Path, control: &FlatKeyed) -> Option<u64> {
    control.get(KILLS).map(|_| kills_below(directory))
}

/// The kills in a cgroup and its descendants: version 1 does not add them up. The kills of a cgroup
/// that is removed meanwhile are lost.
fn kills_below(directory: &Path) -> u64 {
    let mut sum = read_control(directory).map_or(0, |control| control.of(KILLS));
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            sum = sum.saturating_add(kills_below(&entry.path()));
        }
    }
    sum
}

/// A flat keyed file of the kernel that is open and watched.
///
/// poll(2) reports POLLPRI for such a file from a change until it is read through the same
/// descriptor, see `kernfs_generic_poll` in the kernel's fs/kernfs/file.c. poll costs a descriptor.
/// inotify would need an instance, and a node's default limit is 128 instances per user.
struct PolledFile(AsyncFd<OwnedFd>);

impl PolledFile {
    /// Opens a file and puts it into the event loop.
    fn open(path: &Path) -> io::Result<Self> {
        crate::kernel::watch(File::open(path)?.into(), Interest::PRIORITY).map(Self)
    }

    /// Waits until it may have changed since the last read. Cancel safe.
    async fn changed(&self) -> io::Result<()> {
        // Cleared before the file is read: a change in the meantime wakes us again.
        self.0.ready(Interest::PRIORITY).await?.clear_ready();
        Ok(())
    }

    /// Its current content. ENODEV: the cgroup was removed.
    fn read(&self) -> io::Result<FlatKeyed> {
        let mut content = [0; MAX_CONTENT];
        let length = rustix::io::pread(self.0.get_ref(), &mut content, 0)?;
        let text = String::from_utf8_lossy(&content[..length]);
        Ok(FlatKeyed::parse(&text))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;
    use crate::cgroup::live::{Fixture, RealCgroup};

    #[test]
    fn each_kill_is_reported_once() {
        let mut count = 2;
        assert!(!has_grown(&mut count, 2));
        assert!(has_grown(&mut count, 3));
        assert!(!has_grown(&mut count, 3));
        assert!(!has_grown(&mut count, 0));
        assert!(has_grown(&mut count, 1));
    }

    #[test]
    fn the_alarm_alone_counts_where_kills_are_not_counted() {
        let is_enough = |text| alarm_is_enough(&FlatKeyed::parse(text));
        assert!(!is_enough("oom_kill_disable 0\nunder_oom 1\noom_kill 3\n"));
        assert!(is_enough("oom_kill_disable 0\nunder_oom 1\n"));
        assert!(is_enough("oom_kill_disable 1\nunder_oom 1\noom_kill 0\n"));
    }

    #[test]
    fn kills_are_added_up_over_the_tree() {
        let fixture = Fixture::of(&[("memory.oom_control", "oom_kill 1\n")]);
        for (name, kills) in [("a", 2), ("a/b", 4), ("c", 8)] {
            let directory = fixture.directory().join(name);
            fs::create_dir(&directory).unwrap();
            fs::write(
                directory.join("memory.oom_control"),
                format!("oom_kill {kills}\n"),
            )
            .unwrap();
        }
        assert_eq!(kills_below(fixture.directory()), 15);
        assert_eq!(kills_below(Path::new("/nowhere/at/all")), 0);
    }

    const LONG: Duration = Duration::from_secs(60);

    /// The unified hierarchy of a hybrid node has no memory controller: a file without a count
    /// replaces its file.
    fn watch(cgroup: &RealCgroup) -> OomWatch {
        let open = || PolledFile::open(&cgroup.path().join("cgroup.events")).unwrap();
        OomWatch {
            source: KillSource::V2 {
                memory: open(),
                population: open(),
            },
            kills: 0,
            has_ended: false,
        }
    }

    #[tokio::test]
    async fn a_changed_file_wakes_and_the_watch_ends_when_the_cgroup_is_empty() {
        let Some(mut cgroup) = RealCgroup::new(&["unified"]) else {
            return;
        };
        cgroup.run("exec sleep 60");
        let mut watch = watch(&cgroup);
        assert!(
            timeout(Duration::from_millis(300), watch.next())
                .await
                .is_err()
        );
        let end = tokio::join!(timeout(LONG, watch.next()), async { cgroup.remove() }).0;
        assert!(!end.unwrap());
        assert!(!timeout(LONG, watch.next()).await.unwrap());
        assert!(!watch.take_unreported());
    }

    #[tokio::test]
    async fn two_descriptors_are_held_and_closed() {
        let Some(cgroup) = RealCgroup::new(&["unified"]) else {
            return;
        };
        let watch = watch(&cgroup);
        assert_eq!(cgroup.open_files(), 2);
        drop(watch);
        assert_eq!(cgroup.open_files(), 0);
    }

    #[tokio::test]
    async fn a_file_wakes_once_for_each_change() {
        let Some(mut cgroup) = RealCgroup::new(&["unified"]) else {
            return;
        };
        let file = PolledFile::open(&cgroup.path().join("cgroup.events")).unwrap();
        for _ in 0..3 {
            assert_eq!(file.read().unwrap().get("populated"), Some(0));
            cgroup.run("exec sleep 60");
            timeout(LONG, async {
                while file.read().unwrap().get("populated") != Some(1) {
                    file.changed().await.unwrap();
                }
            })
            .await
            .unwrap();
            // Wakes for content that was read already may still arrive; an uncleared wake would
            // repeat for ever.
            let mut wakes = 0;
            while timeout(Duration::from_millis(100), file.changed())
                .await
                .is_ok()
            {
                wakes += 1;
                assert!(wakes < 10, "it wakes again and again");
            }
            cgroup.end_all();
            timeout(LONG, async {
                while file.read().unwrap().get("populated") != Some(0) {
                    file.changed().await.unwrap();
                }
            })
            .await
            .unwrap();
        }
    }

    #[test]
    fn kills_are_counted_of_all_events() {
        // From the kernel's admin-guide/cgroup-v2.
        let text = "low 0\nhigh 7\nmax 90\noom 3\noom_kill 2\noom_group_kill 1\n";
        assert_eq!(FlatKeyed::parse(text).of(KILLS), 2);
    }
}
