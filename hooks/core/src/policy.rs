//! What the node's operator wants done.

use std::path::{Component, Path, PathBuf};

use crate::kubelet::{Plugin, Writer};
use crate::paths::{below, climbs, is_root, lies_in};
use crate::spec::AskedAccess;

/// What to do about one kind of finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Look, mend, report.
    Repair,
    /// Look and report; change nothing.
    Report,
    /// Do not look.
    Off,
}

/// What to do about a source that cannot be mended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Alarm {
    /// Report it; the runtime decides.
    Report,
    /// Refuse the container, with the reason.
    Refuse,
    /// Do not look.
    Off,
}

/// What to do about a directory that a container's own volume has lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Vanished {
    /// Leave it: the runtime fails on it.
    Leave,
    /// Make it again, empty, as the kubelet does for a container that starts for the first time.
    Remake,
}

/// What to do when something that should have been repaired could not be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailedRepair {
    /// Report it; the runtime gets the bind as it was.
    Pass,
    /// Refuse the container, with the reason.
    Refuse,
}

/// Which binds are looked at for keeping the host's mounts alive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Binds of `/` alone.
    HostRoot,
    /// Binds of `/`, of directories in which the kubelet or a runtime mounts things, and of folders above one.
    RuntimeDirectories,
    /// Every recursive bind of a directory that holds a mount. It takes a reading of the mount table.
    AnySubmounts,
}

/// What to do about host-root binds that are read-only (`ro`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadOnlyBinds {
    /// Make them rslave, as the others. The container can then write to mounts that the host makes after its start.
    MakeRslave,
    /// Leave them as the pod has them, and report them.
    Keep,
}

/// Why a bind that pins is left as the pod has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kept {
    /// It is recursively read-only: a mount that arrives later would be writable in it.
    RecursivelyReadOnly,
    /// It is read-only, and policy keeps such binds for the same reason.
    ReadOnly,
}

/// What a pod's annotations may change.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PodsMay {
    /// `bindguard.io/mode`
    pub set_mode: bool,
    /// `bindguard.io/propagation`
    pub set_propagation: bool,
}

/// The operator's choices, as far as decisions depend on them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// Stale volume-subpaths.
    pub stale_subpaths: Mode,
    /// Binds that keep the host's mounts alive.
    pub host_root: Mode,
    /// Which binds [`Policy::host_root`] is about.
    pub host_root_scope: Scope,
    /// Those of them that are read-only.
    pub read_only_binds: ReadOnlyBinds,
    /// Directories that vanished from volumes that containers write.
    pub vanished_directories: Vanished,
    /// Repairs that fail.
    pub failed_repairs: FailedRepair,
    /// Volumes that have to be mounted and are not.
    pub unmounted_volumes: Alarm,
    /// Sources whose server or daemon does not answer.
    pub dead_sources: Alarm,
    /// What pods may choose for themselves.
    pub pods_may: PodsMay,
    /// The kubelet's root directories (`--root-dir`).
    pub kubelet_roots: Vec<PathBuf>,
    /// Directories in which container runtimes mount things, beside the kubelet's own.
    pub runtime_directories: Vec<PathBuf>,
}

