//! The kind of a bind's source, by its path and by the directories of a node in which kubelets and
//! container runtimes mount things.
//!
//! A bind of such a directory, or of an ancestor, keeps the mounts of other containers alive. A
//! path inside is usually on the node's own disk, so it need not be probed.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::kubelet::{MountedVolume, Plugin, PodPath, VolumeSubpath, Writer};
use crate::policy::Scope;
use crate::text::{below, climbs, is_root, lies_in};

/// The kinds of source that the guard distinguishes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SourceKind {
    /// A bind that the kubelet made for a `subPath`.
    Subpath(VolumeSubpath),
    /// A volume that requires a mount.
    MountedVolume(MountedVolume),
    /// A volume that requires no mount. Only a check of the node reports this kind; such a bind
    /// source is [`SourceKind::Foreign`].
    PlainVolume,
    /// A name in a kubelet-written volume. The kubelet binds such volumes whole, so an earlier
    /// admission of this very bundle wrote the name into the spec.
    InVolume,
    /// The host's `/`, a directory in which the kubelet or a runtime mounts things, or an ancestor
    /// of such a directory. Also a folder with mounts inside a runtime's directory, which only the
    /// mount table shows.
    HostRoot,
    /// A source that bindguard never changes.
    Foreign,
}

impl SourceKind {
    /// Classifies an absolute path by its name alone.
    pub fn from_path(source: &Path, places: &Places, scope: Scope) -> Self {
        let of_pod =
            PodPath::from_path(source, places.kubelet_roots()).and_then(|path| Self::of_pod(&path));
        of_pod.unwrap_or_else(|| match places.holds_runtime_mounts(source, scope) {
            true => Self::HostRoot,
            false => Self::Foreign,
        })
    }

    fn of_pod(path: &PodPath<'_, '_>) -> Option<Self> {
        if let [volumes, folder, _volume, _name, ..] = path.names.as_slice()
            && *volumes == "volumes"
            && Plugin::from_folder(folder).is_some_and(|plugin| plugin.writer == Writer::Kubelet)
        {
            return Some(Self::InVolume);
        }
        let subpath = || VolumeSubpath::from_pod_path(path).map(Self::Subpath);
        let volume = || MountedVolume::from_pod_path(path).map(Self::MountedVolume);
        subpath().or_else(volume)
    }

    /// The kind's name in reports.
    pub fn name(&self) -> KindName {
        match self {
            Self::Subpath(_) => KindName::Subpath,
            Self::MountedVolume(_) | Self::PlainVolume => KindName::Volume,
            Self::InVolume => KindName::InVolume,
            Self::HostRoot => KindName::HostRoot,
            Self::Foreign => KindName::Foreign,
        }
    }
}

/// The name of a kind in reports.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    strum::IntoStaticStr,
    Serialize,
    Deserialize,
)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case", const_into_str)]
pub enum KindName {
    /// [`SourceKind::Subpath`]
    Subpath,
    /// [`SourceKind::MountedVolume`] and [`SourceKind::PlainVolume`]
    Volume,
    /// [`SourceKind::InVolume`]
    InVolume,
    /// [`SourceKind::HostRoot`]
    HostRoot,
    /// [`SourceKind::Foreign`]
    Foreign,
}

impl KindName {
    pub fn as_str(self) -> &'static str {
        self.into_str()
    }
}

/// The directories of kubelets and runtimes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Places {
    /// The kubelet's root directories (`--root-dir`).
    pub kubelet_roots: Vec<PathBuf>,
    /// Directories in which container runtimes mount things, in addition to the kubelet's.
    pub runtime_directories: Vec<PathBuf>,
}

impl Places {
    /// The kubelet's default root, and the roots of distributions that move it.
    pub const KUBELET_ROOTS: [&'static str; 3] = [
        "/var/lib/kubelet",
        "/var/lib/k0s/kubelet",
        "/var/snap/microk8s/common/var/lib/kubelet",
    ];

    /// Default directories in which containerd, CRI-O, Docker and Podman mount snapshots, sandboxes
    /// and network namespaces, also those of k3s, RKE2, k0s, MicroK8s and Docker's snap.
    pub const RUNTIME_DIRECTORIES: [&'static str; 16] = [
        "/run/containerd",
        "/run/containers",
        "/run/docker",
        "/run/k0s/containerd",
        "/run/k3s/containerd",
        "/run/netns",
        "/run/snap.docker",
        "/var/lib/containerd",
        "/var/lib/containers",
        "/var/lib/docker",
        "/var/lib/k0s/containerd",
        "/var/lib/rancher/k3s/agent/containerd",
        "/var/lib/rancher/rke2/agent/containerd",
        "/var/snap/docker/common/var-lib-docker",
        "/var/snap/microk8s/common/run/containerd",
        "/var/snap/microk8s/common/var/lib/containerd",
    ];

    /// The kubelet's roots as paths.
    pub fn kubelet_roots(&self) -> impl Iterator<Item = &Path> {
        self.kubelet_roots.iter().map(PathBuf::as_path)
    }

