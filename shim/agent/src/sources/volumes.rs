//! The volumes of pods below a kubelet root: [`KubeletVolumes`], which the kubelet or a driver
//! updates by a rename of `..data`, and [`MountedVolumes`], which the host mounts anew.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bindguard_core::error_chain;
use bindguard_core::kubelet::{Plugin, Writer};
use bindguard_guard::refresh::VolumeOfPod;
use bindguard_operator::containers::pod_state_folders;
use bindguard_sys::Failure;
use bindguard_sys::observe::children;
use tracing::{info, warn};

use crate::pods::{PodLookup, PodsWithBinds};
use crate::say_once::SayOnce;
use crate::sinks::metrics::Metrics;
use crate::sources::watch::{
    self, AFTER_START, Followed, Inotify, Rules, Schedule, TreeChanges, WatchEvent, WatchTree,
    Watches, folder_of_pods,
};
use crate::threads::Backoff;
use crate::work::pod_refreshes::{PodOfRoot, Updates};
use crate::work::turns::Turns;

/// The times after an update at which its volume is checked again. A kubelet may bind a subpath
/// from the old payload in the very moment of the update (kubernetes#127602), and no event reports
/// a bind. The update lands 60 to 230 ms around the bind.
const AFTER_UPDATE: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(1)];

/// Follows the kubelet's updates.
#[derive(Debug)]
pub struct KubeletVolumes<'a> {
    root: &'a Path,
    tree: WatchTree,
    updates: Updates<'a>,
    metrics: &'a Metrics,
    /// Set once the first survey is done.
    ready: &'a AtomicBool,
}

impl<'a> KubeletVolumes<'a> {
    /// Follows them for ever.
    ///
    /// # Errors
    /// If inotify fails.
    pub fn follow(
        root: &'a Path,
        updates: Updates<'a>,
        metrics: &'a Metrics,
        ready: &'a AtomicBool,
        interval: Duration,
    ) -> io::Result<()> {
        let rules = Rules {
            interval,
            retries: Backoff::of_surveys(interval),
            after_start: &[Duration::ZERO],
            recheck: &AFTER_UPDATE,
            is_paced: false,
        };
        let mut followed = Self {
            root,
            tree: WatchTree::new(root.to_owned(), Inotify::new()?),
            updates,
            metrics,
            ready,
        };
        watch::follow(&mut followed, Schedule::new(rules, Instant::now()))
    }

    /// Plans what changed after a survey.
    fn note(&mut self, changes: TreeChanges, schedule: &mut Schedule<VolumeOfPod>) {
        self.metrics
            .volume_updates
            .inc_by(changes.volumes.len() as u64);
        let now = Instant::now();
        for volume in &changes.volumes {
            schedule.plan_with_rechecks(volume, now);
        }
        if changes.survey {
            self.metrics.interruptions.inc();
            schedule.plan_surveys(now);
        } else if !changes.errors.is_empty() {
            schedule.surveyed(false, now);
        }
        self.warn(&changes);
    }

    fn warn(&self, changes: &TreeChanges) {
        for error in &changes.errors {
            self.metrics.watch_errors.inc();
            warn!("{}", error_chain(error));
        }
    }
}

