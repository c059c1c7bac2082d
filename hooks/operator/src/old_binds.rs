//! Running containers whose binds show an old mount or file of the host: a volume that was mounted
//! anew, a single file or socket that was replaced, a private copy of the host's mounts.
//!
//! The findings are those of `bindguard refresh --dry-run`. Nothing is entered and nothing is
//! changed. A source is opened only if no server has to answer, and probed with a deadline.

use std::path::{Path, PathBuf};

use bindguard_core::error_chain;
use bindguard_core::identity::PodName;
use bindguard_core::judge::judge_reach;
use bindguard_core::places::Places;
use bindguard_core::policy::Policy;
use bindguard_core::refresh_request::{HOST_FILES, HOST_ROOT, RequestedBinds, VOLUMES};
use bindguard_core::report::{MountResult, RefreshedMount};
use bindguard_core::spec::SpecView;
use bindguard_guard::Probes;
use bindguard_guard::refresh::{
    BoundFiles, BoundMounts, CurrentFiles, FileBind, HeldProcess, HostRoots, ProcessError,
};
use bindguard_sys::bundle::read_spec;
use serde::Serialize;

use crate::bundles::{bundle_of_container, host_files_of_container};
use crate::container_inits::{ContainerInits, stale_mounts};
use crate::engines::{ContainersOfNode, EngineContainer, engine_containers, state_folders};
use crate::kubelet_roots::kubelets_here;
use crate::node::{NotInit, hold_init, refuse_other_mounts};
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

    fn is_requested(self, binds: RequestedBinds) -> bool {
        match self {
            Self::Volumes => binds.volumes,
            Self::HostRoot => binds.host_root,
            Self::HostFiles => binds.host_files,
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

/// The containers of these pods with old binds, and the reasons why containers are not checked.
pub fn old_binds(pods: &Pods, policy: &Policy, places: &Places) -> (Vec<OldBinds>, Vec<String>) {
    let (kubelet_roots, _) = kubelets_here(places);
    let node = NodeBinds {
        kubelet_roots,
        policy,
        places: &pods.with_runtime(places),
        engines: ContainersOfNode::at(Path::new("/")),
    };
    let mut running = ContainerInits::of(pods.running());
    let (mut found, mut problems) = (Vec::new(), Vec::new());
    for container in pods.running() {
        let Some(process) = running.hold(container) else {
            continue;
        };
        if let Err(error) = refuse_other_mounts(&process) {
            // The remaining containers of this node cannot be compared either.
            problems.push(format!(
                "the volumes and host files of running containers are not checked: {}",
                error_chain(&error)
            ));
            break;
        }
        for kind in [BindKind::Volumes, BindKind::HostFiles, BindKind::HostRoot] {
            let seen = node.old_mounts(container, &process, kind);
            let Some((mounts, failed)) = running.unless_ended(container, seen) else {
                break;
            };
            problems.extend(failed);
            found.extend(report(container, kind, mounts, pods));
        }
    }
    problems.extend(running.into_problems());
    (found, problems)
}

/// The containers of Docker and Podman with old binds, and the reasons why containers are not
/// checked. Labels are not read, so no opt-in is known.
pub fn old_binds_of_engines(policy: &Policy, places: &Places) -> (Vec<OldBinds>, Vec<String>) {
    let node = NodeBinds {
        kubelet_roots: Vec::new(),
        policy,
        places,
        engines: ContainersOfNode::at(Path::new("/")),
    };
    let (mut found, mut problems) = (Vec::new(), Vec::new());
    for container in engine_containers(&state_folders(Path::new("/"))) {
        let (engine, id) = (container.engine.name(), &container.id);
        let process = match hold_init(id, container.pid) {
            Ok(process) => process,
            // The container ended.
            Err(NotInit::Process(ProcessError::Ended(_))) => continue,
            Err(NotInit::Cgroup { .. } | NotInit::Record { .. }) => continue,
            Err(NotInit::Process(error)) => {
                problems.push(format!("{engine} container {id}: {}", error_chain(&error)));
                continue;
            }
        };
        if let Err(error) = refuse_other_mounts(&process) {
            let why = error_chain(&error);
            problems.push(format!("the containers of {engine} are not checked: {why}"));
            break;
        }
        for what in [BindKind::Volumes, BindKind::HostFiles, BindKind::HostRoot] {
            let Some(files) = node.files_of_engine(&container, what, &mut problems) else {
                continue;
            };
            let mounts = match old_mounts(&process, &*files) {
                Ok(mounts) if mounts.is_empty() => continue,
                Ok(mounts) => mounts,
                Err(ProcessError::Ended(_)) => break,
                Err(error) => {
                    problems.push(format!("{engine} container {id}: {}", error_chain(&error)));
                    break;
                }
            };
            let helps = mounts.iter().any(|it| it.outcome == MountResult::Stale);
            let command = format!("bindguard refresh --container {id} --what {}", what.word());
            found.push(OldBinds {
                pod: PodName::default(),
                container: PodContainer::without_pod(id),
                engine: Some(engine),
                what,
                opted_in: None,
                mounts,
                command: helps.then_some(command),
            });
        }
    }
    (found, problems)
}

/// The mounts of a container that show something else than these files.
fn old_mounts(
    process: &HeldProcess,
    files: &dyn CurrentFiles,
) -> Result<Vec<RefreshedMount>, ProcessError> {
    let mut mounts = stale_mounts(process, files)?;
    let is_old = |mount: &RefreshedMount| match mount.outcome {
        MountResult::Stale | MountResult::KeyGone | MountResult::Occupied => true,
        MountResult::Refused { .. } | MountResult::Failed { .. } => true,
        // The container covered the mount.
        MountResult::Hidden => false,
        MountResult::Replaced { .. } | MountResult::Missing | MountResult::Restless => false,
    };
    mounts.retain(is_old);
    Ok(mounts)
}

fn report(
    container: &PodContainer,
    what: BindKind,
    mounts: Vec<RefreshedMount>,
    pods: &Pods,
) -> Option<OldBinds> {
    if mounts.is_empty() {
        return None;
    }
    let pod = container.pod.clone();
    let request = pod.uid.as_ref();
    let request = request.and_then(|uid| pods.refresh_requests.get(uid));
    let opted_in = request.map(|request| what.is_requested(request.binds));
    let helps = mounts.iter().any(|it| it.outcome == MountResult::Stale);
    let name = pod.display_name().filter(|_| helps);
    let command = name.map(|pod| format!("bindguard refresh --pod {pod} --what {}", what.word()));
    Some(OldBinds {
        pod,
        container: container.clone(),
        engine: None,
        what,
        opted_in,
        mounts,
        command,
    })
}

/// The parts of the node with which each container is compared.
struct NodeBinds<'a> {
    kubelet_roots: Vec<PathBuf>,
    policy: &'a Policy,
    places: &'a Places,
    engines: ContainersOfNode,
}

impl NodeBinds<'_> {
    /// The old mounts of a kind, and the errors of the sources that could not be followed.
    fn old_mounts(
        &self,
        container: &PodContainer,
        process: &HeldProcess,
        kind: BindKind,
    ) -> Result<(Vec<RefreshedMount>, Vec<String>), ProcessError> {
        let mut problems = Vec::new();
        let Some(files) = self.files(container, process, kind, &mut problems) else {
            return Ok((Vec::new(), problems));
        };
        Ok((old_mounts(process, &*files)?, problems))
    }

    /// The mounts or files that the host has now, for a container of Docker or Podman. `None` if
    /// its spec is not known, or a source of its volumes does not answer.
    fn files_of_engine(
        &self,
        container: &EngineContainer,
        kind: BindKind,
        problems: &mut Vec<String>,
    ) -> Option<Box<dyn CurrentFiles + '_>> {
        let bytes = read_spec(&container.bundle).ok()?;
        let spec = SpecView::from_bytes(&bytes).ok()?;
        Some(match kind {
            BindKind::Volumes => {
                let sources = spec.binds().iter().map(|bind| bind.source().to_owned());
                let sources: Vec<PathBuf> = sources.collect();
                for (source, reach) in sources.iter().zip(Probes::for_create().reaches(&sources)) {
                    if let Some(verdict) = judge_reach(&reach) {
                        problems.push(format!(
                            "the volumes of {} container {} are not compared: {}: {}",
                            container.engine.name(),
                            container.id,
                            source.display(),
                            verdict.reason().unwrap_or_default()
                        ));
                        return None;
                    }
                }
                let (bundle, places) = (&container.bundle, self.places);
                Box::new(BoundMounts::of_engine(bundle, &self.engines, places, None).ok()?)
            }
            BindKind::HostRoot => {
                let roots = HostRoots::open(&container.bundle, self.policy, self.places);
                Box::new(roots.ok()?)
            }
            BindKind::HostFiles => {
                let mut binds = FileBind::of_spec(&spec);
                problems.extend(self.leave_out_silent(&mut binds));
                let (files, errors) = BoundFiles::open(binds, container.pid, &self.engines);
                let name = container.engine.name();
                problems.extend(errors.iter().map(|error| {
                    format!("{name} container {}: {}", container.id, error_chain(error))
                }));
                Box::new(files)
            }
        })
    }

    /// Leaves out the binds whose source does not answer, and returns the reasons.
    fn leave_out_silent(&self, binds: &mut Vec<FileBind>) -> Vec<String> {
        let served: Vec<_> = binds.extract_if(.., |bind| !bind.is_local()).collect();
        let sources: Vec<_> = served.iter().map(FileBind::source).collect();
        let answers = Probes::for_create().reaches(&sources).into_iter();
        let mut silent = Vec::new();
        for (bind, reach) in served.into_iter().zip(answers) {
            match judge_reach(&reach) {
                None => binds.push(bind),
                Some(verdict) => silent.push(format!(
                    "{} is not compared with running containers: {}",
                    bind.source().display(),
                    verdict.reason().unwrap_or_default()
                )),
            }
        }
        silent
    }

    /// The mounts or files that the host has now. `None` if the container's spec is not known.
    fn files(
        &self,
        container: &PodContainer,
        process: &HeldProcess,
        kind: BindKind,
        problems: &mut Vec<String>,
    ) -> Option<Box<dyn CurrentFiles + '_>> {
        let root = Path::new("/");
        let bundle = || bundle_of_container(root, &container.id);
        Some(match kind {
            BindKind::Volumes => {
                let uid = container.pod.uid.as_deref()?;
                let mut folders = self.kubelet_roots.iter();
                let folder = folders.find_map(|root| {
                    let folder = root.join("pods").join(uid);
                    folder.symlink_metadata().is_ok().then_some(folder)
                })?;
                Box::new(BoundMounts::open(&bundle()?, &folder).ok()?)
            }
            BindKind::HostRoot => {
                let roots = HostRoots::open(&bundle()?, self.policy, self.places);
                Box::new(roots.ok()?)
            }
            BindKind::HostFiles => {
                let mut binds = host_files_of_container(root, &container.id, self.places)?;
                problems.extend(self.leave_out_silent(&mut binds));
                let (files, errors) = BoundFiles::open(binds, process.pid(), &self.engines);
                problems.extend(errors.iter().map(|error| container.problem(error)));
                Box::new(files)
            }
        })
    }
}
