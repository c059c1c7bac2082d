//! The kubelet's folders, parsed from paths, and its volume plugins: volume paths, writers and
//! required mounts.
//!
//! ```text
//! <root>/pods/<uid>/volumes/<plugin>/<volume>                          the volume
//!                                    /FILE -> ..data/FILE              what a container sees of a payload
//!                                    /..data -> ..2026_11_21_05_10_00.123456789
//! <root>/pods/<uid>/volume-subpaths/<volume>/<container>/<index>       the bind that pins a subPath
//! ```
//!
//! Mirrors `pkg/volume/util/subpath/subpath_linux.go`, `pkg/volume/util/atomic_writer.go` and
//! `pkg/kubelet/kubelet_getters.go` of Kubernetes. Each plugin of the table follows its `GetPath`
//! and `SetUp` in `pkg/volume`: the volumes' path and the filesystem that the plugin mounts, if any.
//! Secret, projected and downwardAPI volumes wrap an emptyDir of medium Memory
//! (`wrappedVolumeSpec`); a configMap is on the kubelet's disk. An emptyDir requires no mount: no
//! file records its medium.

use std::ffi::OsStr;
use std::fmt;
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;

use crate::mount_table::FsType;
use crate::text::{below, join};

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
        let mut roots = kubelet_roots.into_iter();
        roots.find_map(|root| Self::below(root, path))
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

/// The writer of a volume's content, which decides how far a path in the volume can be trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Writer {
    /// The kubelet alone, through AtomicWriter.
    Kubelet,
    /// The pod's containers: any name in the volume may be a trap.
    Containers,
}

/// A plugin whose volumes the guard understands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plugin {
    /// The plugin's folder below `volumes`, such as `kubernetes.io~configmap`; for a flexVolume its
    /// kind.
    pub folder: &'static str,
    /// The part of a volume's folder that the containers get: `mount` for CSI, otherwise the whole
    /// folder.
    pub below: &'static str,
    /// The writer of the plugin's volumes.
    pub writer: Writer,
    /// The mount that the plugin's volumes require, if any.
    pub(crate) mount: Option<RequiredMount>,
}

/// The mount that a plugin's volumes require.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequiredMount {
    /// The filesystems that the plugin mounts; an empty list means any.
    fs_types: &'static [&'static str],
    /// The usual cause of a missing mount.
    pub(crate) usual_cause: &'static str,
}

impl Plugin {
    /// A `hostPath`, or a claim that is bound to a `hostPath`: the pod has no folder for the volume.
    pub const HOST_PATH: Self = plugin("kubernetes.io~host-path", Writer::Containers, None);

    /// Volumes that a CSI driver mounts.
    pub const CSI: Self = Self {
        below: "mount",
        ..mounted("kubernetes.io~csi", &[], CSI)
    };

    /// All plugins with their own folder in a pod's `volumes`.
    pub fn all() -> impl Iterator<Item = Self> {
        PLUGINS.iter().copied()
    }

    /// The plugins with nearly all uses of a subPath.
    pub fn usual() -> impl Iterator<Item = Self> {
        Self::all().take(USUAL)
    }

    /// The plugin with this folder. A flexVolume's folder is named after its driver,
    /// `vendor~driver`.
    pub fn from_folder(folder: &OsStr) -> Option<Self> {
        if let Some(plugin) = PLUGINS.iter().find(|plugin| folder == plugin.folder) {
            return Some(*plugin);
        }
        let folder = folder.to_str()?;
        let is_drivers = folder.contains('~') && !folder.starts_with("kubernetes.io~");
        is_drivers.then_some(FLEX_VOLUME)
    }

    /// The layout of the plugin's volumes as far as the plugin decides it. A container or a driver
    /// may still use the kubelet's layout.
    pub fn layout(self) -> VolumeLayout {
        match self.writer {
            Writer::Kubelet => VolumeLayout::Payload,
            Writer::Containers => VolumeLayout::Plain,
        }
    }

    /// The mount of a volume that was a tmpfs: an emptyDir of medium Memory, or a tmpfs that a driver
    /// of a flexVolume mounted.
    pub(crate) fn memory(self) -> RequiredMount {
        match self == FLEX_VOLUME {
            true => FLEX_MEMORY,
            false => MEMORY,
        }
    }

