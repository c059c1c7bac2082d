//! Volumes that require a mount: without a mount, their directory is an empty folder on the node's
//! own disk.
//!
//! A container that starts on such a directory writes to the node instead of its volume. The error
//! stays hidden until the data is missed (kubernetes#109955).

use std::fmt;
use std::path::{Path, PathBuf};

use super::plugin::{Plugin, RequiredMount, Writer};
use super::pod_path::PodPath;
use super::volume_subpath::VolumeSubpath;
use crate::paths::join;

/// `<root>/pods/<uid>/volumes/<plugin>/<volume>`, of a plugin that always mounts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountedVolume {
    mount_point: PathBuf,
    pod_uid: String,
    plugin: Plugin,
    required: RequiredMount,
    volume: String,
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
        let &[volumes, folder, volume, ref rest @ ..] = path.names() else {
            return None;
        };
        let plugin = Plugin::from_folder(folder)?;
        let required = plugin.required_mount()?;
        let in_mount =
            plugin.below().is_empty() || rest.first().is_some_and(|first| *first == plugin.below());
        if volumes != "volumes" || !in_mount {
            return None;
        }
        let mut mount_point = path.kubelet_root().join("pods");
        mount_point.extend([path.pod_uid().as_ref(), volumes, folder, volume]);
        let mount_point = join(mount_point, plugin.below());
        let pod_uid = path.pod_uid().to_owned();
        Some(Self {
            mount_point,
            pod_uid,
            plugin,
            required,
            volume: volume.to_str()?.to_owned(),
        })
    }

    /// The volume of a subpath, if it belongs to `plugin` and that plugin mounts.
    pub fn of_subpath(subpath: &VolumeSubpath, plugin: Plugin) -> Option<Self> {
        Some(Self {
            mount_point: subpath.volume_directory(plugin),
            pod_uid: subpath.pod_uid().to_owned(),
            plugin,
            required: plugin.required_mount()?,
            volume: subpath.volume().to_owned(),
        })
    }

    /// The volume of a subpath that shows a former tmpfs: an emptyDir of medium Memory, or a tmpfs
    /// that a driver mounted.
    pub fn of_memory(subpath: &VolumeSubpath, plugin: Plugin, directory: &Path) -> Self {
        Self {
            mount_point: directory.to_owned(),
            pod_uid: subpath.pod_uid().to_owned(),
            plugin,
            required: plugin.required_tmpfs(),
            volume: subpath.volume().to_owned(),
        }
    }

    /// The volume of the same pod whose path begins with `to` instead of `from`.
    pub fn moved(&self, from: &Path, to: &Path) -> Option<Self> {
        let below = self.mount_point.strip_prefix(from).ok()?;
        Some(Self {
            mount_point: to.join(below),
            ..self.clone()
        })
    }

    /// The plugin's folder, such as `kubernetes.io~nfs`.
    pub fn plugin_folder(&self) -> &'static str {
        self.plugin.folder()
    }

    /// The writer of the volume's content.
    pub fn writer(&self) -> Writer {
        self.plugin.writer()
    }

    /// The required mount point.
    pub fn mount_point(&self) -> &Path {
        &self.mount_point
    }

    /// The mount that must exist at the mount point.
    pub fn required_mount(&self) -> RequiredMount {
        self.required
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

#[cfg(test)]
mod tests {
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