    /// The directories in which kubelets and runtimes mount things.
    pub fn directories(&self) -> impl Iterator<Item = &Path> {
        self.kubelet_roots()
            .chain(self.runtime_directories.iter().map(PathBuf::as_path))
    }

    /// Adds the `other_name` of each directory; `None` if no directory has another name.
    pub fn with_names(&self, other_name: impl Fn(&Path) -> Option<PathBuf>) -> Option<Self> {
        let mut places = self.clone();
        for directories in [&mut places.kubelet_roots, &mut places.runtime_directories] {
            let mut names: Vec<_> = directories.iter().filter_map(|it| other_name(it)).collect();
            names.retain(|name| !directories.contains(name));
            directories.extend(names);
        }
        (places != *self).then_some(places)
    }

    /// The same places, and the directories of the runtimes that made the mounts or bundles at
    /// `paths`, wherever the runtimes' configuration has these directories. A pod can mount in the
    /// kubelet's folders, so paths there name no runtime.
    #[must_use]
    pub fn with_runtimes_at<'p>(&self, paths: impl IntoIterator<Item = &'p Path>) -> Self {
        self.with_directories(paths.into_iter().filter_map(runtime_directory))
    }

    /// The same places, and these directories of runtimes.
    #[must_use]
    pub fn with_directories<'p>(&self, directories: impl IntoIterator<Item = &'p Path>) -> Self {
        let mut places = self.clone();
        for directory in directories {
            let is_known = places.directories().any(|known| lies_in(directory, known));
            if directory.is_absolute() && !is_root(directory) && !climbs(directory) && !is_known {
                places.runtime_directories.push(directory.to_owned());
            }
        }
        places
    }

    /// True if a bind of `path` is known to include mounts that the kubelet or a runtime makes.
    /// `path` is `/` or, depending on the scope, a directory of kubelet or runtime, or an ancestor
    /// of such a directory.
    pub fn holds_runtime_mounts(&self, path: &Path, scope: Scope) -> bool {
        let is_above = |directory: &PathBuf| lies_in(directory, path);
        let is_mount = |rest: &Path| KUBELET_MOUNTS.iter().any(|it| rest == Path::new(it));
        is_root(path)
            || scope != Scope::HostRoot
                && (self.runtime_directories.iter().any(is_above)
                    || self.kubelet_roots.iter().any(is_above)
                    || is_in(path, &self.kubelet_roots, is_mount))
    }

    /// True if the kubelet or a runtime mounts things at `path`.
    pub fn is_mounted_below(&self, path: &Path) -> bool {
        let is_mount = |rest: &Path| KUBELET_MOUNTS.iter().any(|it| rest.starts_with(it));
        is_in(path, &self.runtime_directories, |_| true)
            || is_in(path, &self.kubelet_roots, is_mount)
    }

    /// True if `path` is in a volume of a pod, of Docker or of Podman.
    pub fn lies_in_volume(&self, path: &Path) -> bool {
        let is_volume = |rest: &Path| rest.iter().any(|name| name == VOLUMES);
        is_in(path, self.directories(), is_volume)
    }

    /// True if `path` is inside a runtime's directory and mounts of several containers may be below
    /// `path`. Examples: `containers`, `overlay2` and `volumes` of Docker, the tasks of containerd.
    /// False for a path of a single container or volume, such as `containers/<id>/mounts/shm`: the
    /// runtime binds it. Also false for every folder of a pod or driver in the kubelet's directory.
    pub fn may_hold_mounts_of_containers(&self, path: &Path) -> bool {
        is_in(path, &self.runtime_directories, |rest| !is_of_one(rest)) && !climbs(path)
    }

    /// True if only the kubelet or a runtime writes at `path`, on the node's own disk: outside of
    /// `plugins`, and of all volumes except kubelet-written ones. No process needs to probe such a
    /// path.
    pub fn is_local_by_construction(&self, path: &Path) -> bool {
        is_in(path, self.directories(), |rest| !may_be_mounted_on(rest)) && !climbs(path)
    }
}

impl Default for Places {
    fn default() -> Self {
        Self {
            kubelet_roots: Self::KUBELET_ROOTS.map(PathBuf::from).into(),
            runtime_directories: Self::RUNTIME_DIRECTORIES.map(PathBuf::from).into(),
        }
    }
}

/// True if `path` is in one of the directories, and `accepts` the rest of the path.
fn is_in(
    path: &Path,
    directories: impl IntoIterator<Item = impl AsRef<Path>>,
    accepts: impl Fn(&Path) -> bool,
) -> bool {
    let mut directories = directories.into_iter();
    directories.any(|directory| below(path, directory.as_ref()).is_some_and(&accepts))
}

/// The directory of the runtime that has a container's folder at `path`: containerd's `state`, which
/// dockerd's containerd has, too, or the storage of Podman and CRI-O.
fn runtime_directory(path: &Path) -> Option<&Path> {
    let folder = path.ancestors().skip(1).find(|folder| {
        folder.ends_with("io.containerd.runtime.v2.task") || folder.ends_with("overlay-containers")
    })?;
    folder.parent()
}

