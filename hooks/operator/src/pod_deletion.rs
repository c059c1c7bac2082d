//! The command that deletes a pod, unless the deletion would erase files of the host, and the mounts
//! of the host whose files would be erased.
//!
//! The kubelet removes an emptyDir, and each volume that wraps an emptyDir, with all files below.
//! The removal goes on through a mount of the host in the volume: kubernetes#129550, #115054.

use std::path::{Path, PathBuf};

use bindguard_core::identity::PodName;
use bindguard_core::kubelet::PodPath;
use bindguard_core::mount_table::MountTable;
use bindguard_core::places::Places;
use bindguard_core::text::{serialize_path, shell_word};
use serde::Serialize;

use crate::pods::Pods;

/// The folders of the plugins whose volumes the kubelet removes with all files.
const REMOVED: [&str; 6] = [
    "kubernetes.io~empty-dir",
    "kubernetes.io~configmap",
    "kubernetes.io~secret",
    "kubernetes.io~projected",
    "kubernetes.io~downward-api",
    "kubernetes.io~git-repo",
];

/// A mount of the host below a volume that the kubelet removes with its pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MountInVolume {
    pub pod: PodName,
    #[serde(serialize_with = "serialize_path")]
    pub mount_point: PathBuf,
    /// The type of its filesystem.
    pub fs_type: String,
    /// True if the kubelet can remove the files below the mount point.
    pub erased: bool,
    /// The command that saves the files.
    pub command: String,
}

impl MountInVolume {
    /// The effect on a deletion of the pod.
    pub fn effect(&self) -> &'static str {
        if self.erased {
            "the kubelet removes all files below this mount when the pod is deleted (kubernetes#129550), and the pod stays Terminating: unmount it before"
        } else {
            "the pod stays Terminating when it is deleted, until this is unmounted"
        }
    }
}

/// The commands that delete a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Deletion {
    /// The pod's names are not known.
    Unnamed,
    /// `kubectl delete pod`
    Command(String),
    /// These mounts of the host are in volumes of the pod: the deletion would erase their files.
    Erases(Vec<PathBuf>),
}

impl Deletion {
    /// The deletion of a pod on the node with this mount table.
    pub(crate) fn of(pod: &PodName, own: &MountTable, places: &Places) -> Self {
        let mut mounts = Vec::new();
        for entry in own.entries() {
            let uid = removed_volume(&entry.mount_point, places).map(|(uid, _)| uid);
            if uid.is_some() && uid == pod.uid.as_deref() {
                mounts.push(entry.mount_point.clone());
            }
        }
        if !mounts.is_empty() {
            // the innermost first, as they can be unmounted
            mounts.reverse();
            return Self::Erases(mounts);
        }
        match pod.names() {
            Some((namespace, name)) => {
                Self::Command(format!("kubectl -n {namespace} delete pod {name}"))
            }
            None => Self::Unnamed,
        }
    }
}

/// The mounts of the host below volumes that the kubelet removes with their pods, the innermost
/// first.
pub fn mounts_in_volumes(table: &MountTable, pods: &Pods, places: &Places) -> Vec<MountInVolume> {
    let mut found = Vec::new();
    for entry in table.entries().iter().rev() {
        let path = &entry.mount_point;
        let Some((uid, volume)) = removed_volume(path, places) else {
            continue;
        };
        // Of an emptyDir in memory the kubelet only unmounts the tmpfs, which is then busy.
        let is_mount = table.entries().iter().any(|it| it.mount_point == volume);
        found.push(MountInVolume {
            pod: pods.of_uid(uid),
            mount_point: path.clone(),
            fs_type: entry.fs_type.0.clone(),
            erased: !is_mount && !entry.is_read_only(),
            command: format!("umount {}", shell_word(path)),
        });
    }
    found
}

/// The pod's uid and the volume's folder, for a path strictly below a volume that the kubelet removes
/// with all files.
pub(crate) fn removed_volume<'p>(path: &'p Path, places: &Places) -> Option<(&'p str, &'p Path)> {
    let pod = PodPath::from_path(path, places.kubelet_roots())?;
    match pod.names.as_slice() {
        [volumes, plugin, _, below @ ..]
            if *volumes == "volumes" && REMOVED.iter().any(|removed| plugin == removed) =>
        {
            let volume = path.ancestors().nth(below.len())?;
            (!below.is_empty()).then_some((pod.pod_uid, volume))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn deletion(mount_point: &str) -> Deletion {
        let line = format!("1 0 8:1 / / rw - ext4 a rw\n2 1 8:2 / {mount_point} rw - ext4 b rw\n");
        let own = MountTable::from_mountinfo(line.as_bytes()).unwrap();
        let pod = PodName {
            namespace: Some("shop".to_owned()),
            name: Some("web".to_owned()),
            ..PodName::of_uid("u-1")
        };
        Deletion::of(&pod, &own, &Places::default())
    }

    #[test]
    fn a_pod_is_not_deleted_with_a_mount_of_the_host_in_its_empty_dir() {
        const PODS: &str = "/var/lib/kubelet/pods";
        for place in [
            "kubernetes.io~empty-dir/scratch/disk",
            "kubernetes.io~configmap/c/a/b",
        ] {
            let place = format!("{PODS}/u-1/volumes/{place}");
            assert_eq!(
                deletion(&place),
                Deletion::Erases(vec![place.clone().into()])
            );
        }
        for place in [
            // a tmpfs of medium Memory is the volume itself
            "u-1/volumes/kubernetes.io~empty-dir/scratch",
            "u-2/volumes/kubernetes.io~empty-dir/scratch/disk",
            "u-1/volumes/kubernetes.io~csi/pvc/mount",
            "u-1/volume-subpaths/scratch/app/0",
        ] {
            let command = "kubectl -n shop delete pod web".to_owned();
            assert_eq!(
                deletion(&format!("{PODS}/{place}")),
                Deletion::Command(command),
                "{place}"
            );
        }
    }
    #[test]
    fn files_stay_below_a_tmpfs_of_the_kubelet_and_in_a_read_only_mount() {
        const ED: &str = "/var/lib/kubelet/pods/u-1/volumes/kubernetes.io~empty-dir";
        let text = format!(
            "1 0 8:1 / / rw - ext4 a rw\n2 1 0:9 / {ED}/mem rw - tmpfs tmpfs rw\n3 2 8:2 / {ED}/mem/a rw - ext4 b rw\n\
             4 1 8:2 / {ED}/disk/b ro - ext4 b rw\n5 1 8:2 / {ED}/disk/c rw - ext4 b rw\n"
        );
        let table = MountTable::from_mountinfo(text.as_bytes()).unwrap();
        let found = mounts_in_volumes(&table, &Pods::default(), &Places::default());
        let found: Vec<_> = found
            .iter()
            .map(|it| (it.command.as_str(), it.erased))
            .collect();
        let command = |place: &str| format!("umount {ED}/{place}");
        let expected = [("disk/c", true), ("disk/b", false), ("mem/a", false)];
        let expected = expected.map(|(place, erased)| (command(place), erased));
        let expected = expected.iter().map(|(place, erased)| (&**place, *erased));
        assert_eq!(found, Vec::from_iter(expected));
    }
}
