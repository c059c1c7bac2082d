//! The programs that the kubelet needs to mount the volumes in use. If a helper is missing, the
//! kubelet reports
//! `MountVolume.SetUp failed ... wrong fs type ... need a /sbin/mount.<type> helper program`.

use std::collections::BTreeSet;

use super::{Point, PointStatus};
use crate::doctor::kernel::{LinuxDistribution, Packages};

const NAME: &str = "mount-helpers";

/// A program that the `SetUp` of a plugin runs, and its packages.
struct Helper {
    plugin_folder: &'static str,
    program: &'static str,
    apt: &'static str,
    yum: &'static str,
    zypper: &'static str,
    /// None where a package of that name is not known for certain: Alpine's ceph has its version in
    /// the name.
    apk: Option<&'static str>,
    pacman: Option<&'static str>,
}

const HELPERS: [Helper; 6] = [
    Helper {
        plugin_folder: "kubernetes.io~azure-file",
        program: "mount.cifs",
        apt: "cifs-utils",
        yum: "cifs-utils",
        zypper: "cifs-utils",
        apk: Some("cifs-utils"),
        pacman: Some("cifs-utils"),
    },
    Helper {
        plugin_folder: "kubernetes.io~cephfs",
        program: "mount.ceph",
        apt: "ceph-common",
        yum: "ceph-common",
        zypper: "ceph-common",
        apk: None,
        pacman: None,
    },
    Helper {
        plugin_folder: "kubernetes.io~glusterfs",
        program: "mount.glusterfs",
        apt: "glusterfs-client",
        yum: "glusterfs-fuse",
        zypper: "glusterfs",
        apk: None,
        pacman: Some("glusterfs"),
    },
    Helper {
        plugin_folder: "kubernetes.io~iscsi",
        program: "iscsiadm",
        apt: "open-iscsi",
        yum: "iscsi-initiator-utils",
        zypper: "open-iscsi",
        apk: Some("open-iscsi"),
        pacman: Some("open-iscsi"),
    },
    Helper {
        plugin_folder: "kubernetes.io~nfs",
        program: "mount.nfs",
        apt: "nfs-common",
        yum: "nfs-utils",
        zypper: "nfs-client",
        apk: Some("nfs-utils"),
        pacman: Some("nfs-utils"),
    },
    Helper {
        plugin_folder: "kubernetes.io~rbd",
        program: "rbd",
        apt: "ceph-common",
        yum: "ceph-common",
        zypper: "ceph-common",
        apk: None,
        pacman: None,
    },
];

impl Helper {
    fn package(&self, packages: Packages) -> Option<&'static str> {
        match packages {
            Packages::Apt => Some(self.apt),
            Packages::Yum => Some(self.yum),
            Packages::Zypper => Some(self.zypper),
            Packages::Apk => self.apk,
            Packages::Pacman => self.pacman,
            Packages::Image | Packages::Unknown => None,
        }
    }
}

/// The program that a plugin's volumes need.
pub fn helper_of(plugin_folder: &str) -> Option<&'static str> {
    HELPERS
        .iter()
        .find(|helper| helper.plugin_folder == plugin_folder)
        .map(|helper| helper.program)
}

/// The point for them. `in_use`: the folders of plugins that have a volume on this node;
/// `is_there`: true if the node has a program of that name.
pub fn mount_helpers(
    in_use: &BTreeSet<String>,
    is_there: impl Fn(&str) -> bool,
    distribution: &LinuxDistribution,
) -> Point {
    let needed: Vec<&Helper> = HELPERS
        .iter()
        .filter(|helper| in_use.contains(helper.plugin_folder))
        .collect();
    let missing: Vec<&Helper> = needed
        .iter()
        .copied()
        .filter(|helper| !is_there(helper.program))
        .collect();
    if needed.is_empty() {
        return Point::ok(NAME, "no volume of this node needs a mount helper");
    }
    if missing.is_empty() {
        return Point::ok(NAME, format!("{} found", programs(&needed)));
    }
    let packages: Option<BTreeSet<&str>> = missing
        .iter()
        .map(|helper| helper.package(distribution.packages))
        .collect();
    let run = distribution
        .install()
        .zip(packages)
        .map(|(install, packages)| {
            let packages: Vec<&str> = packages.into_iter().collect();
            format!("{install} {}", packages.join(" "))
        });
    let programs = programs(&missing);
    let rest = match (&run, distribution.packages) {
        (Some(_), _) => String::new(),
        (None, Packages::Image) => {
            format!(
                "; the image of {} must bring it: no package can be added",
                distribution.name
            )
        }
        (None, _) => format!("; install the package of {} that has it", distribution.name),
    };
    let message =
        format!("{programs} not found: the kubelet cannot mount volumes of this node{rest}");
    Point {
        name: NAME,
        status: PointStatus::Failed,
        message,
        command: run,
    }
}

fn programs(helpers: &[&Helper]) -> String {
    helpers
        .iter()
        .map(|helper| helper.program)
        .collect::<Vec<_>>()
        .join(", ")
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
