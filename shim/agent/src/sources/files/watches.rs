//! The watched folders: those in which containers appear, and the directories of bound files.

use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::sources::watch::{Completeness, Inotify, WatchError, WatchEvent, WatchId, Woken};

/// The purposes of a watch.
#[derive(Debug, Default)]
struct Watched {
    /// Containers appear here under any name.
    has_containers: bool,
    /// The folder of containers is not there yet: names on the way to it.
    on_the_way: Vec<OsString>,
    /// Containers, and the names of the files that they bind. Several containers may bind files of
    /// a directory.
    files: Vec<(String, PathBuf)>,
}

/// The result of events.
#[derive(Debug, Default)]
pub struct FileChanges {
    /// A container may have started, or a directory was replaced: a survey is due.
    pub survey: bool,
    /// The containers whose file is complete.
    pub complete: HashSet<String>,
    /// The containers whose file was made, and which a program may still write.
    pub made: HashSet<String>,
}

/// All watches. Each survey adds the missing watches, and removes unused watches.
#[derive(Debug)]
pub struct Watches {
    inotify: Inotify,
    watched: HashMap<WatchId, Watched>,
}

impl Watches {
    /// No watch yet.
    pub fn new(inotify: Inotify) -> Self {
        Self {
            inotify,
            watched: HashMap::new(),
        }
    }

    /// Waits for an event, or for a change of this mount table.
    ///
    /// # Errors
    /// poll(2)'s.
    pub fn wait_with(&self, mounts: Option<BorrowedFd<'_>>, limit: Duration) -> io::Result<Woken> {
        self.inotify.wait_with(mounts, limit)
    }

    /// Waits for events.
    ///
    /// # Errors
    /// inotify's.
    pub fn wait(&mut self, limit: Duration) -> io::Result<FileChanges> {
        let mut changes = FileChanges::default();
        for event in self.inotify.wait(Some(limit))? {
            match event {
                WatchEvent::Appeared(watch, name, completeness) => {
                    self.appeared(watch, &name, completeness, &mut changes)
                }
                WatchEvent::Gone(watch) => {
                    // A renamed directory is still watched, while a new directory may have the
                    // path.
                    self.inotify.unwatch(watch);
                    changes.survey |= self.watched.remove(&watch).is_some();
                }
                WatchEvent::Overflow => changes.survey = true,
            }
        }
        Ok(changes)
    }

    fn appeared(
        &self,
        watch: WatchId,
        name: &OsStr,
        completeness: Completeness,
        changes: &mut FileChanges,
    ) {
        let Some(watched) = self.watched.get(&watch) else {
            return;
        };
        changes.survey |=
            watched.has_containers || watched.on_the_way.iter().any(|next| next == name);
        let changed = match completeness {
            Completeness::Complete => &mut changes.complete,
            Completeness::Made => &mut changes.made,
        };
        let meant = watched
            .files
            .iter()
            .filter(|(_, file)| file.as_os_str() == name);
        changed.extend(meant.map(|(container, _)| container.clone()));
    }

    /// Begins a survey: returns the watches before it, for [`Watches::remove_unused`].
    pub fn begin(&mut self) -> Vec<WatchId> {
        std::mem::take(&mut self.watched).into_keys().collect()
    }

    /// Removes the watches that the survey did not need.
    pub fn remove_unused(&self, before: &[WatchId]) {
        let unused = before
            .iter()
            .filter(|watch| !self.watched.contains_key(watch));
        unused.for_each(|watch| self.inotify.unwatch(*watch));
    }

    /// Watches a folder in which containers appear, or the nearest folder above it that exists.
    ///
    /// # Errors
    /// inotify_add_watch(2)'s.
    pub fn watch_state(&mut self, folder: &Path) -> Result<(), WatchError> {
        let mut missing = None;
        for directory in folder.ancestors() {
            match self.inotify.watch(directory) {
                Ok(watch) => {
                    let watched = self.watched.entry(watch).or_default();
                    match missing {
                        Some(name) => watched.on_the_way.push(name),
                        None => watched.has_containers = true,
                    }
                    return Ok(());
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    missing = directory.file_name().map(OsStr::to_owned);
                }
                Err(source) => {
                    return Err(WatchError {
                        directory: directory.to_owned(),
                        source,
                    });
                }
            }
        }
        Ok(())
    }

