//! Compares the mount at a place with the mount that its bind would make now.
//!
//! A place is a namespace, the host's or a container's, and a path in it. On the host a descriptor
//! of the mount is open, so its file is compared by device and inode. In a container only the mount
//! table is read, so the mount's root is compared.

use std::path::Path;

use crate::evidence::{FileIdentity, FileKind, FilePlace, Observed, Reach, Target};
use crate::judge::PathInVolume;
use crate::kubelet::{TimestampDirectory, VolumeLayout, Writer};
use crate::mount_table::{Device, MountRoot};

use super::verdict::{Lack, NoRemedy, Remedy, RepairMethod, StaleCause, Verdict};

/// The source of a bind, as the host shows it now.
#[derive(Debug, Clone)]
pub struct Expected<'e> {
    /// The directory of the volume, or of the file.
    pub directory: &'e Path,
    /// The device of that directory's filesystem.
    pub device: Device,
    /// The writer of the directory.
    pub writer: Writer,
    /// The layout of its files.
    pub layout: VolumeLayout,
    /// The path below the directory.
    pub sub_path: PathInVolume,
    /// The file or directory that the sub path leads to.
    pub target: ExpectedTarget<'e>,
}

/// The target of a bind, as far as it was read.
#[derive(Debug, Clone, Copy)]
pub enum ExpectedTarget<'e> {
    /// The target was opened beneath the directory.
    Opened(&'e Observed<Target>),
    /// The payload that `..data` names; the target in it was not opened.
    InPayload(&'e TimestampDirectory),
    /// The place of the target. `None` if nothing has its name at this moment.
    At(Option<&'e FilePlace>),
}

/// The mount at a place.
#[derive(Debug, Clone, Copy)]
pub struct Shown<'s> {
    /// The device of its filesystem.
    pub device: Device,
    pub root: &'s MountRoot,
    /// Its file. `None` in a container, where nothing is opened to judge it.
    pub file: Option<&'s Observed<FileIdentity>>,
    /// Its answer to a probe.
    pub reach: &'s Reach,
    pub on_it: OnIt,
}

/// The mounts on a mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnIt {
    Nothing,
    /// A mount covers the mount.
    Cover,
    /// Mounts are below the mount's directory.
    Inside,
}

pub fn judge(expected: &Expected<'_>, shown: &Shown<'_>) -> Verdict {
    if shown.on_it == OnIt::Cover {
        return Verdict::Foreign;
    }
    let by_root = expected.difference_of_mounts(shown);
    let difference = match expected.target {
        ExpectedTarget::Opened(target) => return expected.judge_opened(shown, target),
        ExpectedTarget::InPayload(current) => by_root.or_else(|| expected.older_payload(current)),
        ExpectedTarget::At(Some(place))
            if place.device == shown.device && place.path == shown.root.path =>
        {
            by_root
        }
        ExpectedTarget::At(_) => by_root.or(Some(StaleCause::Replaced)),
    };
    match difference {
        Some(cause) => expected.stale(shown, cause, RepairMethod::Rebind),
        None => Verdict::Current,
    }
}

/// A place whose evidence lacks a part that a repair needs. The place's own mount was read, and a
/// deleted root is certain in any case: no runtime can bind it.
pub(super) fn unreadable(root: &MountRoot, why: &str) -> Verdict {
    match root.deleted {
        true => Verdict::Stale {
            cause: StaleCause::DeletedRoot,
            remedy: Err(NoRemedy::Unreadable(why.to_owned())),
        },
        false => Verdict::Unknown(why.to_owned()),
    }
}

