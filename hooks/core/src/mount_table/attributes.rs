//! The attributes of a mount that deny access or set how access times are kept: mount_setattr(2).
//!
//! Each mount of a filesystem has its own attributes. mountinfo names them in words, statmount(2)
//! by the bits of `MOUNT_ATTR_*`.

use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;

use serde::{Deserialize, Serialize};

/// The attributes of a mount. Serialized as bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MountAttributes(u64);

/// `MOUNT_ATTR_*` of the kernel's `include/uapi/linux/mount.h`, and its name in mountinfo.
const WORDS: [(&[u8], u64); 8] = [
    (b"ro", READ_ONLY),
    (b"nosuid", NOSUID),
    (b"nodev", NODEV),
    (b"noexec", NOEXEC),
    (b"noatime", NOATIME),
    (b"nodiratime", NODIRATIME),
    (b"idmapped", IDMAPPED),
    (b"nosymfollow", NOSYMFOLLOW),
];

const READ_ONLY: u64 = 0x1;
const NOSUID: u64 = 0x2;
const NODEV: u64 = 0x4;
const NOEXEC: u64 = 0x8;
const NOATIME: u64 = 0x10;
const STRICTATIME: u64 = 0x20;
const NODIRATIME: u64 = 0x80;
const IDMAPPED: u64 = 0x10_0000;
const NOSYMFOLLOW: u64 = 0x20_0000;

impl MountAttributes {
    /// Read-only, nosuid, nodev, noexec and nosymfollow: each attribute takes a permission from the
    /// users of the mount.
    const DENYING: u64 = READ_ONLY | NOSUID | NODEV | NOEXEC | NOSYMFOLLOW;

    /// `MOUNT_ATTR__ATIME` and `MOUNT_ATTR_NODIRATIME`: how access times are kept.
    pub const ACCESS_TIMES: u64 = 0x70 | NODIRATIME;

    /// Reads the bits of statmount(2), without the bits that this version does not know.
    pub fn from_bits(bits: u64) -> Self {
        Self(bits & (Self::DENYING | Self::ACCESS_TIMES | IDMAPPED))
    }

    /// Reads mountinfo's options. Without an option for access times, access times are kept
    /// strictly.
    pub fn from_options(options: &OsStr) -> Self {
        let words = || options.as_bytes().split(|byte| *byte == b',');
        let known = words().filter_map(|word| WORDS.iter().find(|(name, _)| *name == word));
        let bits = known.fold(0, |bits, (_, bit)| bits | bit);
        let is_strict = bits & NOATIME == 0 && !words().any(|word| word == b"relatime");
        Self(bits | if is_strict { STRICTATIME } else { 0 })
    }

    /// The bits for mount_setattr(2). An idmapping cannot be set by a bit alone and is not
    /// included.
    pub fn bits(self) -> u64 {
        self.0 & !IDMAPPED
    }

    /// True if nothing can be written through the mount.
    pub fn is_read_only(self) -> bool {
        self.0 & READ_ONLY != 0
    }

    /// True if the mount maps the owners of the filesystem's files. Only a copy of the mount shows
    /// the same owners.
    pub fn is_idmapped(self) -> bool {
        self.0 & IDMAPPED != 0
    }

    /// The permissions that mount options of a spec deny. Of `ro` and `rw` and their kin, the last
    /// option applies; `rro` denies writes in any order.
    pub fn denied_by_spec<'a>(options: impl IntoIterator<Item = &'a str>) -> Self {
        let (mut bits, mut recursive) = (0, 0);
        for option in options {
            match option {
                "ro" => bits |= READ_ONLY,
                "rw" => bits &= !READ_ONLY,
                "nosuid" => bits |= NOSUID,
                "suid" => bits &= !NOSUID,
                "nodev" => bits |= NODEV,
                "dev" => bits &= !NODEV,
                "noexec" => bits |= NOEXEC,
                "exec" => bits &= !NOEXEC,
                "rro" => recursive |= READ_ONLY,
                _ => {}
            }
        }
        Self(bits | recursive)
    }

    /// True for an option of [`MountAttributes::denied_by_spec`] that concerns the bind alone.
    pub fn is_flag_of_spec(option: &str) -> bool {
        let option = option.strip_prefix("no").unwrap_or(option);
        matches!(option, "ro" | "rw" | "suid" | "dev" | "exec")
    }

    /// The permissions that mount options of a spec deny on the mounts below the bind, too: `rro`
    /// and its kin, which runtimes pass to mount_setattr(2).
    pub fn denied_below_by_spec<'a>(options: impl IntoIterator<Item = &'a str>) -> Self {
        let bit_of = |option| match option {
            "rro" => READ_ONLY,
            "rnosuid" => NOSUID,
            "rnodev" => NODEV,
            "rnoexec" => NOEXEC,
            "rnosymfollow" => NOSYMFOLLOW,
            _ => 0,
        };
        Self(
            options
                .into_iter()
                .map(bit_of)
                .fold(0, |all, bit| all | bit),
        )
    }

    /// The permissions that `self` denies and `other` does not.
    #[must_use]
    pub fn denied_only_here(self, other: Self) -> Self {
        Self(self.0 & !other.0 & Self::DENYING)
    }

    /// True without any attribute.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// nosuid, nodev and noexec, if `self` does not deny them.
    #[must_use]
    pub fn allowed(self) -> Self {
        Self((NOSUID | NODEV | NOEXEC) & !self.0)
    }

    /// The number of permissions that `self` denies and `other` does not.
    pub fn denied_beyond(self, other: Self) -> u32 {
        self.denied_only_here(other).0.count_ones()
    }

    /// The same attributes, and the denials of `other`.
    #[must_use]
    pub fn with_denied_by(self, other: Self) -> Self {
        Self(self.0 | other.0 & Self::DENYING)
    }
}

