//! The kind of a bind's source, derived from its path.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::kubelet::{MountedVolume, Plugin, PodPath, VolumeSubpath, Writer};
use crate::places::Places;
use crate::policy::Scope;

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

#[cfg(test)]
mod tests {
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
