//! fstab's options, converted for mount(2): flags, propagation and the rest for the filesystem
//! itself.
//!
//! Three options need more than mount(2), as with mount(8): `loop`, and the pair `uidmap=` and
//! `gidmap=`. The table is mount(8)'s. A change of propagation needs a separate call, see mount(2),
//! so it is kept separately.

use nix::mount::MsFlags;

use OptionEffect::{Clear, Propagate, Set};

use crate::kernel::LoopMode;

/// The effect of an option on the flags.
#[derive(Clone, Copy)]
enum OptionEffect {
    Set(MsFlags),
    Clear(MsFlags),
    Propagate(MsFlags),
}

const OPTIONS: &[(&str, OptionEffect)] = &[
    ("async", Clear(MsFlags::MS_SYNCHRONOUS)),
    ("atime", Clear(MsFlags::MS_NOATIME)),
    ("bind", Set(MsFlags::MS_BIND)),
    ("defaults", Set(MsFlags::empty())),
    ("dev", Clear(MsFlags::MS_NODEV)),
    ("diratime", Clear(MsFlags::MS_NODIRATIME)),
    ("dirsync", Set(MsFlags::MS_DIRSYNC)),
    ("exec", Clear(MsFlags::MS_NOEXEC)),
    ("mand", Set(MsFlags::MS_MANDLOCK)),
    ("noatime", Set(MsFlags::MS_NOATIME)),
    ("nodev", Set(MsFlags::MS_NODEV)),
    ("nodiratime", Set(MsFlags::MS_NODIRATIME)),
    ("noexec", Set(MsFlags::MS_NOEXEC)),
    ("nomand", Clear(MsFlags::MS_MANDLOCK)),
    ("norelatime", Clear(MsFlags::MS_RELATIME)),
    ("nostrictatime", Clear(MsFlags::MS_STRICTATIME)),
    ("nosuid", Set(MsFlags::MS_NOSUID)),
    ("private", Propagate(MsFlags::MS_PRIVATE)),
    ("rbind", Set(MsFlags::MS_BIND.union(MsFlags::MS_REC))),
    ("relatime", Set(MsFlags::MS_RELATIME)),
    ("remount", Set(MsFlags::MS_REMOUNT)),
    ("ro", Set(MsFlags::MS_RDONLY)),
    (
        "rprivate",
        Propagate(MsFlags::MS_PRIVATE.union(MsFlags::MS_REC)),
    ),
    (
        "rshared",
        Propagate(MsFlags::MS_SHARED.union(MsFlags::MS_REC)),
    ),
    (
        "rslave",
        Propagate(MsFlags::MS_SLAVE.union(MsFlags::MS_REC)),
    ),
    (
        "runbindable",
        Propagate(MsFlags::MS_UNBINDABLE.union(MsFlags::MS_REC)),
    ),
    ("rw", Clear(MsFlags::MS_RDONLY)),
    ("shared", Propagate(MsFlags::MS_SHARED)),
    ("slave", Propagate(MsFlags::MS_SLAVE)),
    ("strictatime", Set(MsFlags::MS_STRICTATIME)),
    ("suid", Clear(MsFlags::MS_NOSUID)),
    ("sync", Set(MsFlags::MS_SYNCHRONOUS)),
    ("unbindable", Propagate(MsFlags::MS_UNBINDABLE)),
];

/// Options that containerd's mount manager should have applied and removed; the filesystem would
/// not know them.
const INTERNAL: &str = "X-containerd.";

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the option {0:?} is not supported")]
pub struct UnsupportedOption(String);

/// A mount's options, sorted by their destination.
#[derive(Debug, PartialEq, Eq)]
pub struct MountOptions {
    /// For the mount itself.
    pub flags: MsFlags,
    /// For a second call; empty if the options do not change it.
    pub propagation: MsFlags,
    /// For the filesystem, in order.
    pub data: Vec<String>,
    /// The source is a file, to be mounted through a loop device.
    pub loop_device: Option<LoopMode>,
    /// The mappings of users and of groups.
    pub id_map: Option<(String, String)>,
}

