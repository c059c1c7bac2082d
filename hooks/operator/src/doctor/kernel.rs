//! The node below bindguard: the features and faults of its kernel, its distribution, and the
//! programs that mount its volumes.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use bindguard_sys::{KernelFeatures, release_numbers};

use super::{Check, PointStatus};

/// The point for the kernel. `kubelet_is_shared`: the mount of the kubelet's folders is shared,
/// which re-binds on older kernels require, or why that is not known.
pub fn kernel(features: &KernelFeatures, kubelet_is_shared: Result<bool, String>) -> Check {
    let release = &features.release;
    if let Err(old) = &features.required_calls {
        let message = format!("{old}; containers are created as they are");
        return Check::failed(message, "uname -r");
    }
    let swap = match (features.beneath, kubelet_is_shared) {
        (true, _) => "mounts are swapped beneath",
        (false, Err(why)) => return Check::unknown(why),
        (false, Ok(true)) => "mounts are swapped by propagation (before 6.5)",
        (false, Ok(false)) => {
            let message = format!(
                "Linux {release} cannot mount beneath, and the mount of the kubelet's folders is private: no re-bind; specs are \
                 pointed at volumes instead"
            );
            return Check::failed(message, "mount --make-rshared /");
        }
    };
    let look = match features.statmount {
        true => "statmount",
        false => "the mount table (before 6.8)",
    };
    let fixes = mount_fixes(release);
    Check::ok(format!("Linux {release}: {swap}, read by {look}; {fixes}"))
}

// Faults of Linux in the calls that re-binds and refreshes make, and the versions with their fixes.
//
// The versions are those of Debian's kernel changelogs (6.12.117-1 and 7.2.13-1, November 2026).

/// The faults, the first version with each (`(0, 0)`: all that the table knows), and the first
/// version of each series that has the fix.
type Fault = (&'static str, (u32, u32), &'static [(u32, u32, u32)]);

const FAULTS: [Fault; 5] = [
    (
        "a mount that propagates beneath a locked mount takes its lock (CVE-2026-98976)",
        (7, 1),
        &[(7, 2, 11)],
    ),
    (
        "a busy mount is unmounted silently (CVE-2026-98996)",
        (0, 0),
        &[(6, 12, 117), (7, 2, 11)],
    ),
    (
        "mount_setattr walks a mount that was unmounted",
        (0, 0),
        &[(6, 12, 115), (7, 2, 11)],
    ),
    (
        "an unmounted tree of mounts can be copied",
        (0, 0),
        &[(6, 12, 113), (7, 2, 11)],
    ),
    (
        "a mount that a copy leaves out takes over a lock",
        (0, 0),
        &[(7, 2, 13)],
    ),
];

/// Which fixes the kernel has. `release`: as `uname -r` prints it. A vendor's kernel may have a fix
/// under an older number, so nothing is called missing there.
pub fn mount_fixes(release: &str) -> String {
    let (mut missing, mut unknown) = (Vec::new(), 0);
    let (numbers, suffix) = release_numbers(release);
    // A patch level of 0 is a release of upstream, or a vendor's kernel with fixes of its own.
    let (major, minor, patch) = match numbers.as_slice() {
        &[major, minor, patch] if patch > 0 => (major, minor, patch),
        _ => return "which fixes of 2026 for mounts it has is unknown".to_owned(),
    };
    let is_upstreams = suffix.is_empty() || suffix.starts_with("+deb");
    for (what, since, fixed) in FAULTS {
        let series = (major, minor);
        match fixed.iter().find(|fix| (fix.0, fix.1) == series) {
            _ if series < since => {}
            Some(fix) if patch >= fix.2 => {}
            Some(_) if is_upstreams => missing.push(what),
            _ => unknown += 1,
        }
    }
    let mut text = format!(
        "fixes of 2026 for mounts (docs/security.md): {} of {}",
        FAULTS.len() - missing.len() - unknown,
        FAULTS.len()
    );
    if unknown > 0 {
        text += &format!(", {unknown} unknown");
    }
    if !missing.is_empty() {
        text += &format!("; not fixed: {}", missing.join("; "));
    }
    text
}

