//! The programs that the kubelet needs to mount the volumes in use: without one, `MountVolume.SetUp failed ... wrong fs
//! type ... need a /sbin/mount.<type> helper program`.

use std::collections::BTreeSet;

use super::Point;

const NAME: &str = "mount-helpers";

/// A plugin's folder, the program that its `SetUp` runs, and Debian's package of it.
const HELPERS: [(&str, &str, &str); 6] = [
    ("kubernetes.io~azure-file", "mount.cifs", "cifs-utils"),
    ("kubernetes.io~cephfs", "mount.ceph", "ceph-common"),
    ("kubernetes.io~glusterfs", "mount.glusterfs", "glusterfs-client"),
    ("kubernetes.io~iscsi", "iscsiadm", "open-iscsi"),
    ("kubernetes.io~nfs", "mount.nfs", "nfs-common"),
    ("kubernetes.io~rbd", "rbd", "ceph-common"),
];

/// The program that a plugin's volumes need.
pub fn helper_of(plugin_folder: &str) -> Option<&'static str> {
    HELPERS.iter().find(|(folder, _, _)| *folder == plugin_folder).map(|(_, helper, _)| *helper)
}

/// The point on them. `in_use`: the folders of plugins that have a volume on this node; `is_there`: whether the node has a
/// program of that name.
pub fn mount_helpers(in_use: &BTreeSet<String>, is_there: impl Fn(&str) -> bool) -> Point {
    let needed: Vec<_> = HELPERS.iter().filter(|(folder, _, _)| in_use.contains(*folder)).collect();
    let missing: Vec<_> = needed.iter().filter(|(_, helper, _)| !is_there(helper)).collect();
    let names = |helpers: &[&str]| helpers.join(", ");
    if missing.is_empty() {
        let helpers: Vec<&str> = needed.iter().map(|(_, helper, _)| *helper).collect();
        let none = "no volume here needs one".to_owned();
        return Point::good(NAME, if helpers.is_empty() { none } else { format!("{} found", names(&helpers)) });
    }
    let (helpers, packages): (Vec<&str>, BTreeSet<&str>) =
        missing.iter().map(|(_, helper, package)| (*helper, *package)).unzip();
    let packages: Vec<&str> = packages.into_iter().collect();
    let told = format!("{} not found, and volumes here need it: they cannot be mounted", names(&helpers));
    Point::bad(NAME, told, format!("apt-get install {}", packages.join(" ")))
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    #[test]
    fn only_what_is_in_use_is_missed() {
        let in_use = BTreeSet::from(["kubernetes.io~nfs".to_owned(), "kubernetes.io~csi".to_owned()]);
        assert_eq!(mount_helpers(&in_use, |_| true).state, State::Good);
        assert_eq!(mount_helpers(&in_use, |_| false).run.as_deref(), Some("apt-get install nfs-common"));
        assert_eq!(mount_helpers(&BTreeSet::new(), |_| false).state, State::Good);
    }
}
