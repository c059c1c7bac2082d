//! Single files and sockets of the host in pods that opted in to `host-files`: a pod is refreshed
//! once the name of such a file leads to a different file.
//!
//! The thread starts with the first pod that opted in. A file on a server that hangs delays the
//! other files of pods until the next survey, and nothing else.

use std::path::{Path, PathBuf};
use std::time::Instant;

use bindguard_core::error_chain;
use bindguard_core::paths::lies_in;
use bindguard_core::places::Places;
use bindguard_guard::refresh::FileBind;
use bindguard_operator::containers::host_files_of_container;

use crate::pods::PodLookup;
use crate::say_once::SayOnce;
use crate::sinks::metrics::Metrics;
use crate::sources::volumes::{OfContainers, query_containers, watch_states};
use crate::sources::watch::{Followed, Inotify, Schedule, WatchEvent, Watches};
use crate::work::pod_refreshes::PodOfRoot;
use crate::work::turns::Turns;

/// Limits of watched files, for each pod and for each kubelet root. Surveys refresh further files.
const MAX_FILES_OF_POD: usize = 64;
const MAX_FILES: usize = 1024;

/// The pods below a kubelet root.
#[derive(Debug)]
pub struct PodFiles<'a> {
    pub root: &'a Path,
    pub pods: &'a PodLookup,
    pub places: &'a Places,
    pub refreshes: &'a Turns<PodOfRoot>,
    pub metrics: &'a Metrics,
    pub watches: Watches,
    /// The files of the pods that opted in.
    pub files: OfContainers<Vec<FileBind>>,
    /// The reasons for which the last survey was not complete.
    pub failures: SayOnce<String>,
}

impl PodFiles<'_> {
    fn pod(&self, uid: &str) -> PodOfRoot {
        PodOfRoot {
            kubelet_root: self.root.to_owned(),
            uid: uid.to_owned(),
        }
    }

    /// Lists the pods that opted in, and returns those with a container that is new. `failures` gets
    /// the reasons for which the list is not complete.
    fn list(&mut self, failures: &mut Vec<String>) -> Vec<String> {
        let mut of_list = Vec::new();
        let mut uids = Vec::new();
        match self.pods.with_binds() {
            Ok(pods) => {
                for (uid, binds) in pods {
                    if binds.host_files && self.pod(&uid).directory().symlink_metadata().is_ok() {
                        uids.push(uid);
                    }
                }
            }
            // A runtime that does not answer still has its pods.
            Err(error) => {
                let why = error_chain(&error);
                failures.push(format!("list the pods with files of the host: {why}"));
                return Vec::new();
            }
        }
        let read = |id: &str| {
            let Some(mut binds) = host_files_of_container(Path::new("/"), id, self.places) else {
                // The bundle is not complete yet.
                failures.push(format!(
                    "files of the host in container {id} are not watched: its bundle has no spec that can be read"
                ));
                return None;
            };
            // A container sees the new files of a directory by itself.
            binds.retain(|bind| !bind.is_of_directory());
            Some(binds)
        };
        let with_new = query_containers(&mut self.files, self.pods, uids, read, &mut of_list);
        for why in of_list {
            failures.push(format!("list the pods with files of the host: {why}"));
        }
        with_new
    }
}

impl Followed for PodFiles<'_> {
    type Id = String;

    fn inotify(&self) -> &Inotify {
        &self.watches.inotify
    }

    fn survey(&mut self, schedule: &mut Schedule<String>) -> bool {
        let before = self.watches.begin();
        // Before the list: a container that starts meanwhile causes an event.
        let mut failures = watch_states(&mut self.watches);
        let with_new = self.list(&mut failures);
        let mut left = MAX_FILES;
        for (uid, files) in &self.files {
            let binds = files.values().flatten().take(MAX_FILES_OF_POD.min(left));
            for bind in binds {
                left -= 1;
                // To add a watch is a walk.
                if !bind.answers() {
                    continue;
                }
                let watched = self.watches.watch_file(uid, &bind.directory, &bind.name);
                if let Err(error) = watched {
                    self.metrics.watch_errors.inc();
                    failures.push(error_chain(&error));
                }
            }
        }
        self.watches.remove_unused(&before);
        let is_complete = failures.is_empty();
        let tried_again = failures
            .into_iter()
            .map(|why| format!("{why}; trying again"));
        self.failures.warn((), tried_again);
        // A file may have been replaced before its folder was watched.
        for uid in with_new {
            schedule.plan_refresh(&uid, Instant::now());
        }
        is_complete
    }

    fn take_events(&mut self, events: Vec<WatchEvent>, schedule: &mut Schedule<String>) {
        self.watches.take_events(events, schedule);
    }

    fn follows_mounts(&self) -> bool {
        let mut of_containers = self.files.values().flat_map(|files| files.values());
        of_containers.any(|binds| !binds.is_empty())
    }

    /// A daemon such as LXCFS that restarted mounts its filesystem anew, and a disk may be mounted
    /// over the watched folder of a file: no watch reports these.
    fn take_mounts(&mut self, places: &[PathBuf], schedule: &mut Schedule<String>) {
        let is_at = |bind: &FileBind| places.iter().any(|place| lies_in(&bind.directory, place));
        let now = Instant::now();
        for (uid, files) in &self.files {
            if files.values().flatten().any(is_at) {
                schedule.plan_with_rechecks(uid, now);
                schedule.plan_surveys(now);
            }
        }
    }

    fn refresh(&mut self, due: Vec<String>, _: &mut Schedule<String>) {
        for uid in due {
            self.refreshes.plan(self.pod(&uid));
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::time::Duration;

    use super::*;
    use crate::sources::watch::{AFTER_START, Rules};

    #[test]
    fn a_list_of_pods_that_failed_is_reported_and_tried_again() {
        let (pods, places, metrics) = (PodLookup::unanswered(), Places::default(), Metrics::new());
        let mut files = PodFiles {
            root: Path::new("/nowhere"),
            pods: &pods,
            places: &places,
            refreshes: &Turns::default(),
            metrics: &metrics,
            watches: Watches::new().unwrap(),
            files: OfContainers::new(),
            failures: SayOnce::default(),
        };
        let rules = Rules::of_files(Duration::from_secs(300), &AFTER_START);
        let mut schedule = Schedule::new(rules, Instant::now());
        assert!(!files.survey(&mut schedule));
        assert_eq!(files.failures.known(&()).len(), 1);
    }
}
