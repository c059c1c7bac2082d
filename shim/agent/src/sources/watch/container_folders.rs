//! The watched folders of containers: those in which containers appear, and the directories of bound
//! files.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::hash::Hash;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use bindguard_core::error_chain;
use bindguard_guard::refresh::FileBind;
use bindguard_sys::Failure;
use rustix::fs::inotify::WatchFlags;

use crate::sources::watch::{Inotify, LINKED, NAMES, Schedule, WatchEvent, WatchId, unwatched};

/// Flags of a watch for new and written files. Symlinks are followed, as a container runtime does.
const FILES: WatchFlags = LINKED
    .union(WatchFlags::CLOSE_WRITE)
    .union(WatchFlags::MOVE_SELF);

/// The purposes of a watch. `T` names containers or pods.
#[derive(Debug)]
struct Watched<T> {
    /// Containers appear here under any name.
    has_containers: bool,
    /// The folder of containers is not there yet: names on the way to it.
    on_the_way: Vec<OsString>,
    /// Containers or pods, and the names of the files that they bind. Several may bind files of a
    /// directory.
    files: Vec<(T, PathBuf)>,
}

/// The watched folders of containers. Each survey adds the missing watches, and removes unused
/// watches.
#[derive(Debug)]
pub struct Watches<T> {
    pub inotify: Inotify,
    watched: HashMap<WatchId, Watched<T>>,
}

impl<T: Clone + Eq + Hash> Watches<T> {
    /// No watch yet.
    ///
    /// # Errors
    /// inotify_init1(2)'s.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            inotify: Inotify::new()?,
            watched: HashMap::new(),
        })
    }

    /// Plans the refreshes of the containers whose files changed. A survey is due once a container
    /// may have started, or a directory was replaced.
    pub fn take_events(&mut self, events: Vec<WatchEvent>, schedule: &mut Schedule<T>) {
        let now = Instant::now();
        let mut is_survey = false;
        for event in events {
            match event {
                WatchEvent::Appeared {
                    watch,
                    name,
                    is_complete,
                } => {
                    let Some(watched) = self.watched.get(&watch) else {
                        continue;
                    };
                    is_survey |= watched.has_containers || watched.on_the_way.contains(&name);
                    for (container, file) in &watched.files {
                        match is_complete {
                            _ if file.as_os_str() != name => {}
                            true => schedule.plan_refresh(container, now),
                            false => schedule.plan_refresh_of_made(container, now),
                        }
                    }
                }
                WatchEvent::Gone(watch) => {
                    // A renamed directory is still watched, while a new directory may have the
                    // path.
                    self.inotify.unwatch(watch);
                    is_survey |= self.watched.remove(&watch).is_some();
                }
                WatchEvent::Overflow => is_survey = true,
            }
        }
        if is_survey {
            schedule.plan_surveys(now);
        }
    }

    /// Begins a survey: returns the watches before it, for [`Watches::remove_unused`].
    pub fn begin(&mut self) -> Vec<WatchId> {
        std::mem::take(&mut self.watched).into_keys().collect()
    }

    /// Removes the watches that the survey did not need.
    pub fn remove_unused(&self, before: &[WatchId]) {
        for watch in before {
            if !self.watched.contains_key(watch) {
                self.inotify.unwatch(*watch);
            }
        }
    }

    /// Watches the folders in which containers appear. A folder that is not there may come later.
    /// Returns the reasons for which one is not watched.
    pub fn watch_states(&mut self, folders: impl IntoIterator<Item = PathBuf>) -> Vec<String> {
        let mut failures = Vec::new();
        for folder in folders {
            if let Err(error) = self.watch_state(&folder) {
                failures.push(error_chain(&error));
            }
        }
        failures
    }

    /// Watches a folder in which containers appear, or the nearest folder above it that exists.
    ///
    /// # Errors
    /// inotify_add_watch(2)'s.
    fn watch_state(&mut self, folder: &Path) -> Result<(), Failure> {
        let mut missing = None;
        for directory in folder.ancestors() {
            let Some(watched) = self.watch(directory, NAMES)? else {
                missing = directory.file_name().map(OsStr::to_owned);
                continue;
            };
            match missing {
                Some(name) => watched.on_the_way.push(name),
                None => watched.has_containers = true,
            }
            break;
        }
        Ok(())
    }

    /// `None` if the directory is not there.
    fn watch(
        &mut self,
        directory: &Path,
        flags: WatchFlags,
    ) -> Result<Option<&mut Watched<T>>, Failure> {
        match self.inotify.watch(directory, flags) {
            Ok(watch) => Ok(Some(self.watched.entry(watch).or_insert_with(|| Watched {
                has_containers: false,
                on_the_way: Vec::new(),
                files: Vec::new(),
            }))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(unwatched(directory, error)),
        }
    }

    /// Watches the directories of files that a container binds. A directory that is gone may come
    /// back, as with systemd's RuntimeDirectory=: then a survey is due. Returns the reasons for which
    /// one is not watched.
    pub fn watch_files<'b>(
        &mut self,
        container: &T,
        binds: impl IntoIterator<Item = &'b FileBind>,
    ) -> Vec<String> {
        let mut failures = Vec::new();
        for bind in binds {
            // To add a watch is a walk.
            if bind.answers()
                && let Err(error) = self.watch_file(container, &bind.directory, &bind.name)
            {
                failures.push(error_chain(&error));
            }
        }
        failures
    }

    fn watch_file(&mut self, container: &T, directory: &Path, name: &Path) -> Result<(), Failure> {
        let Some(watched) = self.watch(directory, FILES)? else {
            return self.watch_state(directory);
        };
        watched.files.push((container.clone(), name.to_owned()));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::collections::HashSet;
    use std::fs;
    use std::time::Duration;

    use super::*;
    use crate::sources::watch::{AFTER_START, Rules};

    #[derive(Debug, Default)]
    struct FileChanges {
        survey: bool,
        complete: HashSet<String>,
        made: HashSet<String>,
    }

    fn changes_within(watches: &mut Watches<String>, limit: Duration) -> FileChanges {
        let rules = Rules::of_files(Duration::from_secs(300), &AFTER_START);
        let start = Instant::now();
        let mut schedule = Schedule::new(rules, start);
        assert!(schedule.is_survey_due(start));
        let next_survey = schedule.next();
        watches.inotify.wait_with(None, limit).unwrap();
        let events = watches.inotify.read().unwrap();
        watches.take_events(events, &mut schedule);
        let complete = schedule.due(Instant::now());
        let made = schedule.due(Instant::now() + Duration::from_millis(1001));
        FileChanges {
            survey: schedule.next() < next_survey,
            complete: complete.into_iter().collect(),
            made: made.into_iter().collect(),
        }
    }

    fn changes(watches: &mut Watches<String>) -> FileChanges {
        changes_within(watches, Duration::from_secs(10))
    }

    #[test]
    fn the_folder_of_containers_may_appear_later() {
        let root = tempfile::tempdir().unwrap();
        let mut watches = Watches::<String>::new().unwrap();
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
        let mut watches = Watches::<String>::new().unwrap();
        let directory = root.path().join("run/service");
        for made in ["run", "run/service"] {
            watches.begin();
            watches
                .watch_file(&"a".to_owned(), &directory, Path::new("app.conf"))
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
        let mut watches = Watches::<String>::new().unwrap();
        for container in ["a", "b"] {
            watches
                .watch_file(&container.to_owned(), &directory, Path::new("app.conf"))
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
            changes_within(&mut watches, Duration::from_millis(50))
                .complete
                .is_empty()
        );
    }
}