/// The kubelet mounts below these two folders of its root. All other folders contain ordinary
/// files.
const KUBELET_MOUNTS: [&str; 2] = ["pods", "plugins"];

/// True if drivers, or containers whose mounts reach the host, may mount at a path, relative to the
/// root of a kubelet or runtime. Containers mount in volumes: `pods/<uid>/volumes/...` of the
/// kubelet, `volumes/...` of Docker, `storage/volumes/...` of Podman. CSI drivers mount for the
/// whole node in `plugins`.
fn may_be_mounted_on(below_root: &Path) -> bool {
    let mut names = below_root.iter();
    let in_volumes = names.any(|name| name == VOLUMES);
    // Only the kubelet may mount on a volume that it writes, such as a configMap.
    let plugin = names.next().and_then(Plugin::from_folder);
    let is_kubelets = plugin.is_some_and(|plugin| plugin.writer == Writer::Kubelet);
    below_root.starts_with("plugins") || in_volumes && !is_kubelets
}

const VOLUMES: &str = "volumes";

/// True if a path, relative to a runtime's root, belongs to a single sandbox, container or volume.
/// Examples: `sandboxes/<id>/shm` of containerd, `containers/<id>/...` of Docker,
/// `storage/overlay-containers/<id>/...` of Podman and CRI-O, `volumes/<name>/_data`.
fn is_of_one(below_root: &Path) -> bool {
    let mut names = below_root.iter().map(OsStr::as_encoded_bytes);
    names.any(|name| {
        matches!(name, b"sandboxes" | b"containers" | b"volumes") || name.ends_with(b"-containers")
    }) && names.next().is_some()
}

#[cfg(test)]
mod source_tests {
    use super::*;

    #[test]
    fn host_root_is_the_root_or_an_ancestor_of_where_runtimes_mount() {
        let kind = |path: &str| {
            SourceKind::from_path(
                Path::new(path),
                &Places::default(),
                Scope::RuntimeDirectories,
            )
        };
        for path in [
            "/",
            "/run",
            "/run/",
            "/var/lib",
            "/var/lib/kubelet",
            "/var/lib/kubelet/pods",
            "/run/containerd",
            "/run/netns",
        ] {
            assert_eq!(kind(path), SourceKind::HostRoot, "{path}");
        }
        for path in [
            "/var/lib/kubelet/pods/u/etc-hosts",
            "/run/containerd/io.containerd.grpc.v1.cri/sandboxes/s/shm",
            "/etc",
            "/running",
        ] {
            assert_eq!(kind(path), SourceKind::Foreign, "{path}");
        }
    }

    #[test]
    fn only_a_name_in_a_kubelet_written_volume_is_in_volume() {
        let kind = |path: &str| {
            SourceKind::from_path(
                Path::new(path),
                &Places::default(),
                Scope::RuntimeDirectories,
            )
        };
        let pod = "/var/lib/kubelet/pods/u/volumes";
        assert_eq!(
            kind(&format!("{pod}/kubernetes.io~configmap/conf/app.conf")),
            SourceKind::InVolume
        );
        assert_eq!(
            kind(&format!("{pod}/kubernetes.io~configmap/conf")),
            SourceKind::Foreign
        );
        assert_eq!(
            kind(&format!("{pod}/kubernetes.io~empty-dir/cache/x")),
            SourceKind::Foreign
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_of_every_distribution_and_of_a_running_runtime() {
        let places = Places::default();
        let holds = |places: &Places, path: &str| {
            places.holds_runtime_mounts(Path::new(path), Scope::RuntimeDirectories)
        };
        for path in [
            "/run/k0s",
            "/run/k3s",
            "/var/lib/k0s/containerd",
            "/var/lib/rancher/rke2/agent/containerd",
            "/var/snap/microk8s/common/run",
            "/var/snap/microk8s/common/var/lib/containerd",
            "/var/snap/docker",
        ] {
            assert!(holds(&places, path), "{path}");
        }
        let tasks = "io.containerd.runtime.v2.task/k8s.io/c";
        let of_pod = "/var/lib/kubelet/pods/u/volumes/kubernetes.io~empty-dir/d";
        let mounts = [
            format!("/data/run/{tasks}/rootfs"),
            "/disk/storage/overlay-containers/c/userdata/shm".to_owned(),
            format!("{of_pod}/{tasks}"),
            format!("/{tasks}/rootfs"),
            format!("run/{tasks}"),
        ];
        let found = places.with_runtimes_at(mounts.iter().map(Path::new));
        let more = found.runtime_directories.len() - places.runtime_directories.len();
        assert_eq!(more, 2, "{found:?}");
        for path in ["/data/run", "/data", "/disk/storage"] {
            assert!(!holds(&places, path) && holds(&found, path), "{path}");
        }
    }
}