/// Prints the words of mountinfo, without the words for access times that mountinfo omits.
impl fmt::Display for MountAttributes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = WORDS.iter().filter(|(_, bit)| self.0 & bit != 0);
        let words: Vec<_> = named
            .map(|(word, _)| String::from_utf8_lossy(word))
            .collect();
        f.write_str(&words.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_and_bits_say_the_same() {
        for (words, bits) in [
            ("rw,relatime", 0),
            ("rw", 0x20),
            ("ro,ro,relatime", 0x1),
            ("ro,nosuid,nodev,noexec,noatime,nodiratime", 0x9f),
            ("rw,nosuid,relatime,nosymfollow,idmapped", 0x30_0002),
        ] {
            assert_eq!(
                MountAttributes::from_options(words.as_ref()),
                MountAttributes::from_bits(bits),
                "{words}"
            );
        }
    }

    #[test]
    fn the_last_of_two_opposite_options_of_a_spec_applies() {
        let denied =
            |options: &str| MountAttributes::denied_by_spec(options.split(',')).to_string();
        assert_eq!(
            denied("rbind,ro,nosuid,nodev,noexec"),
            "ro,nosuid,nodev,noexec"
        );
        assert_eq!(denied("ro,rw,noexec,exec,nodev,suid"), "nodev");
        assert_eq!(denied("rro,rw"), "ro");
        assert_eq!(denied("ro,rro"), "ro");
        assert_eq!(denied("nosuid,nodev,noexec,suid,dev,exec"), "");
        assert_eq!(denied("bind,rprivate"), "");
    }

    #[test]
    fn rights_denied_by_either_are_denied_and_access_times_stay() {
        let [strict, lax] = ["ro,noexec,noatime", "rw,nosuid,relatime"]
            .map(|it| MountAttributes::from_options(it.as_ref()));
        assert_eq!(
            lax.with_denied_by(strict),
            MountAttributes::from_options("ro,nosuid,noexec,relatime".as_ref())
        );
        assert_eq!(
            (strict.denied_beyond(lax), lax.denied_beyond(strict)),
            (2, 1)
        );
        assert_eq!(strict.with_denied_by(strict), strict);
    }

    #[test]
    fn flags_of_the_bind_alone_are_not_flags_of_the_mounts_below() {
        for option in ["ro", "rw", "suid", "nosuid", "nodev", "exec"] {
            assert!(MountAttributes::is_flag_of_spec(option), "{option}");
        }
        for option in ["rro", "rnosuid", "nosymfollow", "rbind"] {
            assert!(!MountAttributes::is_flag_of_spec(option), "{option}");
        }
        let below =
            |options: &str| MountAttributes::denied_below_by_spec(options.split(',')).to_string();
        assert_eq!(
            below("rro,rro,rnosuid,rnodev,rnoexec,rnosymfollow"),
            "ro,nosuid,nodev,noexec,nosymfollow"
        );
        assert_eq!(below("ro,nosuid,nodev,noexec"), "");
    }

    #[test]
    fn nosuid_nodev_and_noexec_are_allowed_unless_denied() {
        let attributes = MountAttributes::from_options("ro,nosuid,idmapped".as_ref());
        assert_eq!(attributes.allowed().to_string(), "nodev,noexec");
        assert_eq!(attributes.bits(), READ_ONLY | NOSUID | STRICTATIME);
    }
}
