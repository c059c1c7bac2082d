//! Single files and sockets of the host in pods that opted in to `host-files`: a pod is refreshed
//! once the name of such a file leads to a different file.
//!
//! The thread starts with the first pod that opted in. A file on a server that hangs delays the
//! other files of pods until the next survey, and nothing else.

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bindguard_core::error_chain;
use bindguard_core::paths::lies_in;
use bindguard_core::places::Places;
use bindguard_guard::refresh::FileBind;
use bindguard_operator::bundles::host_files_of_container;
use tracing::warn;

use crate::pods::PodLookup;
use crate::sinks::metrics::Metrics;
use crate::sources::files::{self, AFTER_START, FollowedFiles, Schedule, Watches};
use crate::sources::volumes::watch_states;
use crate::sources::watch::Inotify;
use crate::work::pod_refreshes::Refreshes;
use crate::work::refresh_queue::PodOfRoot;

/// Limits of watched files, for each pod and for each kubelet root. Surveys refresh further files.
const MAX_FILES_OF_POD: usize = 64;
const MAX_FILES: usize = 1024;

/// The files of each container of a pod, by the container's id.
type FilesOfPod = HashMap<String, Vec<FileBind>>;

/// The pods below a kubelet root.
#[derive(Debug)]
struct PodFiles<'a> {
    root: &'a Path,
    pods: &'a PodLookup,
    places: &'a Places,
    refreshes: &'a Refreshes,
    metrics: &'a Metrics,
    /// The pods that opted in, by uid.
    followed: HashMap<String, FilesOfPod>,
    /// The reasons for which the last survey was not complete.
    failures: HashSet<String>,
}

/// Follows the files of pods for ever.
///
/// # Errors
/// If there is no inotify instance, or it fails.
pub fn follow(
    interval: Duration,
    root: &Path,
    pods: &PodLookup,
    places: &Places,
    refreshes: &Refreshes,
    metrics: &Metrics,
) -> io::Result<()> {
    let mut watches = Watches::new(Inotify::new()?);
    let mut following = PodFiles {
        root,
        pods,
        places,
        refreshes,
        metrics,
        followed: HashMap::new(),
        failures: HashSet::new(),
    };
    let schedule = Schedule::new(interval, &AFTER_START, Instant::now());
    files::follow(&mut following, &mut watches, schedule)
}

