//! The volumes below a kubelet root that the kubelet or a driver updates by a rename of `..data`.
//!
//! ```text
//! .                                 pods appears: a kubelet that starts for the first time
//! pods                              a new pod appears
//! pods/UID                          volume-subpaths appears
//! pods/UID/volume-subpaths          a volume with subpaths appears
//! pods/UID/volumes/PLUGIN/VOLUME    ..data is renamed: the volume was updated
//! ```
//!
//! PLUGIN is the kubelet's, or that of a CSI volume with the same layout, whose directory is
//! `VOLUME/mount`. A volume is watched once `volume-subpaths` names it: by then the kubelet has
//! mounted it, except after a boot. Volumes without subpaths need no watch. A new mount on or above a
//! watched directory hides that directory, so the directories are then watched anew.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use std::{fs, io, mem};

use bindguard_core::error_chain;
use bindguard_core::kubelet::{DATA_LINK, Plugin, Writer};
use bindguard_core::text::lies_in;
use bindguard_guard::refresh::{VolumeOfPod, payload_of_driver};
use bindguard_guard::{Probes, in_real_folder};
use bindguard_sys::Failure;
use tracing::{info, warn};

use crate::limits::Backoff;
use crate::sinks::metrics::{LevelBy, Total};
use crate::sources::watch::{
    self, LINKED, NAMES, Rules, Schedule, Source, WatchEvent, WatchId, Watches, unwatched,
};
use crate::work::kubelet_root::{KubeletRoot, Updates};

/// The times after an update at which its volume is checked again. A kubelet may bind a subpath
/// from the old payload in the very moment of the update (kubernetes#127602), and no event reports
/// a bind. The update lands 60 to 230 ms around the bind.
const AFTER_UPDATE: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(1)];

/// Follows the kubelet's updates.
#[derive(Debug)]
struct KubeletVolumes {
    root: &'static KubeletRoot,
    /// The folder of the pods, by the name that the mount table has.
    folder: PathBuf,
    watches: Watches<VolumeOfPod>,
    watched: HashMap<WatchId, Watched>,
    /// The changes so far of an event or a survey.
    changes: Changes,
    updates: Updates,
}

/// Follows them for ever.
pub fn follow_volumes(root: &'static KubeletRoot) {
    let what = format!("follow {}", root.path.display());
    watch::follow(root.node, &what, || {
        let interval = root.node.config.agent().survey;
        let rules = Rules {
            interval,
            retries: Backoff::of_surveys(interval),
            after_start: &[Duration::ZERO],
            recheck: &AFTER_UPDATE,
            is_paced: false,
        };
        Ok((KubeletVolumes::new(root)?, rules))
    });
}

impl KubeletVolumes {
    /// Without watches.
    fn new(root: &'static KubeletRoot) -> io::Result<Self> {
        Ok(Self {
            root,
            folder: root.path.join(PODS),
            watches: Watches::new()?,
            watched: HashMap::new(),
            changes: Changes::default(),
            updates: Updates::new(root),
        })
    }

    /// Plans what changed after a survey.
    fn note(&mut self, changes: Changes, schedule: &mut Schedule<VolumeOfPod>) {
        let metrics = self.root.node.metrics;
        metrics[Total::AgentVolumeUpdates].inc_by(changes.volumes.len() as u64);
        let now = Instant::now();
        for volume in &changes.volumes {
            schedule.plan_with_rechecks(volume, now);
        }
        if changes.survey {
            metrics[Total::AgentWatchInterruptions].inc();
            schedule.plan_surveys(now);
        } else if !changes.errors.is_empty() {
            schedule.surveyed(false, now);
        }
        self.warn(&changes);
    }

    fn warn(&self, changes: &Changes) {
        for error in &changes.errors {
            self.root.node.metrics[Total::AgentWatchErrors].inc();
            warn!("{}", error_chain(error));
        }
    }
}

impl Source for KubeletVolumes {
    type Id = VolumeOfPod;

    fn watches(&mut self) -> &mut Watches<VolumeOfPod> {
        &mut self.watches
    }