    /// True if the plugin's volumes can be mount points. A flexVolume's driver may mount, but need
    /// not.
    pub fn may_mount(self) -> bool {
        self.mount.is_some() || self == FLEX_VOLUME
    }
}

/// The number of usual plugins, the first in the table.
const USUAL: usize = 6;

impl RequiredMount {
    /// True if the plugin can have made a mount of this filesystem.
    pub fn may_be(self, fs_type: &FsType) -> bool {
        self.fs_types.is_empty() || self.fs_types.contains(&fs_type.0.as_str())
    }
}

impl fmt::Display for Plugin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.folder)
    }
}

const BLOCK: &str = "the device was not attached, or MountVolume failed: see the pod's events";
const NODE_MOUNT: &str =
    "the filesystem's mount program is missing on the node, or its server could not be reached";
const NFS: &str = "mount.nfs is missing on the node (bindguard doctor names its package), or the server could not be reached";
const CSI: &str =
    "the CSI driver restarted and its FUSE daemon with it, or NodePublishVolume failed";

/// The kubelet's mount for the medium Memory.
const MEMORY: RequiredMount = RequiredMount {
    fs_types: &["tmpfs"],
    usual_cause: "something unmounted it: the kubelet always puts it on a tmpfs",
};

/// The tmpfs that a driver of a flexVolume mounted.
const FLEX_MEMORY: RequiredMount = RequiredMount {
    fs_types: &["tmpfs"],
    usual_cause: "its driver unmounted it",
};

/// A volume of a driver outside of the kubelet and of CSI: `vendor~driver/<volume>`.
const FLEX_VOLUME: Plugin = plugin("flexVolume", Writer::Containers, None);

/// Sorted by how often a subPath is used with them.
const PLUGINS: &[Plugin] = &[
    plugin("kubernetes.io~configmap", Writer::Kubelet, None),
    plugin("kubernetes.io~secret", Writer::Kubelet, Some(MEMORY)),
    plugin("kubernetes.io~projected", Writer::Kubelet, Some(MEMORY)),
    plugin("kubernetes.io~downward-api", Writer::Kubelet, Some(MEMORY)),
    plugin("kubernetes.io~empty-dir", Writer::Containers, None),
    Plugin::CSI,
    mounted("kubernetes.io~nfs", &["nfs", "nfs4"], NFS),
    block("kubernetes.io~local-volume"),
    block("kubernetes.io~aws-ebs"),
    block("kubernetes.io~azure-disk"),
    mounted(
        "kubernetes.io~azure-file",
        &["cifs", "nfs", "nfs4", "smb3"],
        NODE_MOUNT,
    ),
    mounted(
        "kubernetes.io~cephfs",
        &["ceph", "fuse.ceph", "fuse.ceph-fuse"],
        NODE_MOUNT,
    ),
    block("kubernetes.io~cinder"),
    block("kubernetes.io~fc"),
    block("kubernetes.io~gce-pd"),
    mounted("kubernetes.io~glusterfs", &["fuse.glusterfs"], NODE_MOUNT),
    block("kubernetes.io~iscsi"),
    block("kubernetes.io~rbd"),
    block("kubernetes.io~vsphere-volume"),
    // Plugins of earlier Kubernetes versions.
    block("kubernetes.io~flocker"),
    block("kubernetes.io~photon-pd"),
    block("kubernetes.io~portworx-volume"),
    mounted("kubernetes.io~quobyte", &[], NODE_MOUNT),
    block("kubernetes.io~scaleio"),
    block("kubernetes.io~storageos"),
    plugin("kubernetes.io~git-repo", Writer::Containers, None),
];

const fn plugin(folder: &'static str, writer: Writer, mount: Option<RequiredMount>) -> Plugin {
    Plugin {
        folder,
        below: "",
        writer,
        mount,
    }
}

const fn block(folder: &'static str) -> Plugin {
    mounted(folder, &[], BLOCK)
}

const fn mounted(
    folder: &'static str,
    fs_types: &'static [&'static str],
    usual_cause: &'static str,
) -> Plugin {
    let mount = RequiredMount {
        fs_types,
        usual_cause,
    };
    plugin(folder, Writer::Containers, Some(mount))
}