impl PodFiles<'_> {
    /// Lists the pods that opted in, and returns those with a container that is new. `failures` gets
    /// the reasons for which the list is not complete.
    fn list(&mut self, failures: &mut HashSet<String>) -> Vec<String> {
        let of_list = |why: String| format!("list the pods with files of the host: {why}");
        let pods = match self.pods.with_binds() {
            Ok(pods) => pods,
            // A runtime that does not answer still has its pods.
            Err(error) => {
                failures.insert(of_list(error_chain(&error)));
                return Vec::new();
            }
        };
        let mut before = std::mem::take(&mut self.followed);
        let mut with_new = Vec::new();
        let now = Instant::now();
        for (uid, _) in pods.into_iter().filter(|(_, binds)| binds.host_files) {
            if self.pod(&uid).directory().symlink_metadata().is_err() {
                continue;
            }
            let mut known = before.remove(&uid).unwrap_or_default();
            let (files, has_new) = match self.pods.opted_in(&uid, now, true) {
                Ok(Some(opted_in)) => {
                    let ids = opted_in.containers.into_iter().map(|it| it.id);
                    self.files_of(ids, &mut known, failures)
                }
                Ok(None) => continue,
                Err(error) => {
                    failures.insert(of_list(error_chain(&error)));
                    (known, false)
                }
            };
            with_new.extend(has_new.then(|| uid.clone()));
            self.followed.insert(uid, files);
        }
        with_new
    }

    /// The files of these containers, and true if a container is new.
    fn files_of(
        &self,
        containers: impl Iterator<Item = String>,
        known: &mut FilesOfPod,
        failures: &mut HashSet<String>,
    ) -> (FilesOfPod, bool) {
        let (mut files, mut has_new) = (FilesOfPod::new(), false);
        for id in containers {
            let found = known.remove(&id).or_else(|| {
                let mut binds = host_files_of_container(Path::new("/"), &id, self.places)?;
                // A container sees the new files of a directory by itself.
                binds.retain(|bind| !bind.is_of_directory());
                has_new = true;
                Some(binds)
            });
            if let Some(binds) = found {
                files.insert(id, binds);
            } else {
                // The bundle is not complete yet.
                failures.insert(format!(
                    "files of the host in container {id} are not watched: its bundle has no spec that can be read"
                ));
            }
        }
        (files, has_new)
    }

    /// Watches the folders of the files. `failures` gets the reasons for which one is not watched.
    fn watch(&self, watches: &mut Watches, failures: &mut HashSet<String>) {
        let of_pod = |(uid, files): (&String, &FilesOfPod)| {
            let binds = files.values().flatten();
            let binds = binds.take(MAX_FILES_OF_POD);
            let binds = binds.map(|bind| (uid.clone(), bind.clone()));
            binds.collect::<Vec<_>>()
        };
        let binds = self.followed.iter().flat_map(of_pod).take(MAX_FILES);
        // To add a watch is a walk.
        for (uid, bind) in binds.filter(|(_, bind)| bind.answers()) {
            if let Err(error) = watches.watch_file(&uid, &bind.directory, &bind.name) {
                self.metrics.watch_errors.inc();
                failures.insert(error_chain(&error));
            }
        }
    }

    fn pod(&self, uid: &str) -> PodOfRoot {
        PodOfRoot {
            kubelet_root: self.root.to_owned(),
            uid: uid.to_owned(),
        }
    }
}

impl FollowedFiles for PodFiles<'_> {
    fn survey(&mut self, watches: &mut Watches) -> bool {
        let before = watches.begin();
        // Before the list: a container that starts meanwhile causes an event.
        let mut failures: HashSet<String> = watch_states(watches).into_iter().collect();
        let with_new = self.list(&mut failures);
        self.watch(watches, &mut failures);
        watches.remove_unused(&before);
        for failure in failures.difference(&self.failures) {
            warn!("{failure}; trying again");
        }
        self.failures = failures;
        // A file may have been replaced before its folder was watched.
        with_new.iter().for_each(|uid| self.refresh(uid));
        self.failures.is_empty()
    }

    fn refresh(&mut self, uid: &str) {
        self.refreshes.plan(self.pod(uid));
    }

    fn has_mounts(&self) -> bool {
        let mut files = self.followed.values().flat_map(FilesOfPod::values);
        files.any(|binds| !binds.is_empty())
    }

    fn with_mounts_at(&self, places: &[PathBuf]) -> Vec<String> {
        // A daemon such as LXCFS that restarted mounts its filesystem anew, and a disk may be
        // mounted over the folder of a file: no watch reports these.
        let is_at = |bind: &FileBind| places.iter().any(|place| lies_in(&bind.directory, place));
        let pods = self.followed.iter();
        let pods = pods.filter(|(_, files)| files.values().flatten().any(is_at));
        pods.map(|(uid, _)| uid.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::*;
    use crate::work::pod_refreshes::refreshes;

    #[test]
    fn a_list_of_pods_that_failed_is_reported_and_tried_again() {
        let (pods, places, metrics) = (PodLookup::unanswered(), Places::default(), Metrics::new());
        let (refreshes, _planned) = refreshes();
        let mut files = PodFiles {
            root: Path::new("/nowhere"),
            pods: &pods,
            places: &places,
            refreshes: &refreshes,
            metrics: &metrics,
            followed: HashMap::new(),
            failures: HashSet::new(),
        };
        let mut watches = Watches::new(Inotify::new().unwrap());
        assert!(!files.survey(&mut watches));
        assert_eq!(files.failures.len(), 1);
    }
}