    fn survey(&mut self, schedule: &mut Schedule<VolumeOfPod>) -> bool {
        let start = Instant::now();
        let changes = self.find();
        if changes.survey {
            schedule.plan_surveys(Instant::now());
        }
        self.warn(&changes);
        self.updates.follow(&changes.volumes);
        let (volumes, root) = (self.volumes(), self.root.path.display());
        let (node, label) = (self.root.node, ("root", root.to_string()));
        let watched = node.metrics[LevelBy::AgentWatchedVolumes].get_or_create(&vec![label]);
        watched.set(volumes as i64);
        if !node.ready.swap(true, Ordering::Relaxed) {
            let took = start.elapsed();
            info!("surveyed {root} in {took:?}: {volumes} volumes");
        }
        changes.errors.is_empty()
    }

    fn take_events(&mut self, events: Vec<WatchEvent>, schedule: &mut Schedule<VolumeOfPod>) {
        let changes = self.changed(events);
        self.note(changes, schedule);
    }

    /// A mount over a watched folder is no event of the folder: after a boot the kubelet mounts the
    /// volumes of its pods over the folders on the disk.
    fn follows_mounts(&self) -> bool {
        true
    }

    fn take_mounts(&mut self, places: &[PathBuf], schedule: &mut Schedule<VolumeOfPod>) {
        let changes = self.mounted(places);
        self.note(changes, schedule);
    }

    fn refresh(&mut self, due: Vec<VolumeOfPod>, _: &mut Schedule<VolumeOfPod>) {
        self.updates.follow(&due);
    }
}

// The watched directories.

const PODS: &str = "pods";
const SUBPATHS: &str = "volume-subpaths";

#[derive(Debug, Clone, PartialEq, Eq)]
enum Watched {
    Root,
    Pods,
    Pod(String),
    Subpaths(String),
    Volume(VolumeOfPod),
}

/// The result of an event or a survey.
#[derive(Debug, Default)]
struct Changes {
    /// The volumes whose subpaths may be stale, each once.
    volumes: Vec<VolumeOfPod>,
    /// Events were lost, or the folder of the pods came or went: a survey is due.
    survey: bool,
    /// Directories that could not be watched. A directory that is gone does not count.
    errors: Vec<Failure>,
}

impl KubeletVolumes {
    /// The number of watched volumes.
    fn volumes(&self) -> usize {
        let watched = self.watched.values();
        watched
            .filter(|it| matches!(it, Watched::Volume(_)))
            .count()
    }

    /// Watches every pod and every volume with subpaths that is there, and returns these volumes.
    /// Removes all other watches: after an overflow, a watch whose end was lost would stay known.
    fn find(&mut self) -> Changes {
        let before = mem::take(&mut self.watched);
        self.folder = folder_of_pods(&self.root.path);
        self.add_pods();
        for watch in before.into_keys() {
            if !self.watched.contains_key(&watch) {
                self.watches.inotify.unwatch(watch);
            }
        }
        mem::take(&mut self.changes)
    }

    /// Watches the folder of the pods and its pods, or the kubelet root until the folder is there.
    /// An administrator may replace the root or the folder by a symlink to another disk.
    fn add_pods(&mut self) {
        let pods = self.root.path.join(PODS);
        let watch = self.watches.inotify.watch(&pods, LINKED);
        let is_missing = matches!(&watch, Err(error) if error.kind() == io::ErrorKind::NotFound);
        if self.watched(watch, &pods, Watched::Pods) {
            for uid in self.names(&pods) {
                self.add_pod(&uid);
            }
            return;
        }
        let watch = self.watches.inotify.watch(&self.root.path, LINKED);
        if self.watched(watch, &self.root.path, Watched::Root) {
            // The folder may have appeared before the root was watched. A folder that is there and
            // cannot be watched waits for the next survey.
            self.changes.survey = is_missing && pods.metadata().is_ok();
        }
    }

