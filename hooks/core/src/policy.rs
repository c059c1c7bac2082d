//! What the node's operator wants done.

use std::path::{Path, PathBuf};

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

/// The operator's choices, as far as decisions depend on them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// Stale volume-subpaths.
    pub stale_subpaths: Mode,
    /// Binds that keep the host's mounts alive.
    pub host_root: Mode,
    /// Volumes that have to be mounted and are not.
    pub unmounted_volumes: Alarm,
    /// Sources whose server or daemon does not answer.
    pub dead_sources: Alarm,
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

    /// Whether a bind of `path` takes along mounts that the kubelet or a runtime makes: `path` is `/`, or one of
    /// their directories, or an ancestor of one.
    pub fn holds_runtime_mounts(&self, path: &Path) -> bool {
        // The kubelet mounts below these two; the rest of its root is ordinary files.
        let kubelet = self.kubelet_roots.iter().flat_map(|root| [root.join("pods"), root.join("plugins")]);
        path == Path::new("/")
            || kubelet.chain(self.runtime_directories.iter().cloned()).any(|dir| dir.starts_with(path))
    }
}

impl Policy {
    /// Whether a path lies where only the kubelet or a runtime puts things, on the node's own disk, volumes aside: asking
    /// whether it is alive is not worth a process.
    pub fn is_local_by_construction(&self, path: &Path) -> bool {
        self.kubelet_roots.iter().chain(&self.runtime_directories).any(|dir| path.starts_with(dir))
    }
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            stale_subpaths: Mode::Repair,
            host_root: Mode::Repair,
            unmounted_volumes: Alarm::Report,
            dead_sources: Alarm::Report,
            kubelet_roots: Self::KUBELET_ROOTS.iter().map(PathBuf::from).collect(),
            runtime_directories: Self::RUNTIME_DIRECTORIES.iter().map(PathBuf::from).collect(),
        }
    }
}