// Volumes that require a mount: without a mount, their directory is an empty folder on the node's
// own disk.
//
// A container that starts on such a directory writes to the node instead of its volume. The error
// stays hidden until the data is missed (kubernetes#109955).

/// `<root>/pods/<uid>/volumes/<plugin>/<volume>`, of a plugin that always mounts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountedVolume {
    pub(crate) mount_point: PathBuf,
    pub(crate) pod_uid: String,
    pub plugin: Plugin,
    /// The mount that must exist at the mount point.
    pub(crate) required: RequiredMount,
    pub(crate) volume: String,
}

impl MountedVolume {
    /// Parses the path of such a volume, or a path within the volume; `None` for other paths.
    pub fn from_path<'a>(
        path: &Path,
        kubelet_roots: impl IntoIterator<Item = &'a Path>,
    ) -> Option<Self> {
        Self::from_pod_path(&PodPath::from_path(path, kubelet_roots)?)
    }

    /// The volume that is, or contains, a pod's path.
    pub fn from_pod_path(path: &PodPath<'_, '_>) -> Option<Self> {
        let &[volumes, folder, volume, ref rest @ ..] = path.names.as_slice() else {
            return None;
        };
        let plugin = Plugin::from_folder(folder)?;
        let in_mount =
            plugin.below.is_empty() || rest.first().is_some_and(|it| *it == plugin.below);
        if volumes != "volumes" || !in_mount {
            return None;
        }
        let mut mount_point = path.kubelet_root.join("pods");
        mount_point.extend([path.pod_uid.as_ref(), volumes, folder, volume]);
        Some(Self {
            mount_point: join(mount_point, plugin.below),
            pod_uid: path.pod_uid.to_owned(),
            plugin,
            required: plugin.mount?,
            volume: volume.to_str()?.to_owned(),
        })
    }

    /// The volume of the same pod whose path begins with `to` instead of `from`.
    pub fn moved(&self, from: &Path, to: &Path) -> Option<Self> {
        let below = self.mount_point.strip_prefix(from).ok()?;
        Some(Self {
            mount_point: to.join(below),
            ..self.clone()
        })
    }

    pub fn mount_point(&self) -> &Path {
        &self.mount_point
    }
}

impl fmt::Display for MountedVolume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "volume {} ({}) of pod {}",
            self.volume, self.plugin, self.pod_uid
        )
    }
}

// The kubelet's record of a CSI volume, `vol_data.json` in the folder of the volume and of its
// staging mount.
//
// Mirrors `pkg/volume/csi/csi_mounter.go` (`SetUpAt`) and `csi_attacher.go` (`MountDevice`).

/// The folder of all staging folders, below a kubelet's root.
const STAGING: &str = "plugins/kubernetes.io/csi";

/// The mount in a staging folder.
pub const STAGING_MOUNT: &str = "globalmount";

/// The name of the record.
pub const CSI_RECORD: &str = "vol_data.json";

/// The kubelet's record of a CSI volume.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CsiRecord {
    driver_name: Option<String>,
    volume_handle: Option<String>,
    #[serde(rename = "specVolID")]
    spec_volume: Option<String>,
    volume_lifecycle_mode: Option<String>,
}

impl CsiRecord {
    /// Parses the record; `None` if the text is no record.
    pub fn from_json(json: &[u8]) -> Option<Self> {
        serde_json::from_slice(json).ok()
    }

    /// True for the record of the same volume. A record without the driver's handle is of no volume.
    pub fn is_of_volume(&self, other: &Self) -> bool {
        self.driver_name.is_some()
            && self.volume_handle.is_some()
            && self.driver_name == other.driver_name
            && self.volume_handle == other.volume_handle
    }

    /// The folder with the staging folders of the volume's driver, below a kubelet's root. The name
    /// of a staging folder is a hash of the volume's handle.
    pub fn staging_folders(&self, kubelet_root: &Path) -> Option<PathBuf> {
        let driver = file_name(self.driver_name.as_deref()?)?;
        Some(kubelet_root.join(STAGING).join(driver))
    }

