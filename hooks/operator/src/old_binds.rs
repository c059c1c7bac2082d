//! Running containers that read old files, and those whose binds show an old mount or file of the
//! host: a volume that was mounted anew, a single file or socket that was replaced, a private copy
//! of the host's mounts.
//!
//! A `subPath` file of a running container never changes (kubernetes#50345). The container's own
//! mount table shows which of its mounts are stale.
//!
//! The findings are those of `bindguard refresh --dry-run`. Nothing is entered and nothing is
//! changed. A source is opened only if no server has to answer, and probed with a deadline.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::path::{Path, PathBuf};

use bindguard_core::error_chain;
use bindguard_core::identity::PodName;
use bindguard_core::judge::judge_reach;
use bindguard_core::mount_table::MountEntry;
use bindguard_core::places::Places;
use bindguard_core::policy::{Policy, Scope};
use bindguard_core::report::{MountResult, RefreshedMount};
use bindguard_core::spec::{SpecUsers, SpecView};
use bindguard_core::text::{serialize_paths, shell_word};
use bindguard_guard::refresh::{
    BoundFiles, BoundMounts, CurrentFiles, FileBind, HeldProcess, HostRoots, PodVolumes,
    ProcessError, RefreshError, find_stale, releasable_copies,
};
use bindguard_guard::{Probes, kubelet_roots_by_all_names};
use bindguard_sys::files::read_spec;
use bindguard_sys::{Failure, read_mount_table};
use serde::Serialize;

use crate::containers::{
    EngineContainer, binds_of_container, bundle_of_container, engine_containers, hold_running,
    inits_of, read_running, spec_of_container, state_folders, unless_ended,
};
use crate::kubelet_roots::{HostMounts, kubelets_here};
use crate::node::refuse_other_mounts;
use crate::pods::{PodContainer, Pods};
use crate::writers::ContainersOfNode;

/// The kinds of binds that a pod opts in by a word, besides subPaths. The command line and the
/// annotation have the same words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, strum::Display)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum BindKind {
    /// Volumes that the host has mounted anew.
    Volumes,
    /// Private binds of the host's root.
    HostRoot,
    /// Single files and sockets of the host that were replaced.
    HostFiles,
}

/// A running container, and its binds of a kind that differ from the host.
#[derive(Debug, Clone, Serialize)]
pub struct OldBinds {
    pub pod: PodName,
    pub container: PodContainer,
    /// `Docker` or `Podman`, for a container without a pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub engine: Option<&'static str>,
    /// The kind of the binds.
    pub what: BindKind,
    /// True if the pod opted in to this kind; none if the pod's annotations are not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub opted_in: Option<bool>,
    /// The mounts of the container.
    pub mounts: Vec<RefreshedMount>,
    /// The command that shows the container the mounts and files of now; none if a refresh would be
    /// refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
}

impl OldBinds {
    /// True for every volume, because the container works on a mount that the driver has given up.
    /// For host files and host-root binds, true only if the pod opted in, because Kubernetes
    /// documents the old content.
    pub fn is_finding(&self) -> bool {
        self.what == BindKind::Volumes || self.opted_in == Some(true)
    }

    /// True for private binds of the host's root that no annotation names: nothing is wrong until
    /// the host unmounts something.
    pub fn is_quiet(&self) -> bool {
        self.what == BindKind::HostRoot && !self.is_finding()
    }
}

/// A running container, and the old files that it reads.
#[derive(Debug, Clone, Serialize)]
pub struct OldFiles {
    pub pod: PodName,
    pub container: PodContainer,
    /// True if the container opted in to live refresh; none if the pod's annotations are not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub opted_in: Option<bool>,
    /// The stale files and folders.
    pub files: Vec<RefreshedMount>,
    /// The command that shows the container the current files; none if a refresh cannot help.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
}

impl OldFiles {
    /// True if the container should read the current files: it opted in. Otherwise old files are
    /// documented behaviour.
    pub fn is_finding(&self) -> bool {
        self.opted_in == Some(true)
    }
}

