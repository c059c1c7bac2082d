//! Mounts of the host below a pod's emptyDir: the kubelet removes the files that they show when the
//! pod is deleted (kubernetes#129550, #115054).

use bindguard_core::mount_table::MountTable;
use bindguard_core::places::Places;
use bindguard_core::policy::BelowEmptyDirs;

use super::Point;
use crate::pod_deletion::mounts_in_volumes;
use crate::pods::Pods;

const NAME: &str = "mounts-below-emptydir";

/// The point for them.
pub fn below_emptydirs(table: &MountTable, places: &Places, policy: BelowEmptyDirs) -> Point {
    if policy == BelowEmptyDirs::Off {
        return Point::ok(NAME, "not checked: mounts-below-emptydir is off");
    }
    let found = mounts_in_volumes(table, &Pods::default(), places);
    let Some(first) = found.first() else {
        if let Some(skipped) = table.skipped() {
            return Point::unknown(NAME, skipped.to_string());
        }
        return Point::ok(NAME, "nothing is mounted below an emptyDir");
    };
    let count = found.len();
    if policy == BelowEmptyDirs::Detach {
        let message = format!(
            "{count} mounts below volumes of pods; bindguard's shim unmounts those below emptyDirs with their pods"
        );
        return Point::ok(NAME, message);
    }
    let shown = first.mount_point.display();
    let message = format!(
        "{count} mounts are below volumes of pods, such as {shown}: {}",
        first.effect()
    );
    Point::failed(NAME, message, first.command.clone())
}

#[cfg(test)]
mod tests {
    use super::super::PointStatus;
    use super::*;

    #[test]
    fn a_mount_below_an_emptydir_is_reported_with_its_umount() {
        const ED: &str = "/var/lib/kubelet/pods/u-1/volumes/kubernetes.io~empty-dir/scratch";
        let point = |mount_point: &str, policy| {
            let text =
                format!("1 0 8:1 / / rw - ext4 a rw\n2 1 8:2 / {mount_point} rw - ext4 b rw\n");
            let table = MountTable::from_mountinfo(text.as_bytes()).unwrap();
            below_emptydirs(&table, &Places::default(), policy)
        };
        let found = point(&format!("{ED}/disk"), BelowEmptyDirs::Report);
        assert_eq!(found.status, PointStatus::Failed);
        assert_eq!(found.command, Some(format!("umount {ED}/disk")));
        // medium Memory
        let own = point(ED, BelowEmptyDirs::Report);
        assert_eq!(own.status, PointStatus::Ok);
        for policy in [BelowEmptyDirs::Off, BelowEmptyDirs::Detach] {
            let quiet = point(&format!("{ED}/disk"), policy);
            assert_eq!(quiet.status, PointStatus::Ok);
        }
    }
}