impl Followed for KubeletVolumes<'_> {
    type Id = VolumeOfPod;

    fn inotify(&self) -> &Inotify {
        &self.tree.inotify
    }

    fn survey(&mut self, schedule: &mut Schedule<VolumeOfPod>) -> bool {
        let start = Instant::now();
        let changes = self.tree.survey();
        if changes.survey {
            schedule.plan_surveys(Instant::now());
        }
        self.warn(&changes);
        self.updates.follow(&changes.volumes);
        let (volumes, root) = (self.tree.volumes(), self.root.display());
        let label = [("root", root.to_string())];
        let watched = self.metrics.watched_volumes.get_or_create(&label);
        watched.set(volumes as i64);
        if !self.ready.swap(true, Ordering::Relaxed) {
            let took = start.elapsed();
            info!("surveyed {root} in {took:?}: {volumes} volumes");
        }
        changes.errors.is_empty()
    }

    fn take_events(&mut self, events: Vec<WatchEvent>, schedule: &mut Schedule<VolumeOfPod>) {
        let changes = self.tree.follow(events);
        self.note(changes, schedule);
    }

    /// A mount over a watched folder is no event of the folder: after a boot the kubelet mounts the
    /// volumes of its pods over the folders on the disk.
    fn follows_mounts(&self) -> bool {
        true
    }

    fn take_mounts(&mut self, places: &[PathBuf], schedule: &mut Schedule<VolumeOfPod>) {
        let changes = self.tree.mounted(places);
        self.note(changes, schedule);
    }

    fn refresh(&mut self, due: Vec<VolumeOfPod>, _: &mut Schedule<VolumeOfPod>) {
        self.updates.follow(&due);
    }
}

/// What is known of the containers of the pods that opted in, by the pods' uids and the containers'
/// ids.
pub type OfContainers<T> = HashMap<String, HashMap<String, T>>;

/// Queries the containers of these pods again, and returns the pods with a new container. `read`
/// gets the id of a new container. `failures` gets the reasons why containers are not known; what
/// was known of them stays.
pub fn query_containers<T>(
    known: &mut OfContainers<T>,
    pods: &PodLookup,
    uids: Vec<String>,
    mut read: impl FnMut(&str) -> Option<T>,
    failures: &mut Vec<String>,
) -> Vec<String> {
    let (mut before, now) = (std::mem::take(known), Instant::now());
    let mut with_new = Vec::new();
    for uid in uids {
        let mut known_of_pod = before.remove(&uid).unwrap_or_default();
        let opted_in = match pods.opted_in(&uid, now, true) {
            Ok(Some(opted_in)) => opted_in,
            Ok(None) => continue,
            // A runtime that does not answer still has its containers.
            Err(error) => {
                failures.push(error_chain(&error));
                known.insert(uid, known_of_pod);
                continue;
            }
        };
        let (mut containers, mut has_new) = (HashMap::new(), false);
        for container in opted_in.containers {
            let found = known_of_pod.remove(&container.id).or_else(|| {
                let found = read(&container.id);
                has_new |= found.is_some();
                found
            });
            if let Some(found) = found {
                containers.insert(container.id, found);
            }
        }
        if has_new {
            with_new.push(uid.clone());
        }
        known.insert(uid, containers);
    }
    with_new
}

/// Follows the mounts of drivers: once the host mounts a volume anew, the containers of its pod are
/// refreshed, if the pod opted in. Pods that opted in to host-root binds are refreshed at the first
/// sight of a new container, and at each survey.
///
/// ```text
/// a container starts ─► pods that opted in ─ none? ─► wait for the next container
///                          │
///                          ▼
///       the mount table changes ─► new mounts ─ of such a pod? ─► re-bind subpaths ─► refresh the pod
/// ```
///
/// The mount table is watched only while a pod has opted in to volumes. The pod's sandbox has the
/// annotations and starts before the containers. So a new folder of a container causes two lists of
/// the pods: the runtime lists the container a moment later.
#[derive(Debug)]
pub struct MountedVolumes<'a, F> {
    root: &'a Path,
    pods: &'a PodLookup,
    refreshes: &'a Turns<PodOfRoot>,
    updates: Updates<'a>,
    watches: Watches,
    /// Starts a thread for files of the host, once a pod opted in to them.
    follow_files: F,
    interval: Duration,
    /// The time of the next refresh of all pods: a mount that was moved, or came while the agent did
    /// not run, is no event. It stays past while the runtime does not answer.
    next_survey: Instant,
    /// The folder of the root's pods, by the name that the mount table has.
    folder: PathBuf,
    opted_in: PodsWithBinds,
    /// The reasons for which the list was not complete.
    failures: SayOnce<String>,
    /// The reasons for which the folder of a pod's subpaths could not be read.
    unread: SayOnce<String, String>,
    /// The running containers of each pod that opted in to host-root binds: a runtime without
    /// bindguard makes the binds of a restarted container private again.
    with_roots: OfContainers<()>,
}

