//! The command that deletes a pod, unless the deletion would erase files of the host.
//!
//! The kubelet removes an emptyDir, and each volume that wraps an emptyDir, with all files below.
//! The removal goes on through a mount of the host in the volume: kubernetes#129550, #115054.

use std::path::{Path, PathBuf};

use bindguard_core::identity::PodName;
use bindguard_core::mount_table::MountTable;
use bindguard_core::paths::below;
use bindguard_core::places::Places;

/// The folders of the plugins whose volumes the kubelet removes with all files.
const REMOVED: [&str; 6] = [
    "kubernetes.io~empty-dir",
    "kubernetes.io~configmap",
    "kubernetes.io~secret",
    "kubernetes.io~projected",
    "kubernetes.io~downward-api",
    "kubernetes.io~git-repo",
];

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
        if let Some(uid) = &pod.uid {
            for root in places.kubelet_roots() {
                let volumes = root.join("pods").join(uid).join("volumes");
                let entries = own.entries().iter().map(|entry| &entry.mount_point);
                mounts.extend(entries.filter(|it| is_below_removed(it, &volumes)).cloned());
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

/// True for a path in a volume that the kubelet removes with all files, of any pod.
pub(crate) fn is_in_removed_volume(path: &Path, places: &Places) -> bool {
    places.kubelet_roots().any(|root| {
        let Some(in_pods) = below(path, &root.join("pods")) else {
            return false;
        };
        let Some(uid) = in_pods.iter().next() else {
            return false;
        };
        is_below_removed(path, &root.join("pods").join(uid).join("volumes"))
    })
}

/// True for a path strictly below a volume's own folder.
fn is_below_removed(path: &Path, volumes: &Path) -> bool {
    let Some(below) = below(path, volumes) else {
        return false;
    };
    let mut names = below.iter();
    let plugin = names.next();
    plugin.is_some_and(|plugin| REMOVED.iter().any(|removed| plugin == *removed))
        && names.nth(1).is_some()
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
            "kubernetes.io~empty-dir/work/disk",
            "kubernetes.io~configmap/c/a/b",
        ] {
            let place = format!("{PODS}/u-1/volumes/{place}");
            assert_eq!(
                deletion(&place),
                Deletion::Erases(vec![place.clone().into()])
            );
            assert!(is_in_removed_volume(place.as_ref(), &Places::default()));
        }
        for place in [
            // a tmpfs of medium Memory is the volume itself
            "u-1/volumes/kubernetes.io~empty-dir/work",
            "u-2/volumes/kubernetes.io~empty-dir/work/disk",
            "u-1/volumes/kubernetes.io~csi/pvc/mount",
            "u-1/volume-subpaths/work/app/0",
        ] {
            let command = "kubectl -n shop delete pod web".to_owned();
            assert_eq!(
                deletion(&format!("{PODS}/{place}")),
                Deletion::Command(command),
                "{place}"
            );
        }
    }
}
