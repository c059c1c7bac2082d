//! The distribution of a node by os-release(5), and the way to install packages on it.

use std::fs;
use std::path::Path;

/// A node's distribution.
#[derive(Debug, Clone, PartialEq, Eq)]
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
const FAMILIES: [(&str, Packages); 21] = [
    ("bottlerocket", Packages::Image),
    ("talos", Packages::Image),
    ("cos", Packages::Image),
    ("flatcar", Packages::Image),
    ("rhcos", Packages::Image),
    ("ubuntu-core", Packages::Image),
    ("opensuse-microos", Packages::Image),
    ("sle-micro", Packages::Image),
    ("sl-micro", Packages::Image),
    ("debian", Packages::Apt),
    ("ubuntu", Packages::Apt),
    ("rhel", Packages::Yum),
    ("fedora", Packages::Yum),
    ("centos", Packages::Yum),
    ("rocky", Packages::Yum),
    ("amzn", Packages::Yum),
    ("sles", Packages::Zypper),
    ("suse", Packages::Zypper),
    ("opensuse", Packages::Zypper),
    ("alpine", Packages::Apk),
    ("arch", Packages::Pacman),
];

/// Variants of Fedora, CentOS and Red Hat whose file system is an image.
const IMAGES: [&str; 3] = ["coreos", "iot", "atomic"];

impl LinuxDistribution {
    /// Reads the text of os-release.
    pub fn from_os_release(text: &str) -> Self {
        let id = os_release_value(text, "ID").unwrap_or_default();
        let name = os_release_value(text, "PRETTY_NAME")
            .or_else(|| os_release_value(text, "NAME"))
            .filter(|name| !name.is_empty());
        let is_image = os_release_value(text, "VARIANT_ID")
            .is_some_and(|variant| IMAGES.contains(&variant.as_str()));
        let like = os_release_value(text, "ID_LIKE").unwrap_or_default();
        let mut ids = [id.as_str()].into_iter().chain(like.split_whitespace());
        let family = ids.find_map(|id| FAMILIES.iter().find(|(known, _)| *known == id));
        let packages = family.map_or(Packages::Unknown, |(_, packages)| *packages);
        Self {
            name: name.unwrap_or_else(|| "this distribution".to_owned()),
            packages: if is_image { Packages::Image } else { packages },
        }
    }

    /// The command that installs packages.
    pub fn install(&self) -> Option<&'static str> {
        match self.packages {
            Packages::Apt => Some("apt-get install"),
            Packages::Yum => Some("yum install"),
            Packages::Zypper => Some("zypper install"),
            Packages::Apk => Some("apk add"),
            Packages::Pacman => Some("pacman -S"),
            Packages::Image | Packages::Unknown => None,
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

#[cfg(test)]
mod tests {
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
