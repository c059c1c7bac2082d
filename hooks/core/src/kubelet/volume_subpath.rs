//! The path of a volume-subpath bind.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use super::plugin::Plugin;
use super::pod_path::PodPath;
use crate::paths::join;

/// Capacity for nearly every path of a pod.
const USUAL_PATH: usize = 200;

/// `<root>/pods/<uid>/volume-subpaths/<volume>/<container>/<index>`, parsed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeSubpath {
    kubelet_root: PathBuf,
    pod_uid: String,
    volume: String,
    container: String,
    index: u32,
}

impl VolumeSubpath {
    const FOLDER: &'static str = "volume-subpaths";

    /// Parses a path below a kubelet's root; `None` if the path is not a subpath's.
    pub fn from_path<'a>(
        path: &Path,
        kubelet_roots: impl IntoIterator<Item = &'a Path>,
    ) -> Option<Self> {
        Self::from_pod_path(&PodPath::from_path(path, kubelet_roots)?)
    }

    /// Parses a pod's path; `None` if it is not the path of a subpath bind. An index with a sign or
    /// leading zeros is invalid, because the kubelet writes no such index.
    pub fn from_pod_path(path: &PodPath<'_, '_>) -> Option<Self> {
        let &[folder, volume, container, index] = path.names() else {
            return None;
        };
        let owned = |name: &OsStr| name.to_str().map(str::to_owned);
        (folder == Self::FOLDER).then_some(())?;
        Some(Self {
            kubelet_root: path.kubelet_root().to_owned(),
            pod_uid: path.pod_uid().to_owned(),
            volume: owned(volume)?,
            container: owned(container)?,
            index: index
                .to_str()?
                .parse()
                .ok()
                .filter(|number: &u32| index == number.to_string().as_str())?,
        })
    }

    /// The parsed path, without `.` and doubled slashes.
    pub fn path(&self) -> PathBuf {
        self.in_pod([
            Self::FOLDER,
            &self.volume,
            &self.container,
            &self.index.to_string(),
        ])
    }

    /// The path of this subpath below the given kubelet root.
    pub fn at_root(&self, kubelet_root: &Path) -> Self {
        Self {
            kubelet_root: kubelet_root.to_owned(),
            ..self.clone()
        }
    }

    /// `<root>/pods/<uid>`
    pub fn pod_directory(&self) -> PathBuf {
        self.in_pod([])
    }

    /// The path of the volume if it belongs to `plugin`.
    pub fn volume_directory(&self, plugin: Plugin) -> PathBuf {
        let folder = self.in_pod(["volumes", plugin.folder(), &self.volume]);
        join(folder, plugin.below())
    }

    fn in_pod<'a>(&'a self, names: impl IntoIterator<Item = &'a str>) -> PathBuf {
        let mut path = PathBuf::with_capacity(USUAL_PATH);
        path.push(&self.kubelet_root);
        path.extend(["pods", &self.pod_uid].into_iter().chain(names));
        path
    }

    /// True if the two subpaths belong to the same volume of the same pod.
    pub fn is_of_the_same_volume(&self, other: &Self) -> bool {
        self.volume == other.volume
            && self.pod_uid == other.pod_uid
            && self.kubelet_root == other.kubelet_root
    }

    /// The pod's uid.
    pub fn pod_uid(&self) -> &str {
        &self.pod_uid
    }

    /// The volume's name in the pod, or the volume's own name for a claim.
    pub fn volume(&self) -> &str {
        &self.volume
    }

    /// The container's name in the pod.
    pub fn container(&self) -> &str {
        &self.container
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(path: &str) -> Option<VolumeSubpath> {
        VolumeSubpath::from_path(
            Path::new(path),
            [Path::new("/data/kubelet"), Path::new("/var/lib/kubelet")],
        )
    }

    #[test]
    fn a_subpath_is_parsed_and_formatted() {
        let subpath = taken("/var/lib/kubelet/pods/u-1/volume-subpaths/conf/app/12").unwrap();
        assert_eq!(
            (subpath.pod_uid(), subpath.volume(), subpath.container()),
            ("u-1", "conf", "app")
        );
        assert_eq!(
            subpath.path(),
            Path::new("/var/lib/kubelet/pods/u-1/volume-subpaths/conf/app/12")
        );
        assert_eq!(
            subpath.volume_directory(Plugin::from_folder("kubernetes.io~secret".as_ref()).unwrap()),
            Path::new("/var/lib/kubelet/pods/u-1/volumes/kubernetes.io~secret/conf")
        );
    }

    #[test]
    fn other_paths_are_refused() {
        for path in [
            "/var/lib/kubelet/pods/u/volume-subpaths/conf/app",
            "/var/lib/kubelet/pods/u/volume-subpaths/conf/app/0/more",
            "/var/lib/kubelet/pods/u/volume-subpaths/conf/app/zero",
            "/var/lib/kubelet/pods/u/volume-subpaths/conf/../0",
            "/elsewhere/pods/u/volume-subpaths/conf/app/0",
            "/var/lib/kubelet/pods/u/volumes/conf/app/0",
        ] {
            assert_eq!(taken(path), None, "{path}");
        }
    }
}
