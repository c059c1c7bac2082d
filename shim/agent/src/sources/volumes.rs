//! Follows the mounts of drivers: once the host mounts a volume anew, the containers of its pod are
//! refreshed, if the pod opted in. Pods that opted in to host-root binds are refreshed at the first
//! sight of a new container, and at each survey.
//!
//! ```text
//! a container starts ─► pods that opted in ─ none? ─► wait for the next container
//!                          │
//!                          ▼
//!       the mount table changes ─► new mounts ─ of such a pod? ─► re-bind subpaths ─► refresh the pod
//! ```
//!
//! The mount table is watched only while a pod has opted in to volumes. The pod's sandbox has the
//! annotations and starts before the containers. So a new folder of a container causes two lists of
//! the pods: the runtime lists the container a moment later.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bindguard_core::error_chain;
use bindguard_core::kubelet::{Plugin, Writer};
use bindguard_guard::refresh::VolumeOfPod;
use bindguard_operator::bundles::pod_state_folders;
use bindguard_operator::cri::CriError;
use bindguard_sys::Failure;
use bindguard_sys::observe::children;
use tracing::warn;

use crate::pods::{PodLookup, PodsWithBinds};
use crate::sources::files::{AFTER_START, Schedule, Watches};
use crate::sources::watch::{AFTER_MOUNT, Inotify, NewMounts, Rechecks, folder_of_pods};
use crate::work::pod_refreshes::Refreshes;
use crate::work::refresh_queue::PodOfRoot;
use crate::work::refresh_queue::Updates;

/// The volumes of the pods that opted in, below a kubelet root.
#[derive(Debug)]
pub struct FollowedVolumes<'a> {
    root: &'a Path,
    pods: &'a PodLookup,
    refreshes: &'a Refreshes,
    updates: Updates<'a>,
    /// The folder of the root's pods, by the name that the mount table has.
    folder: PathBuf,
    /// The pods that opted in.
    opted_in: PodsWithBinds,
    /// The runtime did not answer at a survey: the next list refreshes all pods.
    owes_survey: bool,
    /// The reasons for which the last list was not complete.
    failures: Vec<String>,
    /// The pods whose folder of subpaths could not be read.
    unread: HashSet<PodOfRoot>,
    /// The running containers of each pod that opted in to host-root binds, by uid: a runtime
    /// without bindguard makes the binds of a restarted container private again.
    with_roots: HashMap<String, HashSet<String>>,
    /// Listed while a pod has opted in to volumes.
    mounts: NewMounts,
    rechecks: Rechecks<PodOfRoot>,
}

impl<'a> FollowedVolumes<'a> {
    /// No pod is known yet.
    pub fn new(
        root: &'a Path,
        pods: &'a PodLookup,
        refreshes: &'a Refreshes,
        updates: Updates<'a>,
    ) -> Self {
        Self {
            root,
            pods,
            refreshes,
            updates,
            folder: root.join("pods"),
            opted_in: PodsWithBinds::new(),
            owes_survey: false,
            failures: Vec::new(),
            unread: HashSet::new(),
            with_roots: HashMap::new(),
            mounts: NewMounts::default(),
            rechecks: Rechecks::new(&AFTER_MOUNT),
        }
    }

