//! The kubelet's folders, parsed from paths.
//!
//! ```text
//! <root>/pods/<uid>/volumes/<plugin>/<volume>                          the volume
//!                                    /FILE -> ..data/FILE              what a container sees of a payload
//!                                    /..data -> ..2026_11_21_05_10_00.123456789
//! <root>/pods/<uid>/volume-subpaths/<volume>/<container>/<index>       the bind that pins a subPath
//! ```
//!
//! Mirrors `pkg/volume/util/subpath/subpath_linux.go`, `pkg/volume/util/atomic_writer.go` and
//! `pkg/kubelet/kubelet_getters.go` of Kubernetes.

mod plugin;

use std::ffi::OsStr;
use std::fmt;
use std::path::{Component, Path, PathBuf};

use crate::paths::{below, join};

pub use crate::kubelet::plugin::{
    CSI_RECORD, CsiRecord, MountedVolume, Plugin, RequiredMount, STAGING_MOUNT, Writer,
};

// Paths below a pod's folder, parsed once for all checks.

/// `<root>/pods/<uid>/<name>...`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodPath<'p, 'r> {
    pub kubelet_root: &'r Path,
    pub pod_uid: &'p str,
    /// The names after the pod's folder.
    pub names: Vec<&'p OsStr>,
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
        let mut names = Vec::new();
        for component in below(path, kubelet_root)?.components() {
            match component {
                Component::Normal(name) => names.push(name),
                _ => return None,
            }
        }
        match names.as_slice() {
            [pods, uid, ..] if *pods == "pods" => Some(Self {
                kubelet_root,
                pod_uid: uid.to_str()?,
                names: names.split_off(2),
            }),
            _ => None,
        }
    }
}

// The path of a volume-subpath bind.

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
        let &[folder, volume, container, number] = path.names.as_slice() else {
            return None;
        };
        let number = number.to_str()?;
        let index: u32 = number.parse().ok()?;
        if folder != Self::FOLDER || index.to_string() != number {
            return None;
        }
        Some(Self {
            kubelet_root: path.kubelet_root.to_owned(),
            pod_uid: path.pod_uid.to_owned(),
            volume: volume.to_str()?.to_owned(),
            container: container.to_str()?.to_owned(),
            index,
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
        let folder = self.in_pod(["volumes", plugin.folder, &self.volume]);
        join(folder, plugin.below)
    }

    fn in_pod<'a>(&'a self, names: impl IntoIterator<Item = &'a str>) -> PathBuf {
        let mut path = self.kubelet_root.join("pods");
        path.push(&self.pod_uid);
        path.extend(names);
        path
    }

    /// True if the two subpaths belong to the same volume of the same pod.
    pub fn is_of_the_same_volume(&self, other: &Self) -> bool {
        self.volume == other.volume
            && self.pod_uid == other.pod_uid
            && self.kubelet_root == other.kubelet_root
    }

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

// AtomicWriter's names.

/// The link to the current payload; AtomicWriter's rename of the link swaps the whole payload at
/// once.
pub const DATA_LINK: &str = "..data";

/// The arrangement of the files in a volume's directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VolumeLayout {
    /// Behind `..data`, as AtomicWriter writes them: in the kubelet's own volumes, and in those of
    /// drivers that use its code for secrets, certificates and identities.
    Payload,
    /// Directly in the directory.
    Plain,
}

/// The name of a payload's directory, such as `..2026_11_21_05_10_00.123456789`.
///
/// Go's layout `..2006_01_02_15_04_05.` and then the digits that `os.MkdirTemp` appends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TimestampDirectory(String);

impl TimestampDirectory {
    const LAYOUT: &'static str = "..dddd_dd_dd_dd_dd_dd.";

    /// Parses the name of a timestamp directory; `None` for any other name.
    pub fn from_name(name: &OsStr) -> Option<Self> {
        let name = name.to_str()?;
        let (date, suffix) = name.split_at_checked(Self::LAYOUT.len())?;
        let is_date = date
            .bytes()
            .zip(Self::LAYOUT.bytes())
            .all(|(actual, wanted)| match wanted {
                b'd' => actual.is_ascii_digit(),
                _ => actual == wanted,
            });
        let is_number = !suffix.is_empty() && suffix.bytes().all(|byte| byte.is_ascii_digit());
        (is_date && is_number).then(|| Self(name.to_owned()))
    }

    pub fn name(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for TimestampDirectory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod pod_path_tests {
    use super::*;

    fn uid(path: &str) -> Option<&str> {
        PodPath::from_path(
            Path::new(path),
            ["/data/kubelet", "/var/lib/kubelet"].map(Path::new),
        )
        .map(|pod| pod.pod_uid)
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

#[cfg(test)]
mod volume_subpath_tests {
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

#[cfg(test)]
mod payload_tests {
    use super::*;

    #[test]
    fn only_atomic_writers_names_are_taken() {
        let taken = |name: &str| TimestampDirectory::from_name(OsStr::new(name)).is_some();
        assert!(taken("..2026_11_21_05_10_00.123456789"));
        assert!(taken("..2026_11_21_06_46_27.7661507"));
        for other in [
            "..data",
            "..2026_11_21_05_10_00.",
            "..2026_11_21_05_10_00.12a",
            "2026_11_21_05_10_00.1",
            "..2026-11-21_05_10_00.1",
            "",
        ] {
            assert!(!taken(other), "{other}");
        }
    }
}