/// The mounts of a container that do not show these files. Empty for a container that every refresh
/// refuses.
fn stale_mounts(
    process: &HeldProcess,
    files: &dyn CurrentFiles,
) -> Result<Vec<RefreshedMount>, ProcessError> {
    match find_stale(process, &[files]) {
        Ok(seen) => Ok(seen.mounts),
        Err(RefreshError::Process(error)) => Err(error),
        Err(_) => Ok(Vec::new()),
    }
}

/// True if a refresh helps: a removed key does not come back by a refresh, and a bind that is gone
/// only by a restart.
fn can_be_refreshed(mounts: &[RefreshedMount]) -> bool {
    mounts.iter().any(|it| it.outcome == MountResult::Stale)
}

/// The containers that read old files, of the pods whose folders are `wanted`; and the reasons why
/// containers are not checked.
pub(crate) fn old_files<'r>(
    kubelet_roots: impl Iterator<Item = &'r Path> + Clone,
    pods: &Pods,
    wanted: impl Fn(&Path) -> bool,
) -> (Vec<OldFiles>, Vec<String>) {
    let mut by_pod = BTreeMap::<PathBuf, Vec<&PodContainer>>::new();
    for container in pods.running() {
        let Some(uid) = container.pod.uid.as_deref() else {
            continue;
        };
        // A pod without a subPath is not checked any further.
        let mut folders = kubelet_roots
            .clone()
            .map(|root| root.join("pods").join(uid));
        let has_subpaths =
            |folder: &PathBuf| folder.join("volume-subpaths").symlink_metadata().is_ok();
        if let Some(folder) = folders.find(has_subpaths).filter(|folder| wanted(folder)) {
            by_pod.entry(folder).or_default().push(container);
        }
    }
    let ids = by_pod.values().flatten().map(|it| it.id.as_str());
    let inits = inits_of(Path::new("/"), ids);
    let (mut found, mut problems) = (Vec::new(), Vec::new());
    for (folder, containers) in by_pod {
        // A look is harmless also where a container can write the volume.
        let none_writable = || Ok::<_, Infallible>(Vec::new());
        let volumes = PodVolumes::open(&folder);
        let volumes = match volumes.and_then(|it| it.with_drivers(&folder, none_writable)) {
            Ok(volumes) => volumes,
            // A pod that is deleted meanwhile.
            Err(_) if folder.symlink_metadata().is_err() => continue,
            Err(error) => {
                problems.push(error_chain(&error));
                continue;
            }
        };
        for container in containers {
            let Some(init) = inits.get(container.id.as_str()) else {
                continue;
            };
            let files = volumes.for_container(binds_of_container(Path::new("/"), &container.id));
            let mounts = read_running(&container.id, *init, |it| stale_mounts(it, &files));
            match mounts {
                Ok(mounts) => found.extend(mounts.and_then(|it| of_files(container, it, pods))),
                Err(error) => problems.push(container.problem(&error)),
            }
        }
    }
    (found, problems)
}

/// `None` if all files are current.
fn of_files(
    container: &PodContainer,
    mut files: Vec<RefreshedMount>,
    pods: &Pods,
) -> Option<OldFiles> {
    files.retain(|mount| {
        matches!(
            mount.outcome,
            MountResult::Stale | MountResult::KeyGone | MountResult::Missing
        )
    });
    if files.is_empty() {
        return None;
    }
    let pod = container.pod.clone();
    let opted_in = pods.opted_in(pod.uid.as_deref()?, container.name.as_deref()?);
    let name = pod.display_name().filter(|_| can_be_refreshed(&files));
    Some(OldFiles {
        pod,
        container: container.clone(),
        opted_in,
        files,
        command: name.map(|pod| format!("bindguard refresh --pod {pod}")),
    })
}

