//! The programs that the kubelet needs to mount the volumes in use. If a helper is missing, the
//! kubelet reports
//! `MountVolume.SetUp failed ... wrong fs type ... need a /sbin/mount.<type> helper program`.

use std::collections::BTreeSet;

use super::{Point, PointStatus};
use crate::doctor::kernel::{LinuxDistribution, Packages};

const NAME: &str = "mount-helpers";

/// The plugins' folders, the programs that their `SetUp` runs, and the packages of the programs for
/// apt, yum, zypper, apk and pacman. Empty where a package of that name is not known for certain:
/// Alpine's ceph has its version in the name.
const HELPERS: [(&str, &str, [&str; 5]); 6] = [
    ("kubernetes.io~azure-file", "mount.cifs", ["cifs-utils"; 5]),
    ("kubernetes.io~cephfs", "mount.ceph", CEPH),
    (
        "kubernetes.io~glusterfs",
        "mount.glusterfs",
        [
            "glusterfs-client",
            "glusterfs-fuse",
            "glusterfs",
            "",
            "glusterfs",
        ],
    ),
    (
        "kubernetes.io~iscsi",
        "iscsiadm",
        [
            "open-iscsi",
            "iscsi-initiator-utils",
            "open-iscsi",
            "open-iscsi",
            "open-iscsi",
        ],
    ),
    (
        "kubernetes.io~nfs",
        "mount.nfs",
        [
            "nfs-common",
            "nfs-utils",
            "nfs-client",
            "nfs-utils",
            "nfs-utils",
        ],
    ),
    ("kubernetes.io~rbd", "rbd", CEPH),
];

const CEPH: [&str; 5] = ["ceph-common", "ceph-common", "ceph-common", "", ""];

/// The program that a plugin's volumes need.
pub fn helper_of(plugin_folder: &str) -> Option<&'static str> {
    let helper = HELPERS.iter().find(|(plugin, ..)| *plugin == plugin_folder);
    helper.map(|(_, program, _)| *program)
}

/// The point for them. `in_use`: the folders of plugins that have a volume on this node;
/// `is_there`: true if the node has a program of that name.
pub fn mount_helpers(
    in_use: &BTreeSet<String>,
    is_there: impl Fn(&str) -> bool,
    distribution: &LinuxDistribution,
) -> Point {
    let (install, column) = match distribution.packages {
        Packages::Apt => ("apt-get install", 0),
        Packages::Yum => ("yum install", 1),
        Packages::Zypper => ("zypper install", 2),
        Packages::Apk => ("apk add", 3),
        Packages::Pacman => ("pacman -S", 4),
        Packages::Image | Packages::Unknown => ("", 0),
    };
    let (mut needed, mut missing, mut packages) = (Vec::new(), Vec::new(), BTreeSet::new());
    for (plugin, program, names) in HELPERS {
        if in_use.contains(plugin) {
            needed.push(program);
            if !is_there(program) {
                missing.push(program);
                packages.insert(names[column]);
            }
        }
    }
    if needed.is_empty() {
        return Point::ok(NAME, "no volume of this node needs a mount helper");
    }
    if missing.is_empty() {
        return Point::ok(NAME, format!("{} found", needed.join(", ")));
    }
    let mut message = format!(
        "{} not found: the kubelet cannot mount volumes of this node",
        missing.join(", ")
    );
    let mut command = None;
    if distribution.packages == Packages::Image {
        message += &format!(
            "; the image of {} must bring it: no package can be added",
            distribution.name
        );
    } else if install.is_empty() || packages.contains("") {
        message += &format!("; install the package of {} that has it", distribution.name);
    } else {
        let packages = Vec::from_iter(packages).join(" ");
        command = Some(format!("{install} {packages}"));
    }
    Point {
        name: NAME,
        status: PointStatus::Failed,
        message,
        command,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(os_release: &str, plugins: &[&str], is_there: bool) -> Point {
        let in_use = plugins
            .iter()
            .map(|plugin| format!("kubernetes.io~{plugin}"))
            .collect();
        mount_helpers(
            &in_use,
            |_| is_there,
            &LinuxDistribution::from_os_release(os_release),
        )
    }

    #[test]
    fn only_roots_in_use_are_missed() {
        assert_eq!(
            of("ID=debian", &["nfs", "csi"], true).status,
            PointStatus::Ok
        );
        assert_eq!(of("ID=debian", &[], false).status, PointStatus::Ok);
        assert_eq!(
            of("ID=debian", &["nfs", "csi"], false).status,
            PointStatus::Failed
        );
    }

    #[test]
    fn the_package_is_that_of_the_nodes_distribution() {
        for (os_release, plugins, run) in [
            (
                "ID=ubuntu",
                &["nfs", "rbd", "cephfs"][..],
                "apt-get install ceph-common nfs-common",
            ),
            (
                "ID=amzn",
                &["nfs", "iscsi"],
                "yum install iscsi-initiator-utils nfs-utils",
            ),
            ("ID=sles", &["nfs"], "zypper install nfs-client"),
            ("ID=alpine", &["nfs"], "apk add nfs-utils"),
            ("ID=arch", &["azure-file"], "pacman -S cifs-utils"),
        ] {
            assert_eq!(of(os_release, plugins, false).command.as_deref(), Some(run));
        }
        for (os_release, plugin, said) in [
            (
                "ID=talos\nPRETTY_NAME=Talos",
                "nfs",
                "the image of Talos must bring it",
            ),
            (
                "ID=nixos",
                "nfs",
                "the package of this distribution that has it",
            ),
            (
                "ID=alpine\nNAME=Alpine",
                "cephfs",
                "the package of Alpine that has it",
            ),
        ] {
            let point = of(os_release, &[plugin], false);
            assert!(
                point.command.is_none() && point.message.contains(said),
                "{point:?}"
            );
        }
    }
}