    /// Watches again what these new mounts cover, and returns the volumes there.
    fn mounted(&mut self, places: &[PathBuf]) -> Changes {
        for place in places {
            let Ok(below) = place.strip_prefix(&self.folder) else {
                self.changes.survey |= lies_in(&self.folder, place);
                continue;
            };
            let mut names = below.iter().map(OsStr::to_str);
            match (names.next().flatten(), names.next().flatten()) {
                (None, _) => self.changes.survey = true,
                (Some(uid), None) => self.add_pod(uid),
                (Some(uid), Some("volumes")) => {
                    let subpaths = Watched::Subpaths(uid.to_owned());
                    if self.watched.values().any(|watched| *watched == subpaths) {
                        self.add_subpaths(uid);
                    }
                }
                // The kubelet's binds of subpaths.
                (Some(_), Some(_)) => {}
            }
        }
        mem::take(&mut self.changes)
    }

    /// Follows events: adds watches for new directories, and returns the volumes that changed.
    fn changed(&mut self, events: Vec<WatchEvent>) -> Changes {
        for event in events {
            match event {
                WatchEvent::Appeared { watch, name, .. } => {
                    let Some(watched) = self.watched.get(&watch).cloned() else {
                        continue;
                    };
                    match (watched, name.to_str()) {
                        (Watched::Root, Some(PODS)) => self.changes.survey = true,
                        (Watched::Pods, Some(uid)) => self.add_pod(uid),
                        (Watched::Pod(uid), Some(SUBPATHS)) => self.add_subpaths(&uid),
                        (Watched::Subpaths(uid), Some(volume)) => self.add_volume(&uid, volume),
                        (Watched::Volume(volume), Some(DATA_LINK)) => self.changes.add(volume),
                        // Other names of the kubelet's, such as `etc-hosts`, `..data_tmp` and the
                        // keys of a volume.
                        (Watched::Root | Watched::Pod(_) | Watched::Volume(_), _)
                        | (Watched::Pods | Watched::Subpaths(_), None) => {}
                    }
                }
                // The kernel dropped a watch. A volume that was mounted anew is watched again;
                // nothing else comes back under its name without an event of the directory around
                // it.
                WatchEvent::Gone(watch) => match self.watched.remove(&watch) {
                    Some(Watched::Volume(volume)) => {
                        self.add_volume(&volume.pod_uid, &volume.volume)
                    }
                    Some(Watched::Pods) => self.changes.survey = true,
                    Some(Watched::Root | Watched::Pod(_) | Watched::Subpaths(_)) | None => {}
                },
                WatchEvent::Overflow => self.changes.survey = true,
            }
        }
        mem::take(&mut self.changes)
    }

    fn add_pod(&mut self, uid: &str) {
        if self.watch(&self.root.pod(uid), Watched::Pod(uid.to_owned())) {
            self.add_subpaths(uid);
        }
    }

    fn add_subpaths(&mut self, uid: &str) {
        let subpaths = self.root.pod(uid).join(SUBPATHS);
        // Listed after the watch is there: what appears meanwhile is in the list, in an event, or
        // in both.
        if self.watch(&subpaths, Watched::Subpaths(uid.to_owned())) {
            for volume in self.names(&subpaths) {
                self.add_volume(uid, &volume);
            }
        }
    }

    /// Watches the directory of a volume with AtomicWriter's layout. The volume counts as changed:
    /// `..data` may have been renamed before.
    fn add_volume(&mut self, uid: &str, volume: &str) {
        let of_pod = VolumeOfPod {
            kubelet_root: self.root.path.clone(),
            pod_uid: uid.to_owned(),
            volume: volume.to_owned(),
        };
        let volumes = self.root.pod(uid).join("volumes");
        for plugin in Plugin::all().filter(|plugin| plugin.writer == Writer::Kubelet) {
            let directory = volumes.join(plugin.folder).join(volume);
            if self.watch(&directory, Watched::Volume(of_pod.clone())) {
                return self.changes.add(of_pod);
            }
        }
        let folder = volumes.join(Plugin::CSI.folder).join(volume);
        if let Some(directory) = payload_of_driver(&folder) {
            // Through the open directory: no walk of a path waits for a server.
            let open = format!("/proc/self/fd/{}", directory.as_fd().as_raw_fd());
            let watch = self.watches.inotify.watch(Path::new(&open), LINKED);
            if self.watched(watch, &folder, Watched::Volume(of_pod.clone())) {
                self.changes.add(of_pod);
            }
        }
    }