/// The containers of these pods with old binds, and the reasons why containers are not checked.
pub fn old_binds(pods: &Pods, policy: &Policy, places: &Places) -> (Vec<OldBinds>, Vec<String>) {
    let survey = BindSurvey {
        kubelet_roots: kubelets_here(places).0,
        policy,
        places: &pods.with_runtime(places),
        containers: ContainersOfNode("/".into()),
    };
    let (mut found, mut problems) = (Vec::new(), Vec::new());
    let ids = pods.running().map(|container| container.id.as_str());
    let inits = inits_of(Path::new("/"), ids);
    for container in pods.running() {
        let Some(init) = inits.get(container.id.as_str()) else {
            continue;
        };
        let compared = survey.compare(container, None, *init, &mut found, &mut problems);
        if let Err(error) = compared {
            problems.push(format!(
                "the volumes and host files of running containers are not checked: {error:#}"
            ));
            break;
        }
    }
    for old in &mut found {
        let uid = old.pod.uid.as_ref();
        if let Some(request) = uid.and_then(|uid| pods.refresh_requests.get(uid)) {
            old.opted_in = Some(match old.what {
                BindKind::Volumes => request.binds.volumes,
                BindKind::HostRoot => request.binds.host_root,
                BindKind::HostFiles => request.binds.host_files,
            });
        }
    }
    (found, problems)
}

/// The containers of Docker and Podman with old binds, and the reasons why containers are not
/// checked. Labels are not read, so no opt-in is known.
pub fn old_binds_of_engines(policy: &Policy, places: &Places) -> (Vec<OldBinds>, Vec<String>) {
    let survey = BindSurvey {
        kubelet_roots: Vec::new(),
        policy,
        places,
        containers: ContainersOfNode("/".into()),
    };
    let (mut found, mut problems) = (Vec::new(), Vec::new());
    for engine in engine_containers(&state_folders(Path::new("/"))) {
        let container = PodContainer {
            id: engine.id.clone(),
            ..PodContainer::default()
        };
        let init = engine.pid;
        let compared = survey.compare(&container, Some(&engine), init, &mut found, &mut problems);
        if let Err(error) = compared {
            let engine = engine.engine.name();
            problems.push(format!(
                "the containers of {engine} are not checked: {error:#}"
            ));
            break;
        }
    }
    (found, problems)
}

/// The parts of the node with which each container is compared.
struct BindSurvey<'a> {
    kubelet_roots: Vec<PathBuf>,
    policy: &'a Policy,
    places: &'a Places,
    containers: ContainersOfNode,
}

