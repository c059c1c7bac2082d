//! Paths below a pod's folder, parsed once for all checks.

use std::ffi::OsStr;
use std::path::{Component, Path};

use crate::paths::below;

/// `<root>/pods/<uid>/<name>...`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodPath<'p, 'r> {
    kubelet_root: &'r Path,
    pod_uid: &'p str,
    names: Vec<&'p OsStr>,
}

impl<'p, 'r> PodPath<'p, 'r> {
    /// Parses a path below a kubelet's root; `None` if it is no pod's. A path with `..` also gives
    /// `None`: the kubelet writes none, and only a walk shows where it leads.
    pub fn from_path(
        path: &'p Path,
        kubelet_roots: impl IntoIterator<Item = &'r Path>,
    ) -> Option<Self> {
        kubelet_roots
            .into_iter()
            .find_map(|root| Self::below(root, path))
    }

    /// True if a path looks like a path below a pod's folder, regardless of the root.
    pub fn may_be_one(path: &Path) -> bool {
        let mut names = path.components().map(Component::as_os_str);
        names.any(|name| name == "pods")
            && names
                .nth(1)
                .is_some_and(|name| name == "volumes" || name == "volume-subpaths")
    }

    fn below(kubelet_root: &'r Path, path: &'p Path) -> Option<Self> {
        let mut names = below(path, kubelet_root)?.components().map(name);
        names.next().flatten().filter(|name| *name == "pods")?;
        let pod_uid = names.next().flatten()?.to_str()?;
        Some(Self {
            kubelet_root,
            pod_uid,
            names: names.collect::<Option<_>>()?,
        })
    }

    /// The kubelet's root.
    pub fn kubelet_root(&self) -> &'r Path {
        self.kubelet_root
    }

    /// The pod's uid.
    pub fn pod_uid(&self) -> &'p str {
        self.pod_uid
    }

    /// The names after the pod's folder.
    pub fn names(&self) -> &[&'p OsStr] {
        &self.names
    }
}

fn name(component: Component<'_>) -> Option<&OsStr> {
    match component {
        Component::Normal(name) => Some(name),
        Component::Prefix(_) | Component::RootDir | Component::CurDir | Component::ParentDir => {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uid(path: &str) -> Option<&str> {
        PodPath::from_path(
            Path::new(path),
            ["/data/kubelet", "/var/lib/kubelet"].map(Path::new),
        )
        .map(|pod| pod.pod_uid())
    }

    #[test]
    fn a_pods_paths_are_those_below_its_folder() {
        for path in [
            "",
            "/",
            "/volumes/kubernetes.io~secret/token",
            "//etc-hosts/.",
        ] {
            assert_eq!(
                uid(&format!("/var/lib/kubelet/pods/u-1{path}")),
                Some("u-1"),
                "{path}"
            );
        }
        for path in [
            "/var/lib/kubelet/pods",
            "/var/lib/kubelet/plugins/u-1",
            "/var/lib/kubelet/pods/u-1/../u-2",
            "/var/lib/kubelet/pods/../u-1",
            "/elsewhere/pods/u-1",
        ] {
            assert_eq!(uid(path), None, "{path}");
        }
    }
}