    /// Follows them for ever. All pods that opted in are refreshed at this interval: a mount that
    /// was moved, or came while the agent did not run, is no event. `follow_files` starts a thread
    /// for files of the host, and is called while a pod has opted in to files.
    ///
    /// # Errors
    /// If the folders of containers, or the mounts of the host, cannot be watched.
    pub fn follow(&mut self, interval: Duration, follow_files: impl Fn()) -> io::Result<()> {
        let mut watches = Watches::new(Inotify::new()?);
        let mut next_survey = Instant::now();
        let mut lists = Schedule::new(interval, &AFTER_START, next_survey);
        loop {
            let now = Instant::now();
            let is_survey = now >= next_survey;
            if lists.is_survey_due(now) || is_survey {
                let before = watches.begin();
                let mut failures = watch_states(&mut watches);
                watches.remove_unused(&before);
                self.list_pods(is_survey, &mut failures)?;
                lists.surveyed(failures.is_empty(), Instant::now());
                for failure in failures.iter().filter(|it| !self.failures.contains(it)) {
                    warn!("{failure}; trying again");
                }
                self.failures = failures;
                if self.opted_in.values().any(|binds| binds.host_files) {
                    follow_files();
                }
            }
            if is_survey {
                next_survey = now + interval;
            }
            self.list_mounts(now)?;
            let due = self.rechecks.due(now);
            self.refresh(due);
            let next = [self.mounts.due(), self.rechecks.next()];
            let until = next.into_iter().flatten().fold(next_survey, Instant::min);
            let until = until.min(lists.next());
            let left = until.saturating_duration_since(Instant::now());
            let woken = watches.wait_with(self.mounts.polled(), left)?;
            if woken.by_mounts {
                self.mounts.changed(Instant::now());
            }
            if woken.by_events && watches.wait(Duration::ZERO)?.survey {
                lists.plan_surveys(Instant::now());
            }
        }
    }

    /// Lists the pods that opted in, and refreshes the new ones and those with a new container that
    /// may have host-root binds, or all. `failures` gets the reasons for which the list is not
    /// complete.
    fn list_pods(&mut self, all: bool, failures: &mut Vec<String>) -> io::Result<()> {
        self.owes_survey |= all;
        let failed = |error: CriError| {
            let (root, why) = (self.root.display(), error_chain(&error));
            format!("list the pods below {root}: {why}")
        };
        let opted_in = match self.pods.with_binds() {
            Ok(opted_in) => opted_in,
            // A runtime that does not answer still has its pods.
            Err(error) => {
                failures.push(failed(error));
                return Ok(());
            }
        };
        let all = std::mem::take(&mut self.owes_survey);
        let before = std::mem::replace(&mut self.opted_in, opted_in);
        self.folder = folder_of_pods(self.root);
        let has_volumes = self.opted_in.values().any(|binds| binds.volumes);
        // Before the refresh: a mount that comes meanwhile is an event.
        self.mounts.set_followed(has_volumes)?;
        let with_volumes = self.opted_in.iter().filter(|(_, binds)| binds.volumes);
        let new = with_volumes.filter(|(uid, _)| !before.contains_key(*uid));
        for (uid, _) in new {
            // The watch reports no mount that came before it.
            self.rechecks.plan(&self.pod(uid), Instant::now());
        }
        let (with_new_roots, failure) = self.with_new_roots();
        failures.extend(failure.map(failed));
        let opted_in = &self.opted_in;
        self.unread.retain(|pod| opted_in.contains_key(&pod.uid));
        let uids = self.opted_in.keys();
        let due = uids.filter(|uid| {
            all || !before.contains_key(*uid) || with_new_roots.iter().any(|new| new == *uid)
        });
        let due = due.map(|uid| self.pod(uid)).collect();
        self.refresh(due);
        Ok(())
    }

    /// The pods that opted in to host-root binds and have a container since the last list, and the
    /// reason why the containers of a pod are not known.
    fn with_new_roots(&mut self) -> (Vec<String>, Option<CriError>) {
        let mut failure = None;
        let mut before = std::mem::take(&mut self.with_roots);
        let mut with_new = Vec::new();
        let now = Instant::now();
        for (uid, _) in self.opted_in.iter().filter(|(_, binds)| binds.host_root) {
            let known = before.remove(uid).unwrap_or_default();
            let running = match self.pods.opted_in(uid, now, true) {
                Ok(Some(pod)) => pod.containers.into_iter().map(|it| it.id).collect(),
                Ok(None) => continue,
                Err(error) => {
                    failure = Some(error);
                    known.clone()
                }
            };
            if !known.is_superset(&running) {
                with_new.push(uid.clone());
            }
            self.with_roots.insert(uid.clone(), running);
        }
        (with_new, failure)
    }