    /// The names in a directory that may go away meanwhile.
    fn names(&mut self, directory: &Path) -> Vec<String> {
        let listed = fs::read_dir(directory).and_then(|entries| {
            let mut names = Vec::new();
            for entry in entries {
                names.extend(entry?.file_name().into_string());
            }
            Ok(names)
        });
        listed.unwrap_or_else(|error| {
            self.changes.fail(directory, error);
            Vec::new()
        })
    }

    /// False if the directory is not there, or cannot be watched.
    fn watch(&mut self, directory: &Path, watched: Watched) -> bool {
        let watch = self.watches.inotify.watch(directory, NAMES);
        self.watched(watch, directory, watched)
    }

    fn watched(&mut self, watch: io::Result<WatchId>, directory: &Path, watched: Watched) -> bool {
        match watch {
            Ok(watch) => {
                self.watched.insert(watch, watched);
                return true;
            }
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => {}
            Err(error) => self.changes.fail(directory, error),
        }
        false
    }
}

impl Changes {
    fn add(&mut self, volume: VolumeOfPod) {
        if !self.volumes.contains(&volume) {
            self.volumes.push(volume);
        }
    }

    /// A directory that is gone is no error.
    fn fail(&mut self, directory: &Path, source: io::Error) {
        if source.kind() != io::ErrorKind::NotFound {
            self.errors.push(unwatched(directory, source));
        }
    }
}

