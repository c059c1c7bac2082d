//! Host-root binds that the runtime made private: the container keeps a copy of every mount that
//! existed when the container started.
//!
//! A mount of the container belongs to a bind if it is at the bind's literal destination and shows
//! the source that the host has now. The destination must have exactly one mount. The exception is
//! an interrupted refresh, which leaves the new mount beneath the old mount. So a mount that the
//! container made on top is never replaced.

use std::path::PathBuf;

use crate::evidence::FilePlace;
use crate::judge::{Pinning, Verdict};
use crate::mount_table::{MountEntry, MountTable};
use crate::refresh::SubpathInContainer;

/// A recursive bind of a spec that was judged [`Verdict::Pinning`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostRootBind {
    /// The source on the host, without symlinks.
    pub source: PathBuf,
    /// The path in the container.
    pub destination: PathBuf,
    /// The place of the source in its filesystem.
    pub current: FilePlace,
    /// The verdict on the bind of the spec.
    pub pinning: Pinning,
}

/// The container's mounts that were made for these binds, with verdicts:
/// [`Verdict::Pinning`] for a private mount, [`Verdict::Current`] for a mount that receives the
/// host's umounts, [`Verdict::Foreign`] for a private mount that the container covered.
pub fn host_roots_in_container(
    table: &MountTable,
    binds: &[HostRootBind],
) -> Vec<SubpathInContainer> {
    binds
        .iter()
        .filter_map(|bind| bind.shown_in(table))
        .collect()
}

impl HostRootBind {
    fn shown_in(&self, table: &MountTable) -> Option<SubpathInContainer> {
        let stack: Vec<&MountEntry> = table.stack_at(&self.destination).collect();
        let lowest = *stack
            .iter()
            .find(|mount| stack.iter().all(|other| mount.parent != other.id))?;
        let above = stack.iter().find(|mount| mount.parent == lowest.id);
        let verdict = self.verdict_on(lowest)?;
        let (mount, verdict, covers_its_equal) = match above {
            None => (lowest, verdict, false),
            // The two mounts of an interrupted refresh: the mount beneath was made last.
            Some(top)
                if stack.len() == 2
                    && verdict == Verdict::Current
                    && matches!(self.verdict_on(top), Some(Verdict::Pinning(_)))
                    && table.is_listed_after(lowest.id, top.id) == Some(true) =>
            {
                (*top, Verdict::Pinning(self.pinning.clone()), true)
            }
            Some(_) if verdict == Verdict::Current => (lowest, verdict, false),
            Some(_) => (lowest, Verdict::Foreign, false),
        };
        Some(SubpathInContainer {
            covers_its_equal,
            ..SubpathInContainer::of_whole(table, mount, &self.source, verdict)
        })
    }

    /// `None` for a mount that does not show the source.
    fn verdict_on(&self, mount: &MountEntry) -> Option<Verdict> {
        if !self.current.is_root_of(mount) || mount.root.deleted {
            return None;
        }
        Some(match mount.propagation.passes_umounts_on() {
            true => Verdict::Current,
            false => Verdict::Pinning(self.pinning.clone()),
        })
    }
}

#[cfg(test)]
mod host_roots_tests {
    use super::*;
    use crate::mount_table::Device;

    fn states(mounts: &[&str]) -> Vec<(u32, &'static str)> {
        let bind = HostRootBind {
            source: "/".into(),
            destination: "/host".into(),
            current: FilePlace {
                device: Device { major: 8, minor: 1 },
                path: "/".into(),
            },
            pinning: Pinning {
                bind: true,
                rootfs: false,
                private_mount: None,
                kept: None,
            },
        };
        let lines = mounts.iter().map(|line| format!("{line}\n"));
        let text = format!(
            "1 0 0:9 / / rw - overlay o rw\n{}",
            lines.collect::<String>()
        );
        let table = MountTable::from_mountinfo(text.as_bytes()).unwrap();
        let state = |it: &SubpathInContainer| match (it.is_current(), it.is_due()) {
            (true, _) => "current",
            (_, true) if it.covers_its_equal => "unfinished",
            (_, true) => "due",
            (false, false) => "kept",
        };
        host_roots_in_container(&table, &[bind])
            .iter()
            .map(|it| (it.mount.id.0, state(it)))
            .collect()
    }

    const PRIVATE: &str = "5 1 8:1 / /host rw - ext4 d rw";

    #[test]
    fn a_private_mount_is_due() {
        assert_eq!(states(&[PRIVATE]), [(5, "due")]);
        for propagation in ["master:7", "shared:7", "shared:7 master:9"] {
            let line = format!("5 1 8:1 / /host rw {propagation} - ext4 d rw");
            assert_eq!(states(&[&line]), [(5, "current")], "{propagation}");
        }
        let within = "6 5 8:2 / /host/disk rw - ext4 e rw";
        assert_eq!(states(&[PRIVATE, within]), [(5, "due")]);
    }

    #[test]
    fn a_mount_that_the_container_made_is_kept() {
        assert_eq!(states(&["5 1 8:2 / /host rw - ext4 d rw"]), []);
        assert_eq!(states(&["5 1 8:1 /sub /host rw - ext4 d rw"]), []);
        let over = "6 5 0:8 / /host rw - tmpfs t rw";
        assert_eq!(states(&[PRIVATE, over]), [(5, "kept")]);
        let slave = "5 1 8:1 / /host rw master:7 - ext4 d rw";
        let own = "6 5 8:1 / /host rw - ext4 d rw";
        assert_eq!(states(&[slave, own]), [(5, "current")]);
    }

    #[test]
    fn a_refresh_that_was_interrupted_is_finished() {
        let (old, new) = (
            "5 6 8:1 / /host rw - ext4 d rw",
            "6 1 8:1 / /host rw master:7 - ext4 d rw",
        );
        assert_eq!(states(&[old, new]), [(5, "unfinished")]);
        let over = "7 5 0:8 / /host rw - tmpfs t rw";
        assert_eq!(states(&[old, new, over]), [(6, "current")]);
    }
}