impl BindSurvey<'_> {
    /// Compares a container of a pod, or of an engine.
    ///
    /// # Errors
    /// If no container of this node can be compared.
    fn compare(
        &self,
        container: &PodContainer,
        engine: Option<&EngineContainer>,
        init: u32,
        found: &mut Vec<OldBinds>,
        problems: &mut Vec<String>,
    ) -> anyhow::Result<()> {
        let id = &container.id;
        let name = match engine {
            Some(of) => format!("{} container {id}", of.engine.name()),
            None => container.display_name(),
        };
        let subject = match engine {
            Some(_) => Some(format!("--container {id}")),
            None => container.pod.display_name().map(|it| format!("--pod {it}")),
        };
        let problem = |error: &ProcessError| format!("{name}: {}", error_chain(error));
        let process = match hold_running(id, init) {
            Ok(Some(process)) => process,
            Ok(None) => return Ok(()),
            Err(error) => {
                problems.push(problem(&error));
                return Ok(());
            }
        };
        refuse_other_mounts(&process)?;
        let bundle = match engine {
            Some(of) => Some(of.bundle.clone()),
            None => bundle_of_container(Path::new("/"), id),
        };
        let Some(bundle) = bundle else { return Ok(()) };
        let bytes = read_spec(&bundle).unwrap_or_default();
        let spec = SpecView::from_bytes(&bytes).ok();
        let spec = spec.as_ref();
        for what in [BindKind::Volumes, BindKind::HostFiles, BindKind::HostRoot] {
            let files = match (what, engine) {
                (BindKind::Volumes, None) => self.volumes_of_pod(&container.pod, &bundle),
                (BindKind::Volumes, Some(_)) => {
                    spec.and_then(|spec| self.volumes_of_engine(&bundle, spec, &name, problems))
                }
                (BindKind::HostFiles, _) => spec.map(|spec| {
                    let is_of_pod = engine.is_none();
                    self.host_files(spec, process.pid(), &name, is_of_pod, problems)
                }),
                (BindKind::HostRoot, _) => {
                    let roots = HostRoots::open(&bundle, self.policy, self.places).ok();
                    roots.map(|roots| Box::new(roots) as Box<dyn CurrentFiles>)
                }
            };
            let Some(files) = files else { continue };
            let mut mounts = match unless_ended(stale_mounts(&process, &*files)) {
                Ok(Some(mounts)) => mounts,
                Ok(None) => break,
                Err(error) => {
                    problems.push(problem(&error));
                    break;
                }
            };
            // The container covered a mount that is hidden.
            mounts.retain(|mount| {
                matches!(
                    mount.outcome,
                    MountResult::Stale
                        | MountResult::KeyGone
                        | MountResult::Occupied
                        | MountResult::Refused(_)
                        | MountResult::Failed { .. }
                )
            });
            if mounts.is_empty() {
                continue;
            }
            let subject = subject.as_ref().filter(|_| can_be_refreshed(&mounts));
            found.push(OldBinds {
                pod: container.pod.clone(),
                container: container.clone(),
                engine: engine.map(|of| of.engine.name()),
                what,
                opted_in: None,
                mounts,
                command: subject.map(|it| format!("bindguard refresh {it} --what {what}")),
            });
        }
        Ok(())
    }

    /// The volumes that the host has now. `None` if the pod's folder or the spec is not known.
    fn volumes_of_pod(&self, pod: &PodName, bundle: &Path) -> Option<Box<dyn CurrentFiles + '_>> {
        // A sandbox without a uid would get the folder of all pods.
        let uid = pod.uid.as_deref().filter(|uid| !uid.is_empty())?;
        let mut folders = self
            .kubelet_roots
            .iter()
            .map(|root| root.join("pods").join(uid));
        let folder = folders.find(|folder| folder.symlink_metadata().is_ok())?;
        Some(Box::new(BoundMounts::open(bundle, &folder).ok()?))
    }

    /// The volumes that the host has now. `None` if a source does not answer.
    fn volumes_of_engine(
        &self,
        bundle: &Path,
        spec: &SpecView<'_>,
        name: &str,
        problems: &mut Vec<String>,
    ) -> Option<Box<dyn CurrentFiles + '_>> {
        let sources = spec.binds().iter().map(|bind| bind.source().to_owned());
        for (source, why) in silent(sources.collect()) {
            if let Some(why) = why {
                let source = source.display();
                problems.push(format!(
                    "the volumes of {name} are not compared: {source}: {why}"
                ));
                return None;
            }
        }
        let mounts = BoundMounts::of_engine(bundle, &self.containers, self.places, None);
        Some(Box::new(mounts.ok()?))
    }

    /// The files that the host has now, without those whose source does not answer.
    fn host_files(
        &self,
        spec: &SpecView<'_>,
        init: u32,
        name: &str,
        is_of_pod: bool,
        problems: &mut Vec<String>,
    ) -> Box<dyn CurrentFiles + '_> {
        let mut binds = if is_of_pod {
            let roots = kubelet_roots_by_all_names(self.places, &Probes::for_create());
            FileBind::of_pod(spec, &roots)
        } else {
            FileBind::of_spec(spec)
        };
        let served: Vec<_> = binds.extract_if(.., |bind| !bind.is_local()).collect();
        let sources = served.iter().map(FileBind::source).collect();
        for (bind, (source, why)) in served.into_iter().zip(silent(sources)) {
            match why {
                None => binds.push(bind),
                Some(why) => problems.push(format!(
                    "{} is not compared with running containers: {why}",
                    source.display()
                )),
            }
        }
        let (files, errors) = BoundFiles::open(binds, init, &self.containers);
        for error in &errors {
            problems.push(format!("{name}: {}", error_chain(error)));
        }
        Box::new(files)
    }
}