impl<'a, F: Fn()> MountedVolumes<'a, F> {
    /// Follows them for ever. No pod is known yet.
    ///
    /// # Errors
    /// If inotify fails.
    pub fn follow(
        root: &'a Path,
        pods: &'a PodLookup,
        refreshes: &'a Turns<PodOfRoot>,
        updates: Updates<'a>,
        interval: Duration,
        follow_files: F,
    ) -> io::Result<()> {
        let now = Instant::now();
        let mut followed = Self {
            root,
            pods,
            refreshes,
            updates,
            watches: Watches::new()?,
            follow_files,
            interval,
            next_survey: now,
            folder: PathBuf::new(),
            opted_in: PodsWithBinds::new(),
            failures: SayOnce::default(),
            unread: SayOnce::default(),
            with_roots: OfContainers::new(),
        };
        let rules = Rules {
            is_paced: false,
            ..Rules::of_files(interval, &AFTER_START)
        };
        watch::follow(&mut followed, Schedule::new(rules, now))
    }

    fn pod(&self, uid: &str) -> PodOfRoot {
        PodOfRoot {
            kubelet_root: self.root.to_owned(),
            uid: uid.to_owned(),
        }
    }

    /// Lists the pods that opted in, and plans the refresh of the new ones and of those with a new
    /// container that may have host-root binds, or of all.
    fn list_pods(&mut self, failures: &mut Vec<String>, schedule: &mut Schedule<String>) {
        let opted_in = match self.pods.with_binds() {
            Ok(opted_in) => opted_in,
            // A runtime that does not answer still has its pods.
            Err(error) => return failures.push(error_chain(&error)),
        };
        let now = Instant::now();
        let is_survey = now >= self.next_survey;
        if is_survey {
            self.next_survey = now + self.interval;
        }
        let before = std::mem::replace(&mut self.opted_in, opted_in);
        self.folder = folder_of_pods(self.root);
        let (mut with_roots, mut has_files) = (Vec::new(), false);
        for (uid, binds) in &self.opted_in {
            let is_new = !before.contains_key(uid);
            if is_new || is_survey {
                schedule.plan_refresh(uid, now);
            }
            if is_new && binds.volumes {
                // The watch reports no mount that came before it.
                schedule.plan_rechecks(uid, now);
            }
            if binds.host_root {
                with_roots.push(uid.clone());
            }
            has_files |= binds.host_files;
        }
        let known = &mut self.with_roots;
        for uid in query_containers(known, self.pods, with_roots, |_| Some(()), failures) {
            schedule.plan_refresh(&uid, now);
        }
        if has_files {
            (self.follow_files)();
        }
    }
}

