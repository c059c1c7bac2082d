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
use bindguard_core::places::Places;
use bindguard_core::policy::Policy;
use bindguard_core::refresh_request::{HOST_FILES, HOST_ROOT, VOLUMES};
use bindguard_core::report::{MountResult, RefreshedMount};
use bindguard_core::spec::SpecView;
use bindguard_guard::refresh::{
    BoundFiles, BoundMounts, CurrentFiles, FileBind, HeldProcess, HostRoots, PodVolumes,
    ProcessError, RefreshError, find_stale,
};
use bindguard_guard::{Probes, kubelet_roots_by_all_names};
use bindguard_sys::bundle::read_spec;
use serde::Serialize;

use crate::bundles::{binds_of_container, bundle_of_container};
use crate::engines::{ContainersOfNode, EngineContainer, engine_containers, state_folders};
use crate::kubelet_roots::kubelets_here;
use crate::node::{hold_running, inits_of, read_running, refuse_other_mounts, unless_ended};
use crate::pods::{PodContainer, Pods};

/// The kinds of binds that a pod opts in by a word, besides subPaths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum BindKind {
    /// Volumes that the host has mounted anew.
    Volumes,
    /// Private binds of the host's root.
    HostRoot,
    /// Single files and sockets of the host that were replaced.
    HostFiles,
}

/// A running container, and its binds of a kind that differ from the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
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

impl BindKind {
    /// The word for the kind in the annotation and on the command line.
    pub fn word(self) -> &'static str {
        match self {
            Self::Volumes => VOLUMES,
            Self::HostRoot => HOST_ROOT,
            Self::HostFiles => HOST_FILES,
        }
    }
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
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
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
pub(crate) fn stale_mounts(
    process: &HeldProcess,
    files: &dyn CurrentFiles,
) -> Result<Vec<RefreshedMount>, ProcessError> {
    match find_stale(process, &[files]) {
        Ok(seen) => Ok(seen.mounts),
        Err(RefreshError::Process(error)) => Err(error),
        Err(
            RefreshError::MountsOfNode(_)
            | RefreshError::Sandbox(_)
            | RefreshError::Locked(_)
            | RefreshError::NoSpec
            | RefreshError::OldKernel(_)
            | RefreshError::Namespace(_),
        ) => Ok(Vec::new()),
    }
}

