//! Version 2: `memory.events` counts the kills in the whole tree, and `cgroup.events` reports when
//! the tree has no process left.

use crate::cgroup::directory::{Directory, is_absent};
use crate::cgroup::text::FlatKeyed;

use super::polled_file::PolledFile;
use super::{KillCount, OomError};

/// A cgroup of the unified hierarchy under watch.
#[derive(Debug)]
pub(crate) struct Watch {
    memory: PolledFile,
    population: PolledFile,
    kill_count: KillCount,
    /// Empty or gone: no process is left that the kernel could kill.
    has_ended: bool,
}

impl Watch {
    pub(super) fn open(directory: &Directory) -> Result<Self, OomError> {
        let path = directory.file("memory.events");
        let memory = match PolledFile::open(&path) {
            Err(error) if is_absent(&error) => return Err(OomError::NoController),
            opened => opened.map_err(OomError::io("open", &path))?,
        };
        let kill_count = KillCount(kills(&memory.read().map_err(OomError::io("read", &path))?));
        let path = directory.file("cgroup.events");
        let population = PolledFile::open(&path).map_err(OomError::io("open", path))?;
        Ok(Self {
            memory,
            population,
            kill_count,
            has_ended: false,
        })
    }

    pub(super) async fn next(&mut self) -> bool {
        loop {
            // The population is read first: a kill that emptied the cgroup has been counted by
            // then.
            self.has_ended |= !self.is_populated();
            if self.take_unreported() {
                return true;
            }
            if self.has_ended || self.changed().await.is_err() {
                self.has_ended = true;
                return false;
            }
        }
    }

    async fn changed(&self) -> std::io::Result<()> {
        tokio::select! {
            changed = self.memory.changed() => changed,
            changed = self.population.changed() => changed,
        }
    }

    pub(super) fn take_unreported(&mut self) -> bool {
        match self.memory.read() {
            Ok(events) => self.kill_count.has_grown_to(kills(&events)),
            Err(error) => {
                if !is_absent(&error) {
                    tracing::warn!(%error, "memory.events cannot be read");
                }
                self.has_ended = true;
                false
            }
        }
    }

    fn is_populated(&self) -> bool {
        self.population
            .read()
            .is_ok_and(|events| events.get("populated") != Some(0))
    }
}

fn kills(events: &FlatKeyed) -> u64 {
    events.of("oom_kill")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;
    use crate::cgroup::live::RealCgroup;

    const LONG: Duration = Duration::from_secs(60);

    /// The unified hierarchy of a hybrid node has no memory controller: a file without a count
    /// replaces its file.
    fn watch(cgroup: &RealCgroup) -> Watch {
        let open = || PolledFile::open(&cgroup.path().join("cgroup.events")).unwrap();
        Watch {
            memory: open(),
            population: open(),
            kill_count: KillCount(0),
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
        assert_eq!(kills(&FlatKeyed::parse(text)), 2);
    }
}
