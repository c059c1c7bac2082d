//! Probes sources in separate processes, because a probe may hang, and finds the directories of
//! kubelets and runtimes by all their names, and the staging mount of a dead volume.

use std::cell::{OnceCell, RefCell};
use std::collections::HashMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use bindguard_core::evidence::{Reach, SubpathEvidence};
use bindguard_core::kubelet::{CSI_RECORD, CsiRecord, Plugin, STAGING_MOUNT};
use bindguard_core::mount_table::MountEntry;
use bindguard_core::places::Places;
use bindguard_core::policy::Scope;
use bindguard_core::text::lies_in;
use bindguard_sys::observe::HeldSubpath;
use bindguard_sys::probe::{Answer, Timeouts, probe, probe_side_by_side};
use bindguard_sys::{Handle, MountError, Mounts, read_file};

/// Time limit for each source.
const SOURCE_TIMEOUT: Duration = Duration::from_millis(700);

/// Time limit for all sources of a create: well within the guard's own deadline.
const CREATE_TIMEOUT: Duration = Duration::from_millis(1200);

/// Additional time limit of all its repairs, whose servers answered a moment ago. A repair probes
/// at least twice, before and after it.
const REPAIRS_TIMEOUT: Duration = Duration::from_millis(500);

/// Time limit for all sources of a node when an operator waits.
const OPERATOR_TIMEOUT: Duration = Duration::from_secs(10);

/// A shorter silence proves nothing.
const MIN_TIMEOUT: Duration = Duration::from_millis(300);

/// Limit of sources that are probed at the same time when some do not answer.
const SIDE_BY_SIDE: usize = 32;

/// The answers of a source's paths, in the order of the paths.
#[derive(Debug, Default)]
pub struct Answers(Vec<Answer>);

impl Answers {
    /// The answer of each path, as evidence.
    pub fn reaches(&self) -> Vec<Reach> {
        self.0.iter().map(reach).collect()
    }

    /// The answer of the first path.
    pub fn reach(&self) -> Reach {
        self.0.first().map_or(Reach::NotNeeded, reach)
    }

    /// The first path with its symlinks followed, if it was reached.
    pub fn resolved(&self) -> Option<&Path> {
        match self.0.first()? {
            Answer::Reached(path) => Some(path),
            Answer::Refused(_) | Answer::Silent(_) | Answer::NotProbed => None,
        }
    }
}

/// Probes that share a time limit.
#[derive(Debug)]
pub struct Probes {
    each: Duration,
    until: Instant,
    /// The paths that gave no answer, and the time limit of each probe.
    silent: RefCell<Vec<(PathBuf, Duration)>>,
}

impl Probes {
    /// Starts the time limit now.
    pub fn for_create() -> Self {
        Self::for_create_since(Instant::now())
    }

    /// The time limit of a create that began at `start`.
    pub(crate) fn for_create_since(start: Instant) -> Self {
        Self::until(start + CREATE_TIMEOUT, SOURCE_TIMEOUT)
    }

    /// The time limit of all repairs of a create that began at `start`. Repairs may also use the
    /// time that the sources of the create left.
    pub fn for_repairs(start: Instant) -> Self {
        Self::until(start + CREATE_TIMEOUT + REPAIRS_TIMEOUT, SOURCE_TIMEOUT)
    }

    /// The time limit of an admission that began at `start`, and whose caller waits this long. A
    /// fifth of the time is left for the verdict and the answer.
    pub(crate) fn for_deadline(start: Instant, deadline: Duration) -> Self {
        let each = (deadline * 3 / 5).clamp(MIN_TIMEOUT, SOURCE_TIMEOUT);
        Self::until(start + deadline * 4 / 5, each)
    }

    /// Starts the time limit now.
    pub fn for_operator() -> Self {
        Self::until(Instant::now() + OPERATOR_TIMEOUT, SOURCE_TIMEOUT)
    }

    fn until(until: Instant, each: Duration) -> Self {
        Self {
            each,
            until,
            silent: RefCell::default(),
        }
    }

    /// Probes every source's paths. Returns the answers by source, in the order of the sources.
    pub fn probe(&self, sources: &[Vec<PathBuf>]) -> Vec<Answers> {
        let mut answers = self.probe_all(&sources.concat()).into_iter();
        let mut by_source = Vec::with_capacity(sources.len());
        for paths in sources {
            by_source.push(Answers(answers.by_ref().take(paths.len()).collect()));
        }
        by_source
    }

