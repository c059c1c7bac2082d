//! Mounts of the host below a pod's emptyDir: the kubelet removes the files that they show when the
//! pod is deleted (kubernetes#129550, #115054).

use bindguard_core::mount_table::MountTable;
use bindguard_core::places::Places;
use bindguard_core::policy::BelowEmptyDirs;
use bindguard_core::text::shell_word;

use super::Point;
use crate::pod_deletion::is_in_removed_volume;

const NAME: &str = "mounts-below-emptydir";

/// The point for them.
pub fn below_emptydirs(table: &MountTable, places: &Places, policy: BelowEmptyDirs) -> Point {
    if policy == BelowEmptyDirs::Off {
        return Point::ok(NAME, "not checked: mounts-below-emptydir is off");
    }
    let mut found = Vec::new();
    for mount in table.entries() {
        if is_in_removed_volume(&mount.mount_point, places) {
            found.push(&mount.mount_point);
        }
    }
    // The innermost can be unmounted first.
    let Some(last) = found.last() else {
        if let Some(skipped) = table.skipped() {
            return Point::unknown(NAME, skipped.to_string());
        }
        return Point::ok(NAME, "nothing is mounted below an emptyDir");
    };
    let (count, last_shown) = (found.len(), last.display());
    if policy == BelowEmptyDirs::Detach {
        let message = format!("{count} mounts below volumes of pods go with their pods");
        return Point::ok(NAME, message);
    }
    let message = format!(
        "{count} mounts are below volumes of pods, such as {last_shown}: the kubelet removes the files that they show when the pod is deleted; unmount them before"
    );
    Point::failed(NAME, message, format!("umount {}", shell_word(last)))
}

#[cfg(test)]
mod tests {
    use super::super::PointStatus;
    use super::*;

    #[test]
    fn a_mount_below_an_emptydir_is_reported_with_its_umount() {
        const ED: &str = "/var/lib/kubelet/pods/u-1/volumes/kubernetes.io~empty-dir/work";
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