// OCI runtimes that are known to mount something else than the spec says.
//
// bindguard compares the mounts of each new container, so a fault that is not in this list is
// found, too.

/// The known fault of a runtime on this kernel. `version`: the first line of the runtime's
/// `--version`; `kernel`: the release, such as `6.12.9-amd64`.
pub fn known_fault(version: &str, kernel: &str) -> Option<&'static str> {
    let (numbers, _) = release_numbers(version.strip_prefix("crun version ")?);
    match numbers[..] {
        // 1.27.1 repairs the fault: NEWS of crun.
        [1, 27] | [1, 27, 0, ..] => Some(
            "crun 1.27 takes mounts out of their peer groups, so that unmounts of the host do not reach containers \
             (containers/podman#28592); install 1.27.1 or newer",
        ),
        [1, 29, ..] if release_numbers(kernel).0 >= vec![7, 0] => Some(
            "crun 1.29 on Linux 7.0 or newer can bind its own root in place of the host's (containers/crun#2262); \
             install another version",
        ),
        _ => None,
    }
}

// The distribution of a node by os-release(5), and the way to install packages on it.

#[derive(Debug)]
pub struct LinuxDistribution {
    /// Its name for people: `Rocky Linux 9.4 (Blue Onyx)`.
    pub name: String,
    /// The way to install packages on it.
    pub packages: Packages,
}

/// The way to install packages on a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packages {
    /// Debian, Ubuntu and their relatives.
    Apt,
    /// Red Hat, Fedora, CentOS, Rocky, Amazon and their relatives. All have `yum`, not all have
    /// `dnf`.
    Yum,
    /// SUSE.
    Zypper,
    /// Alpine.
    Apk,
    /// Arch.
    Pacman,
    /// The node's file system is an image, and the image must contain missing programs.
    Image,
    /// A distribution that is not known here.
    Unknown,
}

/// By `ID`, then by the words of `ID_LIKE`.
const FAMILIES: [(Packages, &[&str]); 6] = [
    (
        Packages::Image,
        &[
            "bottlerocket",
            "talos",
            "cos",
            "flatcar",
            "rhcos",
            "ubuntu-core",
            "opensuse-microos",
            "sle-micro",
            "sl-micro",
        ],
    ),
    (Packages::Apt, &["debian", "ubuntu"]),
    (
        Packages::Yum,
        &["rhel", "fedora", "centos", "rocky", "amzn"],
    ),
    (Packages::Zypper, &["sles", "suse", "opensuse"]),
    (Packages::Apk, &["alpine"]),
    (Packages::Pacman, &["arch"]),
];

/// The commands that install packages, in the order of [`Packages`].
const INSTALL: [&str; 5] = [
    "apt-get install",
    "yum install",
    "zypper install",
    "apk add",
    "pacman -S",
];

/// Variants of Fedora, CentOS and Red Hat whose file system is an image.
const IMAGES: [&str; 3] = ["coreos", "iot", "atomic"];

impl LinuxDistribution {
    /// Reads the text of os-release.
    pub fn from_os_release(text: &str) -> Self {
        let value = |name: &str| os_release_value(text, name);
        let name = value("PRETTY_NAME").or_else(|| value("NAME"));
        let name = name.filter(|name| !name.is_empty());
        let is_image = value("VARIANT_ID").is_some_and(|it| IMAGES.contains(&it.as_str()));
        let ids = [value("ID"), value("ID_LIKE")].map(Option::unwrap_or_default);
        let mut ids = [ids[0].as_str()]
            .into_iter()
            .chain(ids[1].split_whitespace());
        let family = ids.find_map(|id| FAMILIES.iter().find(|(_, known)| known.contains(&id)));
        let packages = family.map_or(Packages::Unknown, |(packages, _)| *packages);
        Self {
            name: name.unwrap_or_else(|| "this distribution".to_owned()),
            packages: if is_image { Packages::Image } else { packages },
        }
    }
}