    /// Returns the answers in the order of the paths. Probes the paths in turn. After the first
    /// silent path, the remaining paths are probed side by side, until no time is left.
    fn probe_all(&self, paths: &[PathBuf]) -> Vec<Answer> {
        let mut answers = Vec::with_capacity(paths.len());
        let mut is_in_turn = true;
        while let Some(next) = paths.get(answers.len()) {
            if let Some(timeout) = self.silence_above(next) {
                answers.push(Answer::Silent(timeout));
                continue;
            }
            let left = self.until.saturating_duration_since(Instant::now());
            if left < MIN_TIMEOUT {
                break;
            }
            let rest = &paths[answers.len()..];
            let is_silent = |path: &PathBuf| self.silence_above(path).is_some();
            let run = &rest[..rest.iter().position(is_silent).unwrap_or(rest.len())];
            let mut now = Vec::new();
            if is_in_turn {
                let timeouts = Timeouts {
                    each: self.each,
                    all: left,
                };
                now = probe(run, timeouts).unwrap_or_default();
                let is_unprobed = |answer: &Answer| matches!(answer, Answer::NotProbed);
                now.truncate(now.iter().position(is_unprobed).unwrap_or(now.len()));
            } else {
                let group = &run[..run.len().min(SIDE_BY_SIDE)];
                match probe_side_by_side(group, left.min(self.each)) {
                    Ok(answers) => now = answers,
                    // If no process can be started, no source is called dead.
                    Err(_) => now.resize_with(group.len(), || Answer::NotProbed),
                }
            }
            is_in_turn = false;
            for (path, answer) in rest.iter().zip(&now) {
                if let Answer::Silent(timeout) = answer {
                    self.silent.borrow_mut().push((path.clone(), *timeout));
                }
            }
            answers.append(&mut now);
        }
        answers.resize_with(paths.len(), || Answer::NotProbed);
        answers
    }

    /// A walk to a path passes every folder above the path, so a path below a silent path is
    /// silent.
    fn silence_above(&self, path: &Path) -> Option<Duration> {
        let silent = self.silent.borrow();
        let above = silent.iter().find(|(above, _)| lies_in(path, above))?;
        Some(above.1)
    }

    /// The answer of each path, as evidence.
    pub fn reaches(&self, paths: &[PathBuf]) -> Vec<Reach> {
        self.probe_all(paths).iter().map(reach).collect()
    }

    /// Observes a subpath, after a probe if it is on a server.
    pub fn observe_one(&self, held: &HeldSubpath, mounts: &Mounts) -> SubpathEvidence {
        held.observe(mounts, &self.reaches(&held.paths_to_probe(mounts)))
    }
}

fn reach(answer: &Answer) -> Reach {
    match answer {
        Answer::Reached(_) => Reach::Alive,
        Answer::Refused(error) => Reach::Refused {
            number: error.raw_os_error().unwrap_or(0),
            words: error.to_string(),
        },
        Answer::Silent(timeout) => Reach::Silent(timeout.as_millis() as u64),
        // Only paths that must be probed get here.
        Answer::NotProbed => Reach::NotProbed,
    }
}

// The directories of kubelets and runtimes by all their names.
//
// `/var/lib/kubelet` is a link to a larger disk on many nodes, or a link leads to the place that a
// distribution uses. A spec has the name that the kubelet was started with, the mount table has
// the kernel's name, and a config may have either.

/// The places with the kernel's names of their directories added; `None` if the kernel has no
/// further names.
pub(crate) fn by_all_names(places: &Places, roots: &RootsInUse, probes: &Probes) -> Option<Places> {
    // On nearly every node this is empty.
    let mut directories: Vec<&Path> = places.directories().collect();
    directories
        .retain(|directory| !roots.have_one_name(directory) && !Handle::has_one_name(directory));
    if directories.is_empty() {
        return None;
    }
    let mut real = HashMap::new();
    for (name, kernels) in directories.iter().zip(real_names(&directories, probes)) {
        real.extend(kernels.map(|kernels| (*name, kernels)));
    }
    places.with_names(|directory| real.get(directory).cloned())
}