    /// Watches the directory of a file that a container binds. A directory that is gone may come
    /// back, as with systemd's RuntimeDirectory=: then a survey is due.
    ///
    /// # Errors
    /// inotify_add_watch(2)'s.
    pub fn watch_file(
        &mut self,
        container: &str,
        directory: &Path,
        name: &Path,
    ) -> Result<(), WatchError> {
        let watch = match self.inotify.watch_files(directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return self.watch_state(directory);
            }
            watch => watch,
        };
        let watch = watch.map_err(|source| WatchError {
            directory: directory.to_owned(),
            source,
        })?;
        self.watched
            .entry(watch)
            .or_default()
            .files
            .push((container.to_owned(), name.to_owned()));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::fs;

    use super::*;

    fn changes(watches: &mut Watches) -> FileChanges {
        watches.wait(Duration::from_secs(10)).unwrap()
    }

    #[test]
    fn the_folder_of_containers_may_appear_later() {
        let root = tempfile::tempdir().unwrap();
        let mut watches = Watches::new(Inotify::new().unwrap());
        let state = root.path().join("run/crun");
        for (made, is_survey) in [
            ("other", false),
            ("run", true),
            ("run/other", false),
            ("run/crun", true),
        ] {
            watches.begin();
            watches.watch_state(&state).unwrap();
            fs::create_dir(root.path().join(made)).unwrap();
            assert_eq!(changes(&mut watches).survey, is_survey, "{made}");
        }
        watches.begin();
        watches.watch_state(&state).unwrap();
        fs::create_dir(state.join("id")).unwrap();
        assert!(changes(&mut watches).survey);
    }

    #[test]
    fn the_directory_of_a_file_may_come_back() {
        let root = tempfile::tempdir().unwrap();
        let mut watches = Watches::new(Inotify::new().unwrap());
        let directory = root.path().join("run/service");
        for made in ["run", "run/service"] {
            watches.begin();
            watches
                .watch_file("a", &directory, Path::new("app.conf"))
                .unwrap();
            fs::create_dir(root.path().join(made)).unwrap();
            assert!(changes(&mut watches).survey, "{made}");
        }
    }

    #[test]
    fn each_way_of_replacing_a_file_is_seen() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("conf");
        fs::create_dir(&directory).unwrap();
        let at = |name: &str| directory.join(name);
        fs::write(at("app.conf"), "one").unwrap();
        let mut watches = Watches::new(Inotify::new().unwrap());
        for container in ["a", "b"] {
            watches
                .watch_file(container, &directory, Path::new("app.conf"))
                .unwrap();
        }
        let both = HashSet::from(["a".to_owned(), "b".to_owned()]);
        fs::write(at("app.conf.new"), "two").unwrap();
        fs::rename(at("app.conf.new"), at("app.conf")).unwrap();
        assert_eq!(changes(&mut watches).complete, both);
        // In place, and removed and created again.
        fs::write(at("app.conf"), "three").unwrap();
        assert_eq!(changes(&mut watches).complete, both);
        fs::remove_file(at("app.conf")).unwrap();
        std::os::unix::fs::symlink("app.conf.4", at("app.conf")).unwrap();
        let made = changes(&mut watches);
        assert_eq!(
            (made.made, made.complete.len(), made.survey),
            (both, 0, false)
        );
        // The directory itself.
        fs::rename(&directory, root.path().join("old")).unwrap();
        assert!(changes(&mut watches).survey);
        fs::write(root.path().join("old/app.conf.4"), "").unwrap();
        assert!(
            watches
                .wait(Duration::from_millis(50))
                .unwrap()
                .complete
                .is_empty()
        );
    }
}