/// Probes the sources of binds together. Returns why a source does not answer.
fn silent(sources: Vec<PathBuf>) -> Vec<(PathBuf, Option<String>)> {
    let reaches = Probes::for_create().reaches(&sources);
    let verdicts = reaches.iter().map(judge_reach);
    let reasons = verdicts.map(|it| it.map(|verdict| verdict.reason().unwrap_or_default()));
    sources.into_iter().zip(reasons).collect()
}

// Tries, without a change, the commands that would free the copies of a running container.
//
// A refresh and a release are refused for many reasons: a recursively read-only bind, a bind of
// another shim without a record of the create. A command that would be refused is no advice.

/// The effect that commands would have on a running container.
#[derive(Debug, Default)]
pub struct Trial {
    /// `refresh --what host-root` would replace a bind.
    pub refreshes: bool,
    /// The copies that `release` would unmount.
    pub releases: Vec<MountEntry>,
    /// The mounts of the spec. `None` if unknown: then any mount may be the container's own.
    pub spec: Option<SpecUsers>,
}

impl Trial {
    /// Tries the commands on a container. Nothing is entered.
    pub fn of(container: &PodContainer, policy: &Policy, places: &Places) -> Self {
        let spec = spec_of_container(Path::new("/"), &container.id);
        let mut trial = Self {
            spec: spec.and_then(|spec| SpecUsers::from_spec(&spec).ok()),
            ..Self::default()
        };
        // What an end of the container cuts off is not advised.
        let _ = trial.run(&container.id, policy, places);
        trial
    }

    fn run(&mut self, id: &str, policy: &Policy, places: &Places) -> Option<()> {
        let init = *inits_of(Path::new("/"), [id]).get(id)?;
        let process = hold_running(id, init).ok()??;
        // both verbs refuse a container that left the namespaces of its runtime
        refuse_other_mounts(&process).ok()?;
        let bundle = bundle_of_container(Path::new("/"), id)?;
        let roots = HostRoots::open(&bundle, policy, places).ok()?;
        self.releases = releasable_copies(&process, self.spec.as_ref(), &roots).ok()?;
        let mounts = stale_mounts(&process, &roots).ok()?;
        self.refreshes = mounts.iter().any(|it| it.outcome == MountResult::Stale);
        Some(())
    }
}

// The host's mounts in running containers of pods: binds of the host's root, and mounts that the host
// has unmounted.
//
// A container whose bind of the host's root is private keeps every mount that it was started with.
// The effect shows only later, when the host unmounts a mount: no create happens then. Namespaces
// without a pod are left to the doctor's point `pinned`.

/// A container whose init or mount table could not be read, for example because the table is too
/// large.
#[derive(Debug)]
pub struct UnreadContainer {
    /// The container, with its pod.
    pub container: PodContainer,
    pub why: ProcessError,
}

/// The mounts of the host in the running containers of pods.
#[derive(Debug, Default)]
pub struct ContainerMounts {
    /// The number of host-root binds that the host's umounts reach.
    pub following_host: usize,
    /// The number of host-root binds that the host's umounts do not reach.
    pub private: usize,
    /// The containers with a read-only host-root bind that the host's mounts reach. `ro` does not
    /// cover mounts that arrive: they are writable.
    pub open_to_later_mounts: Vec<PodContainer>,
    /// The containers that keep mounts which the host has unmounted.
    pub keepers: Vec<PinnedMounts>,
    /// The containers whose mounts are unknown.
    pub unread: Vec<UnreadContainer>,
}

/// A container that keeps mounts of the host.
#[derive(Debug, Clone, Serialize)]
pub struct PinnedMounts {
    pub pod: PodName,
    pub container: PodContainer,
    /// The places on the host at which the mounts were, at least one.
    #[serde(serialize_with = "serialize_paths")]
    pub places: Vec<PathBuf>,
    /// The command that frees the mounts, or names more commands; none before [`Self::advised`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
}