    /// Refreshes the pods that have a new mount.
    fn list_mounts(&mut self, now: Instant) -> io::Result<()> {
        let appeared = self.mounts.listed(now)?;
        let uids: HashSet<&str> = appeared
            .iter()
            .filter_map(|place| pod_with_volume_at(place, &self.folder))
            .filter(|uid| self.opted_in.get(*uid).is_some_and(|binds| binds.volumes))
            .collect();
        let due: Vec<PodOfRoot> = uids.into_iter().map(|uid| self.pod(uid)).collect();
        for pod in &due {
            self.rechecks.plan(pod, Instant::now());
        }
        self.refresh(due);
        Ok(())
    }

    /// Refreshes pods, the subpaths on the host first, as after an update of the kubelet.
    fn refresh(&mut self, pods: Vec<PodOfRoot>) {
        let mut with_subpaths = Vec::new();
        for pod in pods {
            match volumes_with_subpaths(&pod) {
                Ok(volumes) if !volumes.is_empty() => {
                    self.unread.remove(&pod);
                    with_subpaths.extend(volumes);
                }
                Ok(_) => {
                    self.unread.remove(&pod);
                    self.refreshes.plan(pod);
                }
                Err(error) => {
                    if self.unread.insert(pod.clone()) {
                        warn!("{}; trying again", error_chain(&error));
                        self.rechecks.plan(&pod, Instant::now());
                    }
                    self.refreshes.plan(pod);
                }
            }
        }
        if !with_subpaths.is_empty() {
            // This plans the refresh.
            self.updates.follow(&with_subpaths);
        }
    }

    fn pod(&self, uid: &str) -> PodOfRoot {
        PodOfRoot {
            kubelet_root: self.root.to_owned(),
            uid: uid.to_owned(),
        }
    }
}

/// The uid of the pod with a volume mounted at this place, `<root>/pods/<uid>/volumes/...`.
fn pod_with_volume_at<'p>(place: &'p Path, folder_of_pods: &Path) -> Option<&'p str> {
    let below = place.strip_prefix(folder_of_pods).ok()?;
    let mut names = below.iter().map(|name| name.to_str());
    let (uid, folder) = (names.next()??, names.next()??);
    (folder == "volumes").then_some(uid)
}

/// The volumes of a pod with subpaths, without the kubelet's own volumes, which the thread of
/// `watch` follows.
///
/// # Errors
/// If the folder of subpaths cannot be read.
fn volumes_with_subpaths(pod: &PodOfRoot) -> Result<Vec<VolumeOfPod>, Failure> {
    let directory = pod.directory();
    let mut volumes = Vec::new();
    for entry in children(&directory.join("volume-subpaths"))? {
        let Some(volume) = entry.file_name().and_then(OsStr::to_str) else {
            continue;
        };
        let mut written = Plugin::all().filter(|plugin| plugin.writer() == Writer::Kubelet);
        let is_written_by_kubelet = written.any(|plugin| {
            let folder = directory.join("volumes").join(plugin.folder());
            folder.join(volume).symlink_metadata().is_ok()
        });
        if !is_written_by_kubelet {
            volumes.push(VolumeOfPod {
                kubelet_root: pod.kubelet_root.clone(),
                pod_uid: pod.uid.clone(),
                volume: volume.to_owned(),
            });
        }
    }
    Ok(volumes)
}