/// The text of os-release on a node whose `/` is at `root`. The second file is for a node whose
/// `/etc` is empty.
pub fn os_release(root: &Path) -> String {
    ["etc/os-release", "usr/lib/os-release"]
        .iter()
        .find_map(|file| fs::read_to_string(root.join(file)).ok())
        .unwrap_or_default()
}

/// The value of a variable, without its quotes. None of the values that are read here has an
/// escape.
pub fn os_release_value(text: &str, name: &str) -> Option<String> {
    let mut values = text
        .lines()
        .filter_map(|line| line.trim().strip_prefix(name)?.strip_prefix('='));
    values
        .next_back()
        .map(|value| value.trim_matches(['"', '\'']).to_owned())
}

// The programs that the kubelet needs to mount the volumes in use. If a helper is missing, the
// kubelet reports
// `MountVolume.SetUp failed ... wrong fs type ... need a /sbin/mount.<type> helper program`.

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

/// The point for them. `in_use`: the folders of plugins that have a volume on this node;
/// `is_there`: true if the node has a program of that name.
pub fn mount_helpers(
    in_use: &BTreeSet<String>,
    is_there: impl Fn(&str) -> bool,
    distribution: &LinuxDistribution,
) -> Check {
    let column = distribution.packages as usize;
    let install = INSTALL.get(column);
    let (mut needed, mut missing, mut packages) = (Vec::new(), Vec::new(), BTreeSet::new());
    for (plugin, program, names) in HELPERS {
        if in_use.contains(plugin) {
            needed.push(program);
            if !is_there(program) {
                missing.push(program);
                packages.extend(names.get(column).copied());
            }
        }
    }
    if needed.is_empty() {
        return Check::ok("no volume of this node needs a mount helper");
    }
    if missing.is_empty() {
        return Check::ok(format!("{} found", needed.join(", ")));
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
    } else if let Some(install) = install.filter(|_| !packages.contains("")) {
        let packages = Vec::from_iter(packages).join(" ");
        command = Some(format!("{install} {packages}"));
    } else {
        message += &format!("; install the package of {} that has it", distribution.name);
    }
    Check {
        status: PointStatus::Failed,
        message,
        command,
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use bindguard_sys::kernel_features;
    use bindguard_testing::deny_call;
    use nix::errno::Errno;
    use nix::libc;

    use super::super::PointStatus;
    use super::*;

    fn features(beneath: bool) -> KernelFeatures {
        KernelFeatures {
            release: "6.1".to_owned(),
            required_calls: Ok(()),
            beneath,
            statmount: beneath,
        }
    }

    /// Older than all kernels on which the tests run: seccomp(2) answers in its stead.
    #[test]
    fn a_kernel_without_a_required_call_is_no_kernel_for_repairs() {
        let features = || {
            deny_call(libc::SYS_mount_setattr, Errno::ENOSYS);
            kernel_features()
        };
        let old = thread::spawn(features).join().unwrap();
        let point = kernel(&old, Ok(true));
        assert_eq!(point.status, PointStatus::Failed);
        assert!(point.message.contains("Linux 5.14"), "{}", point.message);
    }

    #[test]
    fn an_older_kernel_needs_a_shared_mount() {
        assert_eq!(kernel(&features(true), Ok(false)).status, PointStatus::Ok);
        assert_eq!(kernel(&features(false), Ok(true)).status, PointStatus::Ok);
        assert_eq!(
            kernel(&features(false), Err("why".to_owned())).status,
            PointStatus::Unknown
        );
        assert_eq!(
            kernel(&features(false), Ok(false)).command.as_deref(),
            Some("mount --make-rshared /")
        );
    }
}

#[cfg(test)]
mod kernel_fixes_tests {
    use super::*;

    #[test]
    fn only_upstreams_numbers_tell_that_a_fix_is_missing() {
        for (release, has) in [
            ("7.2.13", ": 5 of 5"),
            ("7.2.13-talos", ": 5 of 5"),
            ("7.2.11", ": 4 of 5; not fixed: a mount that a copy"),
            (
                "7.2.10+deb14-amd64",
                ": 0 of 5; not fixed: a mount that propagates",
            ),
            ("7.2.10-talos", ": 0 of 5, 5 unknown"),
            (
                "6.12.114+deb13-cloud-amd64",
                ": 2 of 5, 1 unknown; not fixed: a busy mount",
            ),
            ("6.12.117+deb13-amd64", ": 4 of 5, 1 unknown"),
            ("6.12.0-55.el10_0.x86_64", "is unknown"),
            ("6.8.0-31-generic", "is unknown"),
            ("6.1.176", ": 1 of 5, 4 unknown"),
            ("7.3.0-rc7", "is unknown"),
            ("", "is unknown"),
        ] {
            let said = mount_fixes(release);
            assert!(said.contains(has), "{release}: {said}");
        }
    }
}

#[cfg(test)]
mod runtime_faults_tests {
    use super::*;

    #[test]
    fn a_fault_is_known_by_version_and_kernel() {
        for (version, kernel, is_faulty) in [
            ("crun version 1.27", "6.1.0", true),
            ("crun version 1.27.0", "6.1.0", true),
            ("crun version 1.27.1", "6.1.0", false),
            ("crun version 1.28", "7.2.0", false),
            ("crun version 1.29", "7.0-rc3", true),
            ("crun version 1.29.1", "8.1.0", true),
            ("crun version 1.29", "6.18.5", false),
            ("runc version 1.29", "7.0.0", false),
            ("crun version UNKNOWN", "7.0.0", false),
            ("", "", false),
        ] {
            let found = known_fault(version, kernel);
            assert_eq!(found.is_some(), is_faulty, "{version:?} on {kernel:?}");
        }
    }
}

#[cfg(test)]
mod distribution_tests {
    use super::*;

    #[test]
    fn a_distribution_is_known_by_its_id_or_by_a_relative() {
        for (text, packages) in [
            (
                "PRETTY_NAME=\"Debian GNU/Linux 12 (bookworm)\"\nID=debian\n",
                Packages::Apt,
            ),
            ("ID=linuxmint\nID_LIKE=\"ubuntu debian\"\n", Packages::Apt),
            ("ID=\"amzn\"\nID_LIKE=\"fedora\"\n", Packages::Yum),
            (
                "ID='almalinux'\nID_LIKE=\"rhel centos fedora\"\n",
                Packages::Yum,
            ),
            (
                "ID=\"opensuse-leap\"\nID_LIKE=\"suse opensuse\"\n",
                Packages::Zypper,
            ),
            (
                "ID=\"opensuse-microos\"\nID_LIKE=\"suse opensuse\"\n",
                Packages::Image,
            ),
            ("ID=alpine\n", Packages::Apk),
            ("ID=arch\n", Packages::Pacman),
            ("ID=flatcar\nID_LIKE=coreos\n", Packages::Image),
            ("ID=cos\n", Packages::Image),
            ("ID=fedora\nVARIANT_ID=coreos\n", Packages::Image),
            ("ID=fedora\nVARIANT_ID=server\n", Packages::Yum),
            ("ID=nixos\n", Packages::Unknown),
            ("", Packages::Unknown),
        ] {
            assert_eq!(
                LinuxDistribution::from_os_release(text).packages,
                packages,
                "{text}"
            );
        }
        let named = LinuxDistribution::from_os_release(
            "NAME=\"Talos\"\nID=talos\nPRETTY_NAME=\"Talos (v1.8.0)\"\n",
        );
        assert_eq!(named.name, "Talos (v1.8.0)");
    }
}

#[cfg(test)]
mod helper_tests {
    use super::*;

    fn of(os_release: &str, plugins: &[&str], is_there: bool) -> Check {
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