/// A path whose directory has no links in it. Its last name is unchanged: the kernel has none for a
/// deleted file.
pub fn in_real_folder(path: &Path, probes: &Probes) -> Option<PathBuf> {
    let folder = real_names(&[path.parent()?], probes).pop()??;
    Some(folder.join(path.file_name()?))
}

/// The kubelets' roots by the names of the places, and by the kernel's names.
pub fn kubelet_roots_by_all_names(places: &Places, probes: &Probes) -> Vec<PathBuf> {
    let named: Vec<&Path> = places.kubelet_roots().collect();
    let mut names: Vec<PathBuf> = named.iter().map(|root| root.to_path_buf()).collect();
    for root in real_names(&named, probes).into_iter().flatten() {
        if !names.contains(&root) {
            names.push(root);
        }
    }
    names
}

/// The kernel's names of these paths. Most names are in the kernel's cache. The remaining paths are
/// probed in a separate process, because a server may have to answer. The kernel counts reading a
/// link as an access, so a cached link may still not be followed.
fn real_names(paths: &[&Path], probes: &Probes) -> Vec<Option<PathBuf>> {
    let mounts = Mounts::default();
    let (mut names, mut cold) = (Vec::with_capacity(paths.len()), Vec::new());
    for (index, path) in paths.iter().enumerate() {
        let known = mounts.open_without_waiting(path);
        if known
            .as_ref()
            .is_err_and(|error| error.kind() != ErrorKind::NotFound)
        {
            cold.push((index, vec![path.to_path_buf()]));
        }
        names.push(known.ok().and_then(|handle| handle.resolved_path().ok()));
    }
    let (indices, cold): (Vec<_>, Vec<_>) = cold.into_iter().unzip();
    for (index, answers) in indices.into_iter().zip(probes.probe(&cold)) {
        names[index] = answers.resolved().map(Path::to_owned);
    }
    names
}

// Opens or probes the kubelets' roots that a spec names, and reads their mounts.

/// Those roots.
#[derive(Debug, Default)]
pub(crate) struct RootsInUse {
    held: Vec<Handle>,
    silent: Vec<PathBuf>,
    mounts: OnceCell<Result<Vec<Rc<MountEntry>>, MountError>>,
}

impl RootsInUse {
    /// Opens the wanted roots that can be reached without waiting, and probes the remaining roots.
    pub(crate) fn of(
        places: &Places,
        is_wanted: impl Fn(&Path) -> bool,
        mounts: &Mounts,
        probes: &Probes,
    ) -> Self {
        let (mut roots, mut others) = (Self::default(), Vec::new());
        for root in places.kubelet_roots().filter(|root| is_wanted(root)) {
            match mounts.open_without_waiting(root) {
                Ok(handle) if mounts.is_local(&handle) => roots.held.push(handle),
                // It does not exist, or the kernel cannot detect that.
                Err(error) if error.kind() != ErrorKind::WouldBlock => {}
                Ok(_) | Err(_) => others.push(root.to_owned()),
            }
        }
        let paths: Vec<_> = others.iter().map(|root| root.join("pods")).collect();
        for (root, reach) in others.into_iter().zip(probes.reaches(&paths)) {
            if !reach.is_answer() {
                roots.silent.push(root);
            }
        }
        roots
    }

    /// The places without the roots that do not answer; `None` if all answer.
    ///
    /// A path below such a root is then like any path of the node: the guard probes the path, and
    /// never walks to it.
    pub(crate) fn without_silent(&self, places: &Places) -> Option<Places> {
        let is_silent = |root: &PathBuf| self.silent.contains(root);
        places.kubelet_roots.iter().any(is_silent).then(|| {
            let mut places = places.clone();
            places.kubelet_roots.retain(|root| !is_silent(root));
            places
        })
    }

    /// True if a path is an open root, and contains no symlink.
    pub(crate) fn have_one_name(&self, path: &Path) -> bool {
        self.held
            .iter()
            .any(|root| root.path_as_written() == Some(path))
    }