/// Watches the folders in which containers appear. A folder that is not there may come later.
/// Returns the reasons for which one is not watched.
pub fn watch_states(watches: &mut Watches) -> Vec<String> {
    let mut failures = Vec::new();
    for folder in pod_state_folders(Path::new("/")) {
        let watch = watches.watch_state(&folder);
        failures.extend(watch.err().map(|error| error_chain(&error)));
    }
    failures
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::fs;
    use std::sync::Arc;

    use bindguard_config::Config;
    use bindguard_guard::{Probes, in_real_folder};

    use super::*;
    use crate::sinks::events::Events;
    use crate::sinks::journal::JournalWriter;
    use crate::sinks::metrics::Metrics;
    use crate::sinks::reporting::Reporting;
    use crate::threads::IdleMemory;
    use crate::work::pod_refreshes::refreshes;

    #[test]
    fn a_mount_belongs_to_a_volume_of_a_pod() {
        let found = |place| pod_with_volume_at(Path::new(place), Path::new("/k/pods"));
        for place in [
            "/k/pods/u-1/volumes/kubernetes.io~csi/pv/mount",
            "/k/pods/u-1/volumes/kubernetes.io~nfs/data",
        ] {
            assert_eq!(found(place), Some("u-1"), "{place}");
        }
        for place in [
            "/k/pods/u-1/volume-subpaths/pv/app/0",
            "/k/pods/u-1",
            "/k/plugins/kubernetes.io/csi/pv/globalmount",
            "/other/pods/u-1/volumes/kubernetes.io~csi/pv/mount",
            "/",
        ] {
            assert_eq!(found(place), None, "{place}");
        }
    }

    /// The mount table has the kernel's name of a root that is a link.
    #[test]
    fn the_pods_of_a_linked_root_are_known_by_their_mounts() {
        let disk = tempfile::tempdir().unwrap();
        let disk = in_real_folder(disk.path(), &Probes::for_create()).unwrap();
        fs::create_dir_all(disk.join("data/pods")).unwrap();
        std::os::unix::fs::symlink("data", disk.join("link")).unwrap();
        let place = disk.join("data/pods/u-1/volumes/kubernetes.io~csi/pv/mount");
        for root in ["data", "link"] {
            let folder = folder_of_pods(&disk.join(root));
            assert_eq!(pod_with_volume_at(&place, &folder), Some("u-1"), "{root}");
        }
    }

    #[test]
    fn subpaths_of_kubelet_written_volumes_are_followed_elsewhere() {
        let root = tempfile::tempdir().unwrap();
        let pod = PodOfRoot {
            kubelet_root: root.path().to_owned(),
            uid: "u-1".to_owned(),
        };
        assert_eq!(volumes_with_subpaths(&pod).unwrap(), []);
        for folder in [
            "volume-subpaths/conf",
            "volumes/kubernetes.io~configmap/conf",
            "volume-subpaths/pv",
            "volumes/kubernetes.io~csi/pv",
            "volumes/kubernetes.io~csi/whole",
        ] {
            fs::create_dir_all(pod.directory().join(folder)).unwrap();
        }
        let found = volumes_with_subpaths(&pod).unwrap();
        let names: Vec<_> = found.iter().map(|it| it.volume.as_str()).collect();
        assert_eq!(names, ["pv"]);
    }

    /// The runtime restarts, or the node boots: the pods are listed again before the next survey.
    #[test]
    fn a_runtime_that_does_not_answer_is_queried_again() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("cri.sock");
        let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let root = folder.path().to_owned();
        std::thread::spawn(move || {
            let (config, metrics) = (Config::default(), Metrics::new());
            let reporting = Reporting {
                events: Events::off(Arc::clone(&metrics)),
                journal: JournalWriter::off(Arc::clone(&metrics)),
                memory: IdleMemory::default(),
            };
            let (refreshes, _planned) = refreshes();
            let pods = PodLookup::unanswered_at(&socket);
            let updates = Updates::new(&config, &metrics, &reporting, None, pods.clone());
            let mut followed = FollowedVolumes::new(&root, &pods, &refreshes, updates);
            followed.follow(Duration::from_secs(3600), || {})
        });
        listener.set_nonblocking(true).unwrap();
        // A query may connect several times at once.
        let (start, query_time) = (Instant::now(), Duration::from_secs(4));
        while listener.accept().is_err() || start.elapsed() < query_time {
            assert!(start.elapsed() < Duration::from_secs(60), "no new query");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