/// True if a refresh helps: a removed key does not come back by a refresh, and a bind that is gone
/// only by a restart.
fn can_be_refreshed(mounts: &[RefreshedMount]) -> bool {
    let is_stale = |mount: &RefreshedMount| mount.outcome == MountResult::Stale;
    mounts.iter().any(is_stale)
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
    let inits = inits_of(by_pod.values().flatten().map(|it| it.id.as_str()));
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
    files.retain(|mount| match mount.outcome {
        MountResult::Stale | MountResult::KeyGone | MountResult::Missing => true,
        MountResult::Replaced { .. } | MountResult::Hidden | MountResult::Occupied => false,
        MountResult::Restless | MountResult::Refused { .. } | MountResult::Failed { .. } => false,
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
    let (kubelet_roots, _) = kubelets_here(places);
    let mut survey = BindSurvey::new(kubelet_roots, policy, pods.with_runtime(places));
    let inits = inits_of(pods.running().map(|container| container.id.as_str()));
    for container in pods.running() {
        let Some(init) = inits.get(container.id.as_str()) else {
            continue;
        };
        if !survey.compare(container, None, *init) {
            break;
        }
    }
    for old in &mut survey.found {
        let uid = old.pod.uid.as_ref();
        if let Some(request) = uid.and_then(|uid| pods.refresh_requests.get(uid)) {
            old.opted_in = Some(match old.what {
                BindKind::Volumes => request.binds.volumes,
                BindKind::HostRoot => request.binds.host_root,
                BindKind::HostFiles => request.binds.host_files,
            });
        }
    }
    (survey.found, survey.problems)
}

/// The containers of Docker and Podman with old binds, and the reasons why containers are not
/// checked. Labels are not read, so no opt-in is known.
pub fn old_binds_of_engines(policy: &Policy, places: &Places) -> (Vec<OldBinds>, Vec<String>) {
    let mut survey = BindSurvey::new(Vec::new(), policy, places.clone());
    for engine in engine_containers(&state_folders(Path::new("/"))) {
        let container = PodContainer {
            id: engine.id.clone(),
            ..PodContainer::default()
        };
        if !survey.compare(&container, Some(&engine), engine.pid) {
            break;
        }
    }
    (survey.found, survey.problems)
}

/// The parts of the node with which each container is compared, and the results.
struct BindSurvey<'a> {
    kubelet_roots: Vec<PathBuf>,
    policy: &'a Policy,
    places: Places,
    engines: ContainersOfNode,
    found: Vec<OldBinds>,
    problems: Vec<String>,
}

impl<'a> BindSurvey<'a> {
    fn new(kubelet_roots: Vec<PathBuf>, policy: &'a Policy, places: Places) -> Self {
        Self {
            kubelet_roots,
            policy,
            places,
            engines: ContainersOfNode::at(Path::new("/")),
            found: Vec::new(),
            problems: Vec::new(),
        }
    }

    /// Compares a container of a pod, or of an engine. False if the remaining containers of this
    /// node cannot be compared either.
    fn compare(
        &mut self,
        container: &PodContainer,
        engine: Option<&EngineContainer>,
        init: u32,
    ) -> bool {
        let id = &container.id;
        let (name, all, subject) = match engine {
            Some(of) => {
                let engine = of.engine.name();
                let name = format!("{engine} container {id}");
                let all = format!("the containers of {engine}");
                (name, all, Some(format!("--container {id}")))
            }
            None => {
                let all = "the volumes and host files of running containers".to_owned();
                let pod = container.pod.display_name();
                let subject = pod.map(|pod| format!("--pod {pod}"));
                (container.display_name(), all, subject)
            }
        };
        let process = match hold_running(id, init) {
            Ok(Some(process)) => process,
            Ok(None) => return true,
            Err(error) => {
                self.problems
                    .push(format!("{name}: {}", error_chain(&error)));
                return true;
            }
        };
        if let Err(error) = refuse_other_mounts(&process) {
            let why = error_chain(&error);
            self.problems.push(format!("{all} are not checked: {why}"));
            return false;
        }
        let bundle = match engine {
            Some(of) => Some(of.bundle.clone()),
            None => bundle_of_container(Path::new("/"), id),
        };
        let Some(bundle) = bundle else { return true };
        let (mut found, mut problems) = (Vec::new(), Vec::new());
        for what in [BindKind::Volumes, BindKind::HostFiles, BindKind::HostRoot] {
            let uid = match engine {
                Some(_) => None,
                None => Some(container.pod.uid.as_deref().unwrap_or_default()),
            };
            let source = (&*bundle, process.pid(), &*name);
            let Some(files) = self.files(what, source, uid, &mut problems) else {
                continue;
            };
            let mut mounts = match unless_ended(stale_mounts(&process, &*files)) {
                Ok(Some(mounts)) => mounts,
                Ok(None) => break,
                Err(error) => {
                    problems.push(format!("{name}: {}", error_chain(&error)));
                    break;
                }
            };
            mounts.retain(|mount| match mount.outcome {
                MountResult::Stale | MountResult::KeyGone | MountResult::Occupied => true,
                MountResult::Refused { .. } | MountResult::Failed { .. } => true,
                // The container covered the mount.
                MountResult::Hidden => false,
                MountResult::Replaced { .. } | MountResult::Missing | MountResult::Restless => {
                    false
                }
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
                command: subject.map(|it| format!("bindguard refresh {it} --what {}", what.word())),
            });
        }
        self.found.extend(found);
        self.problems.extend(problems);
        true
    }

    /// The mounts or files that the host has now, for the container with this bundle, init and name.
    /// `uid` is the pod's, and `None` for a container of an engine. Returns `None` if the spec or the
    /// pod's folder is not known, or a source of a volume does not answer.
    fn files(
        &self,
        kind: BindKind,
        (bundle, init, name): (&Path, u32, &str),
        uid: Option<&str>,
        problems: &mut Vec<String>,
    ) -> Option<Box<dyn CurrentFiles + '_>> {
        if kind == BindKind::HostRoot {
            let roots = HostRoots::open(bundle, self.policy, &self.places).ok()?;
            return Some(Box::new(roots));
        }
        if let Some(uid) = uid.filter(|_| kind == BindKind::Volumes) {
            let roots = self.kubelet_roots.iter().filter(|_| !uid.is_empty());
            let mut folders = roots.map(|root| root.join("pods").join(uid));
            let folder = folders.find(|folder| folder.symlink_metadata().is_ok())?;
            return Some(Box::new(BoundMounts::open(bundle, &folder).ok()?));
        }
        let bytes = read_spec(bundle).ok()?;
        let spec = SpecView::from_bytes(&bytes).ok()?;
        if kind == BindKind::Volumes {
            let sources = spec.binds().iter().map(|bind| bind.source().to_owned());
            let sources: Vec<PathBuf> = sources.collect();
            for (source, reach) in sources.iter().zip(Probes::for_create().reaches(&sources)) {
                if let Some(verdict) = judge_reach(&reach) {
                    problems.push(format!(
                        "the volumes of {name} are not compared: {}: {}",
                        source.display(),
                        verdict.reason().unwrap_or_default()
                    ));
                    return None;
                }
            }
            let mounts = BoundMounts::of_engine(bundle, &self.engines, &self.places, None);
            return Some(Box::new(mounts.ok()?));
        }
        let mut binds = match uid {
            None => FileBind::of_spec(&spec),
            Some(_) => {
                let roots = kubelet_roots_by_all_names(&self.places, &Probes::for_create());
                FileBind::of_pod(&spec, &roots)
            }
        };
        // Leaves out the binds whose source does not answer.
        let served: Vec<_> = binds.extract_if(.., |bind| !bind.is_local()).collect();
        let sources: Vec<_> = served.iter().map(FileBind::source).collect();
        let answers = Probes::for_create().reaches(&sources);
        for (bind, reach) in served.into_iter().zip(answers) {
            match judge_reach(&reach) {
                None => binds.push(bind),
                Some(verdict) => problems.push(format!(
                    "{} is not compared with running containers: {}",
                    bind.source().display(),
                    verdict.reason().unwrap_or_default()
                )),
            }
        }
        let (files, errors) = BoundFiles::open(binds, init, &self.engines);
        for error in &errors {
            problems.push(format!("{name}: {}", error_chain(error)));
        }
        Some(Box::new(files))
    }
}
