//! Volume plugins by the names of their folders, and who writes into their volumes.

use std::ffi::OsStr;
use std::fmt;
use std::path::Path;

/// Who may change what is in a volume. It decides how far a path in it can be trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Writer {
    /// The kubelet alone, through AtomicWriter.
    Kubelet,
    /// The pod's containers: any name in it may be a trap.
    Containers,
}

/// A plugin whose volumes the guard understands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plugin {
    /// `kubernetes.io~configmap`
    ConfigMap,
    /// `kubernetes.io~secret`, a tmpfs
    Secret,
    /// `kubernetes.io~projected`, a tmpfs when it holds a token or a secret
    Projected,
    /// `kubernetes.io~downward-api`, a tmpfs
    DownwardApi,
    /// `kubernetes.io~empty-dir`, a tmpfs with medium Memory
    EmptyDir,
}

impl Plugin {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::ConfigMap, Self::Secret, Self::Projected, Self::DownwardApi, Self::EmptyDir];

    /// The folder below `volumes` that its volumes are in.
    pub fn folder(self) -> &'static str {
        match self {
            Self::ConfigMap => "kubernetes.io~configmap",
            Self::Secret => "kubernetes.io~secret",
            Self::Projected => "kubernetes.io~projected",
            Self::DownwardApi => "kubernetes.io~downward-api",
            Self::EmptyDir => "kubernetes.io~empty-dir",
        }
    }

    /// Whether `path` is `<root>/pods/<uid>/volumes/<plugin>/<volume>/<name>...` of a kubelet-written volume.
    pub fn holds_payload_path<'a>(path: &Path, kubelet_roots: impl IntoIterator<Item = &'a Path>) -> bool {
        let below = |root: &Path| {
            let names: Vec<&OsStr> = path.strip_prefix(root).ok()?.iter().collect();
            let [pods, _uid, volumes, folder, _volume, _name, ..] = names[..] else { return None };
            let plugin = Self::ALL.into_iter().find(|plugin| folder == plugin.folder())?;
            Some(pods == "pods" && volumes == "volumes" && plugin.writer() == Writer::Kubelet)
        };
        kubelet_roots.into_iter().any(|root| below(root) == Some(true))
    }

    /// Who writes into its volumes.
    pub fn writer(self) -> Writer {
        match self {
            Self::ConfigMap | Self::Secret | Self::Projected | Self::DownwardApi => Writer::Kubelet,
            Self::EmptyDir => Writer::Containers,
        }
    }
}

impl fmt::Display for Plugin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.folder())
    }
}