    /// The staging mount that kubelets before 1.24 made.
    pub fn old_staging_mount(&self, kubelet_root: &Path) -> Option<PathBuf> {
        let volume = file_name(self.spec_volume.as_deref()?)?;
        let mut mount = kubelet_root.join(STAGING);
        mount.extend(["pv", volume, STAGING_MOUNT]);
        Some(mount)
    }

    /// True for a volume in the pod's own spec, which only this pod has.
    pub fn is_inline(&self) -> bool {
        self.volume_lifecycle_mode.as_deref() == Some("Ephemeral")
    }
}

/// A text that is a single name of a path.
fn file_name(text: &str) -> Option<&str> {
    let mut parts = Path::new(text).components();
    let is_name = matches!(parts.next(), Some(Component::Normal(_))) && parts.next().is_none();
    is_name.then_some(text)
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

#[cfg(test)]
mod mounted_volume_tests {
    use super::*;

    fn taken(path: &str) -> Option<MountedVolume> {
        MountedVolume::from_path(Path::new(path), [Path::new("/var/lib/kubelet")])
    }

    #[test]
    fn a_volume_and_its_files_are_parsed() {
        let pod = "/var/lib/kubelet/pods/u-1/volumes";
        for path in [
            format!("{pod}/kubernetes.io~nfs/data"),
            format!("{pod}/kubernetes.io~nfs/data/deep/er"),
        ] {
            assert_eq!(
                taken(&path).unwrap().mount_point(),
                Path::new(&format!("{pod}/kubernetes.io~nfs/data"))
            );
        }
        let csi = taken(&format!("{pod}/kubernetes.io~csi/pvc-1/mount")).unwrap();
        assert_eq!(
            csi.mount_point(),
            Path::new(&format!("{pod}/kubernetes.io~csi/pvc-1/mount"))
        );
        assert_eq!(
            csi.to_string(),
            "volume pvc-1 (kubernetes.io~csi) of pod u-1"
        );
    }

    #[test]
    fn volumes_that_need_no_mount_are_not_taken() {
        let pod = "/var/lib/kubelet/pods/u-1/volumes";
        for path in [
            "kubernetes.io~configmap/conf",
            "kubernetes.io~empty-dir/cache",
            "vendor~flex/x",
            "kubernetes.io~csi/pvc-1",
        ] {
            assert_eq!(taken(&format!("{pod}/{path}")), None, "{path}");
        }
    }
}

#[cfg(test)]
mod csi_volume_tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use super::*;

    #[test]
    fn staging_is_below_the_kubelets_root() {
        let of = |driver: &str, volume: &str| {
            let json =
                format!(r#"{{"driverName":"{driver}","volumeHandle":"h","specVolID":"{volume}"}}"#);
            CsiRecord::from_json(json.as_bytes()).unwrap()
        };
        let root = Path::new("/k");
        let record = of("blob.csi.azure.com", "pv-1");
        let driver = root.join("plugins/kubernetes.io/csi/blob.csi.azure.com");
        assert_eq!(record.staging_folders(root), Some(driver));
        let old = root.join("plugins/kubernetes.io/csi/pv/pv-1/globalmount");
        assert_eq!(record.old_staging_mount(root), Some(old));
        for name in ["..", "a/b", "/etc", ""] {
            let record = of(name, name);
            assert_eq!(record.staging_folders(root), None, "{name}");
            assert_eq!(record.old_staging_mount(root), None, "{name}");
        }
        assert!(record.is_of_volume(&of("blob.csi.azure.com", "pv-2")));
        assert!(!record.is_of_volume(&of("other", "pv-1")));
        let empty = CsiRecord::from_json(b"{}").unwrap();
        assert!(!empty.is_of_volume(&empty));
    }

    #[test]
    fn only_a_volume_in_the_spec_of_its_pod_is_inline() {
        for (json, is_inline) in [
            (
                r#"{"driverName":"secrets-store.csi.k8s.io","volumeLifecycleMode":"Ephemeral"}"#,
                Some(true),
            ),
            (
                r#"{"driverName":"d","volumeLifecycleMode":"Persistent"}"#,
                Some(false),
            ),
            (r#"{"driverName":"d"}"#, Some(false)),
            ("{", None),
        ] {
            let record = CsiRecord::from_json(json.as_bytes());
            assert_eq!(record.map(|it| it.is_inline()), is_inline, "{json}");
        }
    }
}