    /// True if a path, as the kernel prints it, is another name of a directory above these
    /// kubelets' mounts. Their roots are bound from a larger disk, as on Container-Optimized OS,
    /// and a mount shows at both names.
    ///
    /// # Errors
    /// If the mount of the path or of a root is not known.
    pub(crate) fn show_below(
        &self,
        held: &Handle,
        path: &Path,
        mounts: &Mounts,
        places: &Places,
        scope: Scope,
    ) -> Result<bool, MountError> {
        let mount_of = |root: &Handle| Ok(mounts.mount_of(root)?.entry);
        let roots = self
            .mounts
            .get_or_init(|| self.held.iter().map(mount_of).collect());
        let mount = mounts.mount_of(held)?.entry;
        for root in roots.as_ref().map_err(Clone::clone)? {
            if let Some(name) = mount.name_at_origin(path, root)
                && places.holds_runtime_mounts(&name, scope)
            {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

// Reads the kubelet's record of a CSI volume.

/// Size limit of a record.
const MAX_RECORD: u64 = 64 << 10;

/// The record in the folder of a volume or of a staging mount; `None` if the folder has no record.
pub(crate) fn csi_record_in(folder: &Path) -> Option<CsiRecord> {
    CsiRecord::from_json(&read_file(&folder.join(CSI_RECORD), MAX_RECORD).ok()?)
}

// The staging mount of a dead CSI volume.
//
// A driver mounts a volume once for the node (staging) and binds that mount for each pod
// (publish). Many drivers mount only staging anew after a restart: blobfuse, k8s-csi-s3. The bind
// stays dead, and only a new pod gets a new bind.

/// Limit of staging folders that are compared.
const MAX_FOLDERS: usize = 4096;

/// The advice for a dead volume whose staging mount answers.
const STAGING_ALIVE: &str = "host mount dead, staging alive: its driver does not mount the volume of a running pod anew; only a new pod gets the new mount";

/// The reason why a volume is dead, with the advice if only the staging mount of the volume
/// answers.
pub fn dead_volume(volume: &Path, words: String, probes: &Probes) -> String {
    if let Some(staging) = staging_mount(volume)
        && matches!(probes.reaches(&[staging])[..], [Reach::Alive])
    {
        return format!("{words}; {STAGING_ALIVE}");
    }
    words
}

/// The staging mount of the volume that is published at this path,
/// `<root>/pods/<uid>/volumes/kubernetes.io~csi/<volume>/mount`, by the kubelet's records. No folder
/// on the way is in a volume.
fn staging_mount(publish: &Path) -> Option<PathBuf> {
    let csi = Plugin::CSI;
    let folder = publish.parent().filter(|_| publish.ends_with(csi.below))?;
    let root = folder.ancestors().nth(5)?;
    if folder.parent()?.file_name()? != csi.folder {
        return None;
    }
    let volume = csi_record_in(folder)?;
    let mut staging = None;
    let folders = fs::read_dir(volume.staging_folders(root)?);
    for folder in folders.into_iter().flatten().flatten().take(MAX_FOLDERS) {
        let record = csi_record_in(&folder.path());
        if record.is_some_and(|record| record.is_of_volume(&volume)) {
            staging = Some(folder.path().join(STAGING_MOUNT));
            break;
        }
    }
    let staging = staging.or_else(|| volume.old_staging_mount(root))?;
    let handle = Handle::of(&staging).ok()?.unqueried();
    let mount = Mounts::default().mount_of(&handle).ok()?;
    mount.is_mount_point.then_some(staging)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Less than the shortest patience for a source counts as no time.
    #[test]
    fn repairs_have_the_time_that_the_sources_of_their_create_left() {
        let left = |start| Probes::for_repairs(start).until - Instant::now();
        assert!(left(Instant::now()) > CREATE_TIMEOUT);
        let late = left(Instant::now() - CREATE_TIMEOUT);
        assert!(late > MIN_TIMEOUT && late <= REPAIRS_TIMEOUT, "{late:?}");
    }

    #[test]
    fn a_source_without_time_for_a_probe_is_not_a_source_without_need_of_one() {
        let too_late = Probes::until(Instant::now(), SOURCE_TIMEOUT);
        assert_eq!(too_late.reaches(&[PathBuf::from("/")]), [Reach::NotProbed]);
        let answers = too_late.probe(&[vec![PathBuf::from("/")], Vec::new()]);
        assert_eq!(
            answers.iter().map(Answers::reach).collect::<Vec<_>>(),
            [Reach::NotProbed, Reach::NotNeeded]
        );
    }
}