impl MountOptions {
    /// Sorts the options.
    pub fn parse(options: &[String]) -> Result<Self, UnsupportedOption> {
        let (mut flags, mut propagation) = (MsFlags::empty(), MsFlags::empty());
        let (mut data, mut is_loop, mut users, mut groups) = (Vec::new(), false, None, None);
        for option in options {
            match OPTIONS.iter().find(|(name, _)| name == option) {
                Some((_, Set(bits))) => flags |= *bits,
                Some((_, Clear(bits))) => flags -= *bits,
                Some((_, Propagate(bits))) => propagation = *bits,
                None if option.starts_with(INTERNAL) => {
                    return Err(UnsupportedOption(option.clone()));
                }
                None => match option.split_once('=').unwrap_or((option, "")) {
                    ("loop", "") => is_loop = true,
                    ("uidmap", map) => users = Some(map.to_owned()),
                    ("gidmap", map) => groups = Some(map.to_owned()),
                    _ => data.push(option.clone()),
                },
            }
        }
        let mut loop_device = None;
        if is_loop {
            let before = data.len();
            // An option of the loop device, not of the filesystem.
            data.retain(|option| option != "direct-io");
            loop_device = Some(LoopMode {
                read_only: flags.contains(MsFlags::MS_RDONLY),
                direct_io: data.len() < before,
            });
        }
        // As in containerd's own mounts, users without groups map nothing, nor groups without
        // users.
        Ok(Self {
            flags,
            propagation,
            data,
            loop_device,
            id_map: users.zip(groups),
        })
    }

    /// A remount without data changes flags only, and those are applied by the calls that follow.
    pub fn is_remount_only(&self) -> bool {
        self.flags.contains(MsFlags::MS_REMOUNT) && self.data.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<MountOptions, UnsupportedOption> {
        MountOptions::parse(&line.split(',').map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn an_overlay_keeps_its_own_options_in_order() {
        let options = parse("index=off,workdir=/w,upperdir=/u,lowerdir=/a:/b").unwrap();
        assert!(options.flags.is_empty() && options.propagation.is_empty());
        assert_eq!(
            options.data,
            ["index=off", "workdir=/w", "upperdir=/u", "lowerdir=/a:/b"]
        );
    }

    #[test]
    fn later_options_win_and_propagation_is_separate() {
        let options = parse("rbind,ro,rw,ro,rslave").unwrap();
        assert_eq!(
            options.flags,
            MsFlags::MS_BIND | MsFlags::MS_REC | MsFlags::MS_RDONLY
        );
        assert_eq!(options.propagation, MsFlags::MS_SLAVE | MsFlags::MS_REC);
        assert_eq!(parse("ro,rw").unwrap().flags, MsFlags::empty());
    }

    #[test]
    fn options_that_need_more_than_a_mount() {
        let options = parse("ro,loop,direct-io,errors=continue").unwrap();
        assert_eq!(
            options.loop_device,
            Some(LoopMode {
                read_only: true,
                direct_io: true
            })
        );
        assert_eq!(options.data, ["errors=continue"]);
        assert_eq!(parse("ro,direct-io").unwrap().loop_device, None);
        let options = parse("uidmap=0:1000:1,gidmap=0:2000:1").unwrap();
        assert_eq!(options.id_map, Some(("0:1000:1".into(), "0:2000:1".into())));
        assert_eq!(parse("uidmap=0:1000:1").unwrap().id_map, None);
    }

    #[test]
    fn an_unsupported_option_is_an_error() {
        assert_eq!(
            parse("ro,X-containerd.mkfs.fs=ext4"),
            Err(UnsupportedOption("X-containerd.mkfs.fs=ext4".into()))
        );
    }

    #[test]
    fn the_table_is_sorted_and_has_no_doubles() {
        assert!(OPTIONS.windows(2).all(|pair| pair[0].0 < pair[1].0));
    }
}