impl Expected<'_> {
    fn judge_opened(&self, shown: &Shown<'_>, target: &Observed<Target>) -> Verdict {
        let target = match target {
            Observed::Seen(target) => target,
            Observed::Absent => return self.orphaned(shown, Lack::Payload, None),
            Observed::Unreadable(why) => return unreadable(shown.root, why),
        };
        let own = match shown.file {
            Some(Observed::Seen(identity)) => identity,
            Some(Observed::Unreadable(why)) => return unreadable(shown.root, why),
            Some(Observed::Absent) | None => {
                let why = "the file that its mount shows could not be found";
                return unreadable(shown.root, why);
            }
        };
        let path = self.sub_path.path.clone();
        let file = match &target.file {
            Observed::Seen(file) => file,
            Observed::Absent => {
                // Nothing has the sub path's name. A directory that containers wrote can be made
                // again; a directory in a payload cannot.
                let can_be_made = self.writer == Writer::Containers
                    && self.sub_path.timestamp.is_none()
                    && own.kind == FileKind::Directory;
                let remake = can_be_made.then(|| self.remedy(RepairMethod::Remake));
                return self.orphaned(shown, Lack::Key(path), remake);
            }
            Observed::Unreadable(why) => return unreadable(shown.root, why),
        };
        let is_other_kind = own.kind != file.kind;
        if self.is_placeholder() {
            // A file cannot be mounted over a directory, nor a directory over a file: move_mount(2)
            // returns ENOTDIR.
            let method = match is_other_kind {
                true => RepairMethod::PointSpecAtVolume,
                false => RepairMethod::Rebind,
            };
            return self.stale(shown, StaleCause::Placeholder, method);
        }
        if is_other_kind {
            let directory = file.kind == FileKind::Directory;
            return self.orphaned(shown, Lack::OtherKind { path, directory }, None);
        }
        let current = target.timestamp.as_ref();
        let difference = self
            .difference_of_mounts(shown)
            .or_else(|| self.older_payload(current?))
            // A file that a container writes, or a payload directory's file, can be unlinked and
            // created again under the mount.
            .or((own != file).then_some(StaleCause::Replaced));
        match difference {
            Some(cause) => self.stale(shown, cause, RepairMethod::Rebind),
            None => Verdict::Current,
        }
    }

    /// The difference between the mount at the place and a new bind that does not depend on the
    /// file.
    fn difference_of_mounts(&self, shown: &Shown<'_>) -> Option<StaleCause> {
        if let Some(words) = shown.reach.error_of_dead_source() {
            return Some(StaleCause::DeadMount(words.to_owned()));
        }
        if shown.root.deleted {
            return Some(StaleCause::DeletedRoot);
        }
        (shown.device != self.device).then_some(StaleCause::OtherDevice)
    }

    fn older_payload(&self, current: &TimestampDirectory) -> Option<StaleCause> {
        let shown = self.sub_path.timestamp.as_ref()?;
        (shown != current).then(|| StaleCause::OlderPayload {
            shown: shown.clone(),
            current: current.clone(),
        })
    }

    /// True if the key was missing at the bind: the kubelet made an empty directory to have
    /// something to bind.
    fn is_placeholder(&self) -> bool {
        self.writer == Writer::Kubelet && self.sub_path.timestamp.is_none()
    }

    fn orphaned(&self, shown: &Shown<'_>, lacks: Lack, remake: Option<Remedy>) -> Verdict {
        let cause = match shown.reach.error_of_dead_source() {
            Some(words) => StaleCause::DeadMount(words.to_owned()),
            None if shown.root.deleted => StaleCause::DeletedRoot,
            None if self.is_placeholder() => StaleCause::Placeholder,
            None => StaleCause::Replaced,
        };
        Verdict::Orphaned {
            cause,
            lacks,
            remake,
        }
    }

    fn stale(&self, shown: &Shown<'_>, cause: StaleCause, method: RepairMethod) -> Verdict {
        let remedy = match shown.on_it {
            OnIt::Nothing | OnIt::Cover => Ok(self.remedy(method)),
            OnIt::Inside => Err(NoRemedy::Occupied),
        };
        Verdict::Stale { cause, remedy }
    }

    pub(crate) fn remedy(&self, method: RepairMethod) -> Remedy {
        Remedy {
            volume: self.directory.to_owned(),
            sub_path: self.sub_path.clone(),
            writer: self.writer,
            layout: self.layout,
            method,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: &str = "..2026_11_21_05_10_00.1";
    const NEW: &str = "..2026_11_21_05_20_00.2";

    /// The verdict on a mount of a file in the payload `shown`, with `on_it` on the mount. A new
    /// bind would show the payload `current`.
    fn judged(shown: &str, current: &str, on_it: OnIt) -> Verdict {
        let timestamp = |name: &str| TimestampDirectory::from_name(name.as_ref()).unwrap();
        let (device, current) = (Device { major: 8, minor: 1 }, timestamp(current));
        let expected = Expected {
            directory: Path::new("/volume"),
            device,
            writer: Writer::Kubelet,
            layout: VolumeLayout::Payload,
            sub_path: PathInVolume {
                timestamp: Some(timestamp(shown)),
                path: "app.conf".into(),
            },
            target: ExpectedTarget::InPayload(&current),
        };
        let root = MountRoot::from_kernel(format!("/v/{shown}/app.conf").as_bytes());
        let shown = Shown {
            device,
            root: &root,
            file: None,
            reach: &Reach::NotNeeded,
            on_it,
        };
        judge(&expected, &shown)
    }

    #[test]
    fn mounts_on_a_mount_keep_it_from_being_replaced() {
        assert!(matches!(
            judged(OLD, NEW, OnIt::Nothing),
            Verdict::Stale { remedy: Ok(_), .. }
        ));
        assert!(matches!(
            judged(OLD, NEW, OnIt::Inside),
            Verdict::Stale {
                remedy: Err(NoRemedy::Occupied),
                ..
            }
        ));
        assert_eq!(judged(OLD, NEW, OnIt::Cover), Verdict::Foreign);
        assert_eq!(judged(NEW, NEW, OnIt::Inside), Verdict::Current);
    }
}