impl<F: Fn()> Followed for MountedVolumes<'_, F> {
    type Id = String;

    fn inotify(&self) -> &Inotify {
        &self.watches.inotify
    }

    fn survey(&mut self, schedule: &mut Schedule<String>) -> bool {
        let before = self.watches.begin();
        let mut failures = watch_states(&mut self.watches);
        self.watches.remove_unused(&before);
        let mut of_list = Vec::new();
        self.list_pods(&mut of_list, schedule);
        if self.next_survey > Instant::now() {
            schedule.plan_survey_at(self.next_survey);
        }
        for why in of_list {
            failures.push(format!(
                "list the pods below {}: {why}",
                self.root.display()
            ));
        }
        let is_complete = failures.is_empty();
        let tried_again = failures
            .into_iter()
            .map(|why| format!("{why}; trying again"));
        self.failures.warn((), tried_again);
        is_complete
    }

    fn take_events(&mut self, events: Vec<WatchEvent>, schedule: &mut Schedule<String>) {
        self.watches.take_events(events, schedule);
    }

    fn follows_mounts(&self) -> bool {
        self.opted_in.values().any(|binds| binds.volumes)
    }

    fn take_mounts(&mut self, places: &[PathBuf], schedule: &mut Schedule<String>) {
        let mut uids = HashSet::new();
        uids.extend(
            places
                .iter()
                .filter_map(|place| pod_with_volume_at(place, &self.folder)),
        );
        let now = Instant::now();
        for (uid, binds) in &self.opted_in {
            if binds.volumes && uids.contains(uid.as_str()) {
                schedule.plan_with_rechecks(uid, now);
            }
        }
    }

    /// Refreshes pods, the subpaths on the host first, as after an update of the kubelet.
    fn refresh(&mut self, due: Vec<String>, schedule: &mut Schedule<String>) {
        let mut with_subpaths = Vec::new();
        for uid in due {
            let pod = self.pod(&uid);
            let (volumes, unread) = match volumes_with_subpaths(&pod) {
                Ok(volumes) => (volumes, None),
                Err(error) => (Vec::new(), Some(error_chain(&error))),
            };
            let news = self.unread.news(uid.clone(), Vec::from_iter(unread));
            for why in news {
                warn!("{why}; trying again");
                schedule.plan_rechecks(&uid, Instant::now());
            }
            if volumes.is_empty() {
                self.refreshes.plan(pod);
            }
            with_subpaths.extend(volumes);
        }
        if !with_subpaths.is_empty() {
            // This plans the refresh.
            self.updates.follow(&with_subpaths);
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

/// The volumes of a pod with subpaths, without the kubelet's own volumes, which [`KubeletVolumes`]
/// follows.
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
        let mut written = Plugin::all().filter(|plugin| plugin.writer == Writer::Kubelet);
        let is_written_by_kubelet = written.any(|plugin| {
            let folder = directory.join("volumes").join(plugin.folder);
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
        if let Err(error) = watches.watch_state(&folder) {
            failures.push(error_chain(&error));
        }
    }
    failures
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::fs;
    use std::os::unix::fs::symlink;
    use std::sync::Arc;
    use std::thread;

    use bindguard_config::Config;
    use bindguard_guard::{Probes, in_real_folder};
    use bindguard_testing::own_namespace;
    use bindguard_testing::scene::tmpfs;

    use super::*;
    use crate::sinks::events::Events;
    use crate::sinks::journal::JournalWriter;
    use crate::sinks::reporting::Reporting;
    use crate::threads::IdleMemory;

    const NO_SURVEY: Duration = Duration::from_secs(3600);

    /// Runs work with updates that refresh no container, in a thread.
    fn with_updates(
        pods: PodLookup,
        work: impl FnOnce(Updates<'_>, &PodLookup, &Metrics) + Send + 'static,
    ) -> Arc<Metrics> {
        let metrics = Metrics::new();
        let counted = Arc::clone(&metrics);
        thread::spawn(move || {
            let (config, metrics) = (Config::default(), counted);
            let reporting = Reporting {
                events: Events::off(Arc::clone(&metrics)),
                journal: JournalWriter::off(Arc::clone(&metrics)),
                memory: IdleMemory::default(),
            };
            let updates = Updates::new(&config, &metrics, &reporting, &pods, None);
            work(updates, &pods, &metrics);
        });
        metrics
    }

    /// A kubelet root that is followed, after the first survey.
    struct FollowedRoot {
        metrics: Arc<Metrics>,
        surveyed: Arc<AtomicBool>,
    }

    impl FollowedRoot {
        fn follow(root: &Path) -> Self {
            let root = root.to_owned();
            let surveyed = Arc::new(AtomicBool::new(false));
            let ready = Arc::clone(&surveyed);
            let metrics = with_updates(PodLookup::unanswered(), move |updates, _, metrics| {
                KubeletVolumes::follow(&root, updates, metrics, &ready, NO_SURVEY).unwrap();
            });
            let followed = Self { metrics, surveyed };
            followed.wait_for_survey();
            followed
        }

        fn wait_for_survey(&self) {
            wait_until(|| self.surveyed.swap(false, Ordering::Relaxed));
        }

        fn wait_for_update(&self, act: impl FnOnce()) {
            let before = self.metrics.volume_updates.get();
            act();
            wait_until(|| self.metrics.volume_updates.get() > before);
        }
    }

    fn wait_until(mut is_done: impl FnMut() -> bool) {
        let start = Instant::now();
        while !is_done() {
            assert!(start.elapsed() < Duration::from_secs(30), "no notice");
            thread::sleep(Duration::from_millis(10));
        }
    }

    fn update(volume: &Path, payload: &str) {
        symlink(payload, volume.join("..data_tmp")).unwrap();
        fs::rename(volume.join("..data_tmp"), volume.join("..data")).unwrap();
    }

    /// After a boot the folders of the pods are on the disk, and the agent starts first.
    #[test]
    fn a_volume_that_the_kubelet_mounts_after_the_survey_is_followed() {
        if !own_namespace() {
            return;
        }
        let root = tempfile::tempdir().unwrap();
        let pod = root.path().join("pods/u-1");
        let volume = pod.join("volumes/kubernetes.io~secret/keys");
        fs::create_dir_all(&volume).unwrap();
        fs::create_dir_all(pod.join("volume-subpaths/keys/app")).unwrap();
        let followed = FollowedRoot::follow(root.path());
        followed.wait_for_update(|| tmpfs(&volume));
        for payload in ["..2026_11_21_05_10_00.1", "..2026_11_21_05_10_00.2"] {
            followed.wait_for_update(|| update(&volume, payload));
        }
    }

    /// Surveys find what a mount covered.
    #[test]
    fn without_a_mount_table_updates_are_followed() {
        if !own_namespace() {
            return;
        }
        let root = tempfile::tempdir().unwrap();
        let pod = root.path().join("pods/u-1");
        let volume = pod.join("volumes/kubernetes.io~configmap/keys");
        fs::create_dir_all(&volume).unwrap();
        fs::create_dir_all(pod.join("volume-subpaths/keys/app")).unwrap();
        tmpfs("/proc".as_ref());
        let followed = FollowedRoot::follow(root.path());
        followed.wait_for_update(|| update(&volume, "..2026_11_21_05_10_00.1"));
    }

    /// A node may mount the disk of its kubelet late.
    #[test]
    fn pods_on_a_disk_that_is_mounted_after_the_survey_are_followed() {
        if !own_namespace() {
            return;
        }
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("pods")).unwrap();
        let followed = FollowedRoot::follow(root.path());
        tmpfs(root.path());
        fs::create_dir(root.path().join("pods")).unwrap();
        followed.wait_for_survey();
        followed.wait_for_update(|| {
            let pod = root.path().join("pods/u-1");
            fs::create_dir_all(pod.join("volumes/kubernetes.io~configmap/keys")).unwrap();
            fs::create_dir_all(pod.join("volume-subpaths/keys/app")).unwrap();
        });
    }

    /// The runtime restarts, or the node boots: the pods are listed again before the next survey.
    #[test]
    fn a_runtime_that_does_not_answer_is_queried_again() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("cri.sock");
        let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let root = folder.path().to_owned();
        with_updates(
            PodLookup::unanswered_at(&socket),
            move |updates, pods, _| {
                let refreshes = Turns::default();
                MountedVolumes::follow(&root, pods, &refreshes, updates, NO_SURVEY, || {}).unwrap();
            },
        );
        listener.set_nonblocking(true).unwrap();
        // A query may connect several times at once.
        let (start, query_time) = (Instant::now(), Duration::from_secs(4));
        while listener.accept().is_err() || start.elapsed() < query_time {
            assert!(start.elapsed() < Duration::from_secs(60), "no new query");
            thread::sleep(Duration::from_millis(10));
        }
    }

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
        symlink("data", disk.join("link")).unwrap();
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
}
