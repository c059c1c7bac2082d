//! The binds of pods that opted in: [`MountedVolumes`], which the host mounts anew, and [`HostFiles`],
//! single files and sockets of the host.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Instant;

use bindguard_core::error_chain;
use bindguard_core::kubelet::{Plugin, Writer};
use bindguard_core::text::lies_in;
use bindguard_guard::refresh::{FileBind, VolumeOfPod};
use bindguard_operator::containers::{host_files_of_container, pod_state_folders};
use bindguard_sys::Failure;
use bindguard_sys::observe::children;
use tracing::{error, warn};

use crate::limits::SayOnce;
use crate::limits::spawn;
use crate::pods::{PodLookup, PodsWithBinds};
use crate::sinks::metrics::Total;
use crate::sources::kubelet_volumes::folder_of_pods;
use crate::sources::watch::{self, AFTER_START, Rules, Schedule, Source, Watches};
use crate::work::kubelet_root::{KubeletRoot, Updates};

/// What is known of the containers of the pods that opted in, by the pods' uids and the containers'
/// ids.
type OfContainers<T> = HashMap<String, HashMap<String, T>>;

/// Queries the containers of these pods again, and returns the pods with a new container. `read`
/// gets the id of a new container. `failures` gets the reasons why containers are not known, with
/// `act` before them; what was known of the containers stays.
fn query_containers<T>(
    known: &mut OfContainers<T>,
    pods: &'static PodLookup,
    uids: Vec<String>,
    mut read: impl FnMut(&str) -> Option<T>,
    (act, failures): (&str, &mut Vec<String>),
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
                failures.push(format!("{act}: {}", error_chain(&error)));
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
struct MountedVolumes {
    root: &'static KubeletRoot,
    updates: Updates,
    watches: Watches<String>,
    /// The time of the next refresh of all pods: a mount that was moved, or came while the agent did
    /// not run, is no event. It stays past while the runtime does not answer.
    next_survey: Instant,
    /// The folder of the root's pods, by the name that the mount table has.
    folder: PathBuf,
    opted_in: PodsWithBinds,
    /// The reasons for which the list was not complete.
    failures: SayOnce,
    /// The reasons for which the folder of a pod's subpaths could not be read.
    unread: SayOnce<String>,
    /// The running containers of each pod that opted in to host-root binds: a runtime without
    /// bindguard makes the binds of a restarted container private again.
    with_roots: OfContainers<()>,
}

/// Follows them for ever.
pub fn follow_mounts(root: &'static KubeletRoot) {
    let what = format!("follow the mounts below {}", root.path.display());
    watch::follow(root.node, &what, || {
        let interval = root.node.config.agent().survey;
        let rules = Rules {
            is_paced: false,
            ..Rules::of_files(interval, &AFTER_START)
        };
        let volumes = MountedVolumes {
            root,
            updates: Updates::new(root),
            watches: Watches::new()?,
            next_survey: Instant::now(),
            folder: PathBuf::new(),
            opted_in: PodsWithBinds::new(),
            failures: SayOnce::default(),
            unread: SayOnce::default(),
            with_roots: OfContainers::new(),
        };
        Ok((volumes, rules))
    });
}

impl MountedVolumes {
    /// Lists the pods that opted in, and plans the refresh of the new ones and of those with a new
    /// container that may have host-root binds, or of all.
    fn list_pods(&mut self, failures: &mut Vec<String>, schedule: &mut Schedule<String>) {
        let act = format!("list the pods below {}", self.root.path.display());
        let opted_in = match self.root.node.pods.with_binds() {
            Ok(opted_in) => opted_in,
            // A runtime that does not answer still has its pods.
            Err(error) => return failures.push(format!("{act}: {}", error_chain(&error))),
        };
        let now = Instant::now();
        let is_survey = now >= self.next_survey;
        if is_survey {
            self.next_survey = now + self.root.node.config.agent().survey;
        }
        let before = std::mem::replace(&mut self.opted_in, opted_in);
        self.folder = folder_of_pods(&self.root.path);
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
        let (known, pods) = (&mut self.with_roots, self.root.node.pods);
        let failures = (&*act, failures);
        for uid in query_containers(known, pods, with_roots, |_| Some(()), failures) {
            schedule.plan_refresh(&uid, now);
        }
        let root = self.root;
        if has_files
            && !root.are_files_followed.swap(true, Ordering::Relaxed)
            && let Err(error) = spawn("host-files", || follow_files(root))
        {
            root.are_files_followed.store(false, Ordering::Relaxed);
            error!("{error:#}");
        }
    }
}

impl Source for MountedVolumes {
    type Id = String;

    fn watches(&mut self) -> &mut Watches<String> {
        &mut self.watches
    }

    fn survey(&mut self, schedule: &mut Schedule<String>) -> bool {
        let mut failures = self.watches.watch_states(pod_state_folders(Path::new("/")));
        self.list_pods(&mut failures, schedule);
        if self.next_survey > Instant::now() {
            schedule.plan_survey_at(self.next_survey);
        }
        let is_complete = failures.is_empty();
        self.failures.warn_of_retry(failures);
        is_complete
    }

    fn follows_mounts(&self) -> bool {
        self.opted_in.values().any(|binds| binds.volumes)
    }

    fn take_mounts(&mut self, places: &[PathBuf], schedule: &mut Schedule<String>) {
        let now = Instant::now();
        for place in places {
            let uid = pod_with_volume_at(place, &self.folder);
            if let Some((uid, binds)) = uid.and_then(|uid| self.opted_in.get_key_value(uid))
                && binds.volumes
            {
                schedule.plan_with_rechecks(uid, now);
            }
        }
    }

    /// Refreshes pods, the subpaths on the host first, as after an update of the kubelet.
    fn refresh(&mut self, due: Vec<String>, schedule: &mut Schedule<String>) {
        let mut with_subpaths = Vec::new();
        for uid in due {
            let volumes = volumes_with_subpaths(self.root, &uid);
            let unread = volumes.as_ref().err().map(|error| error_chain(error));
            let volumes = volumes.unwrap_or_default();
            for why in self.unread.news(uid.clone(), Vec::from_iter(unread)) {
                warn!("{why}; trying again");
                schedule.plan_rechecks(&uid, Instant::now());
            }
            if volumes.is_empty() {
                self.root.refreshes.plan(uid);
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

/// The volumes of a pod with subpaths, without the kubelet's own volumes, which `kubelet_volumes`
/// follows.
///
/// # Errors
/// If the folder of subpaths cannot be read.
fn volumes_with_subpaths(root: &KubeletRoot, uid: &str) -> Result<Vec<VolumeOfPod>, Failure> {
    let directory = root.pod(uid);
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
                kubelet_root: root.path.clone(),
                pod_uid: uid.to_owned(),
                volume: volume.to_owned(),
            });
        }
    }
    Ok(volumes)
}

// Files of the host.

/// Limits of watched files, for each pod and for each kubelet root. Surveys refresh further files.
const MAX_FILES_OF_POD: usize = 64;
const MAX_FILES: usize = 1024;

/// Follows single files and sockets of the host: a pod is refreshed once the name of such a file leads
/// to a different file.
///
/// The thread starts with the first pod that opted in. A file on a server that hangs delays the
/// other files of pods until the next survey, and nothing else.
#[derive(Debug)]
struct HostFiles {
    root: &'static KubeletRoot,
    watches: Watches<String>,
    /// The files of the pods that opted in.
    files: OfContainers<Vec<FileBind>>,
    /// The reasons for which the last survey was not complete.
    failures: SayOnce,
}

fn follow_files(root: &'static KubeletRoot) {
    let (node, path) = (root.node, root.path.display());
    let what = format!("follow files of the host in pods below {path}");
    watch::follow(node, &what, || {
        let rules = Rules::of_files(node.config.agent().survey, &AFTER_START);
        Ok((HostFiles::new(root)?, rules))
    });
}

impl HostFiles {
    fn new(root: &'static KubeletRoot) -> io::Result<Self> {
        Ok(Self {
            root,
            watches: Watches::new()?,
            files: OfContainers::new(),
            failures: SayOnce::default(),
        })
    }

    /// Lists the pods that opted in, and returns those with a container that is new. `failures` gets
    /// the reasons for which the list is not complete.
    fn list(&mut self, failures: &mut Vec<String>) -> Vec<String> {
        let (node, act) = (self.root.node, "list the pods with files of the host");
        let mut uids = Vec::new();
        let pods = match node.pods.with_binds() {
            Ok(pods) => pods,
            // A runtime that does not answer still has its pods.
            Err(error) => {
                failures.push(format!("{act}: {}", error_chain(&error)));
                return Vec::new();
            }
        };
        for (uid, binds) in pods {
            if binds.host_files && self.root.pod(&uid).symlink_metadata().is_ok() {
                uids.push(uid);
            }
        }
        let mut unread = Vec::new();
        let read = |id: &str| {
            let Some(mut binds) = host_files_of_container(Path::new("/"), id, node.config.places())
            else {
                // The bundle is not complete yet.
                unread.push(format!(
                    "files of the host in container {id} are not watched: its bundle has no spec that can be read"
                ));
                return None;
            };
            // A container sees the new files of a directory by itself.
            binds.retain(|bind| !bind.is_of_directory());
            Some(binds)
        };
        let files = &mut self.files;
        let with_new = query_containers(files, node.pods, uids, read, (act, failures));
        failures.append(&mut unread);
        with_new
    }
}

impl Source for HostFiles {
    type Id = String;

    fn watches(&mut self) -> &mut Watches<String> {
        &mut self.watches
    }

    fn survey(&mut self, schedule: &mut Schedule<String>) -> bool {
        // Before the list: a container that starts meanwhile causes an event.
        let mut failures = self.watches.watch_states(pod_state_folders(Path::new("/")));
        let with_new = self.list(&mut failures);
        let mut left = MAX_FILES;
        for (uid, files) in &self.files {
            let binds = files.values().flatten().take(MAX_FILES_OF_POD.min(left));
            let binds = Vec::from_iter(binds);
            left -= binds.len();
            let unwatched = self.watches.watch_files(uid, binds);
            self.root.node.metrics[Total::AgentWatchErrors].inc_by(unwatched.len() as u64);
            failures.extend(unwatched);
        }
        let is_complete = failures.is_empty();
        self.failures.warn_of_retry(failures);
        // A file may have been replaced before its folder was watched.
        for uid in with_new {
            schedule.plan_refresh(&uid, Instant::now());
        }
        is_complete
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
            self.root.refreshes.plan(uid);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::fs;
    use std::os::unix::fs::symlink;
    use std::thread;
    use std::time::Duration;

    use bindguard_guard::{Probes, in_real_folder};

    use super::*;
    use crate::work::Node;

    #[test]
    fn a_list_of_pods_that_failed_is_reported_and_tried_again() {
        let root = KubeletRoot::new(Node::silent(""), "/nowhere".into());
        let mut files = HostFiles::new(root).unwrap();
        let rules = Rules::of_files(Duration::from_secs(300), &AFTER_START);
        let mut schedule = Schedule::new(rules, Instant::now());
        assert!(!files.survey(&mut schedule));
        assert_eq!(files.failures.findings(), 1);
    }

    /// The runtime restarts, or the node boots: the pods are listed again before the next survey.
    #[test]
    fn a_runtime_that_does_not_answer_is_queried_again() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("cri.sock");
        let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let node = Node::silent_at(&socket);
        let root = KubeletRoot::new(node, folder.path().to_owned());
        thread::spawn(|| follow_mounts(root));
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
        let root = KubeletRoot::new(Node::silent(""), root.path().to_owned());
        assert_eq!(volumes_with_subpaths(root, "u-1").unwrap(), []);
        for folder in [
            "volume-subpaths/conf",
            "volumes/kubernetes.io~configmap/conf",
            "volume-subpaths/pv",
            "volumes/kubernetes.io~csi/pv",
            "volumes/kubernetes.io~csi/whole",
        ] {
            fs::create_dir_all(root.pod("u-1").join(folder)).unwrap();
        }
        let found = volumes_with_subpaths(root, "u-1").unwrap();
        let names: Vec<_> = found.iter().map(|it| it.volume.as_str()).collect();
        assert_eq!(names, ["pv"]);
    }
}