impl PinnedMounts {
    /// The mounts with the mildest command that is not refused.
    pub fn advised(mut self, policy: &Policy, places: &Places) -> Self {
        self.command = self.command_by(&Trial::of(&self.container, policy, places));
        self
    }

    fn command_by(&self, trial: &Trial) -> Option<String> {
        if let Some(pod) = self.pod.display_name().filter(|_| trial.refreshes) {
            return Some(format!("bindguard refresh --pod {pod} --what host-root"));
        }
        for place in &self.places {
            let below_root = place.strip_prefix("/").unwrap_or(place);
            let mut copies = trial.releases.iter();
            if copies.any(|copy| copy.mount_point.ends_with(below_root)) {
                return Some(format!("bindguard release {}", shell_word(place)));
            }
        }
        let place = self.places.first()?;
        Some(format!("bindguard holders {}", shell_word(place)))
    }
}

/// Reads the mount tables of the running containers of pods in turn. Only a single table is in
/// memory at a time.
///
/// # Errors
/// If the host's own mount table cannot be read.
pub fn container_mounts(
    pods: &Pods,
    places: &Places,
    scope: Scope,
) -> Result<ContainerMounts, Failure> {
    let mut found = ContainerMounts::default();
    if pods.running().next().is_none() {
        return Ok(found);
    }
    let ids = pods.running().map(|container| container.id.as_str());
    let inits = inits_of(Path::new("/"), ids);
    let table = read_mount_table()?;
    let places = &pods
        .with_runtime(places)
        .with_runtimes_at(table.mount_points());
    let host = HostMounts::of(&table, places);
    for container in pods.running() {
        let Some(init) = inits.get(container.id.as_str()) else {
            continue;
        };
        let table = match read_running(&container.id, *init, HeldProcess::mounts) {
            Ok(Some(table)) => table,
            // A container that ended keeps nothing.
            Ok(None) => continue,
            Err(why) => {
                let container = container.clone();
                found.unread.push(UnreadContainer { container, why });
                continue;
            }
        };
        let mut is_open = false;
        for (bind, is_reached) in host.host_root_binds(&table, scope) {
            if is_reached {
                found.following_host += 1;
                is_open |= bind.attributes.is_read_only();
            } else {
                found.private += 1;
            }
        }
        if is_open {
            found.open_to_later_mounts.push(container.clone());
        }
        if host.pinned_by(&table).is_empty() {
            continue;
        }
        // The host's table is read again, last: a mount that the host made meanwhile, and that a
        // new container copied, is not pinned.
        let places = HostMounts::of(&read_mount_table()?, places).pinned_by(&table);
        if !places.is_empty() {
            found.keepers.push(PinnedMounts {
                pod: container.pod.clone(),
                container: container.clone(),
                places,
                command: None,
            });
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use bindguard_core::mount_table::MountTable;

    use super::*;

    /// A refresh of a recursively read-only bind is always refused, and a release needs the record of
    /// the create.
    #[test]
    fn the_command_is_one_that_is_not_refused() {
        let copy = "13 12 8:2 / /host/mnt/disk rw - ext4 b rw\n";
        let copy = MountTable::from_mountinfo(copy.as_bytes())
            .unwrap()
            .entries()[0]
            .clone();
        let container = PodContainer {
            id: "c".to_owned(),
            name: Some("app".to_owned()),
            state: None,
            attempt: None,
            pod: PodName::of_uid("u-1"),
            guarded: None,
            shim_version: None,
        };
        for (refreshes, releases, command) in [
            (
                true,
                vec![copy.clone()],
                "bindguard refresh --pod u-1 --what host-root",
            ),
            (false, vec![copy], "bindguard release /mnt/disk"),
            (false, vec![], "bindguard holders /mnt/a"),
        ] {
            let keeper = PinnedMounts {
                pod: container.pod.clone(),
                container: container.clone(),
                command: None,
                places: vec!["/mnt/a".into(), "/mnt/disk".into()],
            };
            let trial = Trial {
                refreshes,
                releases,
                ..Trial::default()
            };
            assert_eq!(keeper.command_by(&trial).as_deref(), Some(command));
        }
    }
}