impl Policy {
    /// The kubelet's default root, and those of distributions that move it.
    pub const KUBELET_ROOTS: [&'static str; 3] =
        ["/var/lib/kubelet", "/var/lib/k0s/kubelet", "/var/snap/microk8s/common/var/lib/kubelet"];

    /// Where containerd, CRI-O, Docker and Podman mount snapshots, sandboxes and network namespaces by default.
    pub const RUNTIME_DIRECTORIES: [&'static str; 9] = [
        "/run/containerd",
        "/run/containers",
        "/run/docker",
        "/run/k3s/containerd",
        "/run/netns",
        "/var/lib/containerd",
        "/var/lib/containers",
        "/var/lib/docker",
        "/var/lib/rancher/k3s/agent/containerd",
    ];

    /// The kubelet's roots as paths.
    pub fn kubelet_roots(&self) -> impl Iterator<Item = &Path> {
        self.kubelet_roots.iter().map(PathBuf::as_path)
    }

    /// The directories in which kubelets and runtimes mount things.
    pub fn directories(&self) -> impl Iterator<Item = &Path> {
        self.kubelet_roots.iter().chain(&self.runtime_directories).map(PathBuf::as_path)
    }

    /// The same policy, with what `other_name` says beside each of its directories; `None` when that is no other name.
    pub fn with_names(&self, other_name: impl Fn(&Path) -> Option<PathBuf>) -> Option<Self> {
        let more = |directories: &[PathBuf]| -> Vec<PathBuf> {
            let names = directories.iter().filter_map(|directory| other_name(directory));
            names.filter(|name| !directories.contains(name)).collect()
        };
        let (roots, directories) = (more(&self.kubelet_roots), more(&self.runtime_directories));
        (!roots.is_empty() || !directories.is_empty()).then(|| {
            let mut policy = self.clone();
            policy.kubelet_roots.extend(roots);
            policy.runtime_directories.extend(directories);
            policy
        })
    }

    /// Whether a bind of `path` is known to take along mounts that the kubelet or a runtime makes: `path` is `/`, or, as far
    /// as the scope goes, one of their directories or an ancestor of one.
    pub fn holds_runtime_mounts(&self, path: &Path) -> bool {
        match self.host_root_scope {
            Scope::HostRoot => is_root(path),
            Scope::RuntimeDirectories | Scope::AnySubmounts => is_root(path) || self.is_above_runtime(path),
        }
    }

    fn is_above_runtime(&self, path: &Path) -> bool {
        let above = |dir: &PathBuf| lies_in(dir, path);
        let kubelets = |root: &PathBuf| above(root) || below(path, root).is_some_and(is_mounted_in_by_kubelet);
        self.runtime_directories.iter().any(above) || self.kubelet_roots.iter().any(kubelets)
    }

    /// Why a host-root bind with this access is left as the pod has it. `rro` always is: Kubernetes requires propagation None
    /// for it.
    pub fn keeps(&self, access: AskedAccess) -> Option<Kept> {
        match (access, self.read_only_binds) {
            (AskedAccess::RecursivelyReadOnly, _) => Some(Kept::RecursivelyReadOnly),
            (AskedAccess::ReadOnly, ReadOnlyBinds::Keep) => Some(Kept::ReadOnly),
            (AskedAccess::ReadOnly, ReadOnlyBinds::MakeRslave) | (AskedAccess::ReadWrite, _) => None,
        }
    }

    /// Whether a path lies where the kubelet or a runtime mounts things.
    pub fn is_mounted_below(&self, path: &Path) -> bool {
        let kubelets = |root: &PathBuf| KUBELET_MOUNTS.iter().any(|folder| path.starts_with(root.join(folder)));
        self.runtime_directories.iter().any(|dir| lies_in(path, dir)) || self.kubelet_roots.iter().any(kubelets)
    }

    /// Whether a path lies in a volume of a pod, or in one of Docker's or Podman's.
    pub fn lies_in_volume(&self, path: &Path) -> bool {
        let is_volume = |below: &Path| below.components().any(|name| name.as_os_str() == VOLUMES);
        self.directories().any(|directory| below(path, directory).is_some_and(is_volume))
    }

    /// Whether a path lies inside a runtime's directory, where mounts of several containers may be below it: `containers`,
    /// `overlay2` and `volumes` of Docker, the tasks of containerd. What lies below belongs to one container or volume, such as
    /// `containers/<id>/mounts/shm`, is the runtime's own to bind. So is every folder of a pod or driver inside a kubelet's.
    pub fn may_hold_mounts_of_containers(&self, path: &Path) -> bool {
        let is_inside = |dir: &PathBuf| below(path, dir).is_some_and(|below| !is_of_one(below));
        self.host_root_scope != Scope::HostRoot && self.runtime_directories.iter().any(is_inside) && !climbs(path)
    }

    /// Whether a path lies where only the kubelet or a runtime puts things, on the node's own disk, volumes aside: asking
    /// whether it is alive is not worth a process.
    pub fn is_local_by_construction(&self, path: &Path) -> bool {
        let is_own = |dir: &PathBuf| below(path, dir).is_some_and(|below| !may_be_mounted_on(below));
        self.kubelet_roots.iter().chain(&self.runtime_directories).any(is_own) && !climbs(path)
    }
}

/// The kubelet mounts below these two folders of its root; the rest is ordinary files.
const KUBELET_MOUNTS: [&str; 2] = ["pods", "plugins"];

fn is_mounted_in_by_kubelet(below_root: &Path) -> bool {
    KUBELET_MOUNTS.iter().any(|folder| below_root == Path::new(folder))
}

/// Whether drivers, and containers whose mounts reach the host, mount things at a path, seen from the root of a kubelet
/// or of a runtime: its volumes (`pods/<uid>/volumes/...` here, `volumes/...` with Docker, `storage/volumes/...` with
/// Podman), and what CSI drivers mount for the whole node.
fn may_be_mounted_on(below_root: &Path) -> bool {
    let mut names = below_root.components().map(Component::as_os_str);
    let in_volumes = names.any(|name| name == VOLUMES);
    // A configMap's is nobody's to mount on: the kubelet takes it for its own.
    let is_kubelets =
        names.next().and_then(Plugin::from_folder).is_some_and(|plugin| plugin.writer() == Writer::Kubelet);
    below_root.starts_with("plugins") || in_volumes && !is_kubelets
}

const VOLUMES: &str = "volumes";

/// Whether a path, seen from a runtime's root, belongs to one sandbox, container or volume: `sandboxes/<id>/shm` of containerd,
/// `containers/<id>/...` of Docker, `storage/overlay-containers/<id>/...` of Podman and CRI-O, `volumes/<name>/_data`.
fn is_of_one(below_root: &Path) -> bool {
    let mut names = below_root.components().map(|name| name.as_os_str().as_encoded_bytes());
    names.any(|name| matches!(name, b"sandboxes" | b"containers" | b"volumes") || name.ends_with(b"-containers"))
        && names.next().is_some()
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            stale_subpaths: Mode::Repair,
            host_root: Mode::Repair,
            host_root_scope: Scope::RuntimeDirectories,
            read_only_binds: ReadOnlyBinds::MakeRslave,
            vanished_directories: Vanished::Leave,
            failed_repairs: FailedRepair::Pass,
            unmounted_volumes: Alarm::Report,
            dead_sources: Alarm::Report,
            pods_may: PodsMay::default(),
            kubelet_roots: Self::KUBELET_ROOTS.iter().map(PathBuf::from).collect(),
            runtime_directories: Self::RUNTIME_DIRECTORIES.iter().map(PathBuf::from).collect(),
        }
    }
}