/// The folder of the pods below a root, which may be a link.
pub fn folder_of_pods(root: &Path) -> PathBuf {
    let folder = root.join(PODS);
    in_real_folder(&folder, &Probes::for_create()).unwrap_or(folder)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::os::unix::fs::symlink;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::work::Node;

    struct Scene {
        root: tempfile::TempDir,
        volumes: KubeletVolumes,
    }

    impl Scene {
        fn new() -> Self {
            let root = tempfile::tempdir().unwrap();
            fs::create_dir(root.path().join(PODS)).unwrap();
            let volumes = volumes_below(root.path());
            Self { root, volumes }
        }

        fn make(&self, path: &str) -> PathBuf {
            let directory = self.root.path().join(path);
            fs::create_dir_all(&directory).unwrap();
            directory
        }

        /// The kubelet's rename of `..data`.
        fn update(&self, volume: &str, payload: &str) {
            let volume = self.root.path().join(volume);
            symlink(payload, volume.join("..data_tmp")).unwrap();
            fs::rename(volume.join("..data_tmp"), volume.join("..data")).unwrap();
        }

        /// The volumes that changed, until the events end.
        fn changed(&mut self) -> Vec<String> {
            let mut volumes = Vec::new();
            loop {
                let events = events_within(&self.volumes, Duration::from_millis(50));
                if events.is_empty() {
                    return volumes;
                }
                let changes = self.volumes.changed(events);
                assert!(changes.errors.is_empty() && !changes.survey, "{changes:?}");
                volumes.extend(
                    changes
                        .volumes
                        .into_iter()
                        .map(|it| format!("{}/{}", it.pod_uid, it.volume)),
                );
            }
        }
    }

    fn volumes_below(root: &Path) -> KubeletVolumes {
        let root = KubeletRoot::new(Node::silent(""), root.to_owned());
        KubeletVolumes::new(root).unwrap()
    }

    fn events_within(followed: &KubeletVolumes, limit: Duration) -> Vec<WatchEvent> {
        followed.watches.inotify.wait_with(None, limit).unwrap();
        followed.watches.inotify.read().unwrap()
    }

    fn events(followed: &KubeletVolumes) -> Vec<WatchEvent> {
        events_within(followed, Duration::from_secs(10))
    }

    const CONF: &str = "pods/u-1/volumes/kubernetes.io~configmap/conf";

    #[test]
    fn a_volume_is_watched_from_the_survey_on() {
        let mut scene = Scene::new();
        scene.make(CONF);
        scene.make("pods/u-1/volume-subpaths/conf/app");
        scene.make("pods/u-1/volumes/kubernetes.io~configmap/whole");
        let found = scene.volumes.find();
        assert_eq!((found.volumes.len(), scene.volumes.volumes()), (1, 1));
        scene.update(CONF, "..2026_11_21_05_10_00.1");
        scene.update(
            "pods/u-1/volumes/kubernetes.io~configmap/whole",
            "..2026_11_21_05_10_00.1",
        );
        assert_eq!(scene.changed(), ["u-1/conf"]);
    }

    #[test]
    fn a_new_pod_is_followed_from_its_first_folder_to_its_end() {
        let mut scene = Scene::new();
        assert!(scene.volumes.find().volumes.is_empty());
        for round in 0..3 {
            scene.make("pods/u-1");
            scene.make(CONF);
            scene.update(CONF, "..2026_11_21_05_10_00.1");
            assert!(scene.changed().is_empty(), "it has no subpath yet");
            scene.make("pods/u-1/volume-subpaths/conf/app");
            assert_eq!(scene.changed(), ["u-1/conf"], "round {round}");
            scene.update(CONF, "..2026_11_21_05_10_00.2");
            assert_eq!(scene.changed(), ["u-1/conf"]);
            fs::remove_dir_all(scene.root.path().join("pods/u-1")).unwrap();
            // A child of a parallel test has the directory open between fork and exec. The kernel
            // reports the end of a directory after the last close.
            let end = Instant::now() + Duration::from_secs(10);
            while scene.volumes.watched.len() > 1 && Instant::now() < end {
                assert!(scene.changed().is_empty());
            }
            assert_eq!(
                (scene.volumes.volumes(), scene.volumes.watched.len()),
                (0, 1),
                "only `pods` is left"
            );
        }
    }

    #[test]
    fn volumes_that_containers_write_are_not_watched() {
        let mut scene = Scene::new();
        scene.make("pods/u-1/volumes/kubernetes.io~empty-dir/data");
        scene.make("pods/u-1/volume-subpaths/data/app");
        assert!(scene.volumes.find().volumes.is_empty());
    }

    #[test]
    fn an_inline_volume_that_a_driver_writes_is_watched() {
        let mut scene = Scene::new();
        let volumes = ["inline", "claim", "plain"].map(|name| {
            let folder = scene.make(&format!("pods/u-1/volumes/kubernetes.io~csi/{name}"));
            scene.make(&format!("pods/u-1/volumes/kubernetes.io~csi/{name}/mount"));
            scene.make(&format!("pods/u-1/volume-subpaths/{name}/app"));
            let mode = if name == "claim" {
                "Persistent"
            } else {
                "Ephemeral"
            };
            let record = format!(r#"{{"volumeLifecycleMode":"{mode}"}}"#);
            fs::write(folder.join("vol_data.json"), record).unwrap();
            format!("pods/u-1/volumes/kubernetes.io~csi/{name}/mount")
        });
        let [inline, claim, plain] = volumes;
        scene.update(&inline, "..2026_11_21_05_10_00.1");
        scene.update(&claim, "..2026_11_21_05_10_00.1");
        let found = scene.volumes.find();
        assert_eq!((found.volumes.len(), scene.volumes.volumes()), (1, 1));
        for volume in [inline, claim, plain] {
            scene.update(&volume, "..2026_11_21_05_10_00.2");
        }
        assert_eq!(scene.changed(), ["u-1/inline"]);
    }

    #[test]
    fn lost_events_need_a_survey() {
        let mut scene = Scene::new();
        assert!(scene.volumes.changed(vec![WatchEvent::Overflow]).survey);
    }

    #[test]
    fn a_kubelet_that_starts_for_the_first_time_needs_a_survey() {
        let mut scene = Scene::new();
        fs::remove_dir(scene.root.path().join(PODS)).unwrap();
        assert!(!scene.volumes.find().survey);
        scene.make("pods/u-1");
        let events = events(&scene.volumes);
        assert!(scene.volumes.changed(events).survey);
        scene.volumes.find();
        assert!(
            scene
                .volumes
                .watched
                .values()
                .any(|watched| *watched == Watched::Pods)
        );
    }

    /// A kubelet's pods may be on a filesystem that is mounted later.
    #[test]
    fn a_root_that_is_removed_needs_a_survey() {
        let mut scene = Scene::new();
        scene.volumes.find();
        fs::remove_dir(scene.root.path().join(PODS)).unwrap();
        let events = events(&scene.volumes);
        assert!(scene.volumes.changed(events).survey);
    }

    #[test]
    fn a_pods_folder_that_cannot_be_watched_waits_for_the_next_survey() {
        let mut scene = Scene::new();
        let pods = scene.root.path().join(PODS);
        fs::remove_dir(&pods).unwrap();
        fs::write(&pods, "").unwrap();
        assert!(!scene.volumes.find().survey, "a file");
        fs::remove_file(&pods).unwrap();
        symlink("nowhere", &pods).unwrap();
        assert!(!scene.volumes.find().survey, "a link to nowhere");
    }

    #[test]
    fn a_linked_pods_folder_of_a_linked_root_is_watched() {
        let disk = tempfile::tempdir().unwrap();
        fs::create_dir_all(disk.path().join("data")).unwrap();
        fs::create_dir_all(disk.path().join("other")).unwrap();
        symlink("data", disk.path().join("root")).unwrap();
        let mut followed = volumes_below(&disk.path().join("root"));
        let follow = |followed: &mut KubeletVolumes| {
            let events = events(followed);
            followed.changed(events)
        };
        assert!(!followed.find().survey);
        symlink("../other", disk.path().join("data/pods")).unwrap();
        assert!(follow(&mut followed).survey, "the root is watched");
        assert!(!followed.find().survey);
        let pod = disk.path().join("other/u-1");
        fs::create_dir_all(pod.join("volumes/kubernetes.io~configmap/conf")).unwrap();
        fs::create_dir_all(pod.join("volume-subpaths/conf")).unwrap();
        assert_eq!(
            follow(&mut followed).volumes.len(),
            1,
            "the pods are watched"
        );
    }

    #[test]
    fn a_survey_forgets_watches_whose_end_was_lost() {
        let mut scene = Scene::new();
        scene.make(CONF);
        scene.make("pods/u-1/volume-subpaths/conf/app");
        scene.volumes.find();
        assert_eq!(scene.volumes.volumes(), 1);
        fs::remove_dir_all(scene.root.path().join("pods/u-1")).unwrap();
        assert!(!events(&scene.volumes).is_empty());
        scene.volumes.find();
        assert_eq!(
            (scene.volumes.volumes(), scene.volumes.watched.len()),
            (0, 1)
        );
    }
}

#[cfg(test)]
mod follow_tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::os::unix::fs::symlink;
    use std::thread;

    use bindguard_testing::own_namespace;
    use bindguard_testing::scene::tmpfs;

    use super::*;
    use crate::work::Node;

    /// A kubelet root that is followed, after the first survey, and refreshes no container.
    struct FollowedRoot(&'static Node);

    impl FollowedRoot {
        fn follow(root: &Path) -> Self {
            let node = Node::silent("refresh.mode = 'off'\nagent.survey-seconds = 3600");
            let root = KubeletRoot::new(node, root.to_owned());
            thread::spawn(|| follow_volumes(root));
            let followed = Self(node);
            followed.wait_for_survey();
            followed
        }

        fn wait_for_survey(&self) {
            wait_until(|| self.0.ready.swap(false, Ordering::Relaxed));
        }

        fn wait_for_update(&self, act: impl FnOnce()) {
            let updates = &self.0.metrics[Total::AgentVolumeUpdates];
            let before = updates.get();
            act();
            wait_until(|| updates.get() > before);
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
}
