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

use super::verdict::{Lack, StaleCause, Verdict};
use crate::judge::verdict::{NoRemedy, Remedy, RepairMethod};

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

impl Expected<'_> {
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

pub fn judge(expected: &Expected<'_>, shown: &Shown<'_>) -> Verdict {
    let comparison = Comparison { expected, shown };
    match (shown.on_it, expected.target) {
        (OnIt::Cover, _) => Verdict::Foreign,
        (OnIt::Nothing | OnIt::Inside, ExpectedTarget::Opened(target)) => {
            comparison.with_opened(target)
        }
        (OnIt::Nothing | OnIt::Inside, ExpectedTarget::InPayload(current)) => {
            comparison.by_root(|| comparison.older_payload(current))
        }
        (OnIt::Nothing | OnIt::Inside, ExpectedTarget::At(place)) => {
            comparison.by_root(|| (!comparison.is_at(place)).then_some(StaleCause::Replaced))
        }
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

struct Comparison<'c> {
    expected: &'c Expected<'c>,
    shown: &'c Shown<'c>,
}

impl Comparison<'_> {
    fn by_root(&self, difference: impl Fn() -> Option<StaleCause>) -> Verdict {
        match self.difference_of_mounts().or_else(difference) {
            Some(cause) => self.stale(cause, RepairMethod::Rebind),
            None => Verdict::Current,
        }
    }

    fn is_at(&self, place: Option<&FilePlace>) -> bool {
        place.is_some_and(|place| {
            place.device == self.shown.device && place.path == self.shown.root.path
        })
    }

    fn with_opened(&self, target: &Observed<Target>) -> Verdict {
        let target = match target {
            Observed::Seen(target) => target,
            Observed::Absent => return self.orphaned(Lack::Payload, None),
            Observed::Unreadable(why) => return unreadable(self.shown.root, why),
        };
        let shown = match self.shown.file {
            Some(Observed::Seen(identity)) => identity,
            Some(Observed::Unreadable(why)) => return unreadable(self.shown.root, why),
            Some(Observed::Absent) | None => {
                let why = "the file that its mount shows could not be found";
                return unreadable(self.shown.root, why);
            }
        };
        match &target.file {
            Observed::Seen(file) => self.against(target, shown, file),
            Observed::Absent => self.vanished(shown),
            Observed::Unreadable(why) => unreadable(self.shown.root, why),
        }
    }

    fn against(&self, target: &Target, shown: &FileIdentity, file: &FileIdentity) -> Verdict {
        if self.is_placeholder() {
            return self.stale(StaleCause::Placeholder, method_over(shown, file));
        }
        if shown.kind != file.kind {
            let directory = file.kind == FileKind::Directory;
            let path = self.expected.sub_path.path.clone();
            return self.orphaned(Lack::OtherKind { path, directory }, None);
        }
        // A file that a container writes, or a payload directory's file, can be unlinked and
        // created again under the mount.
        let older = || self.older_payload(target.timestamp.as_ref()?);
        let difference = self.difference_of_mounts().or_else(older);
        match difference.or((shown != file).then_some(StaleCause::Replaced)) {
            Some(cause) => self.stale(cause, RepairMethod::Rebind),
            None => Verdict::Current,
        }
    }

    /// The difference between the mount at the place and a new bind that does not depend on the
    /// file.
    fn difference_of_mounts(&self) -> Option<StaleCause> {
        if let Some(words) = self.shown.reach.error_of_dead_source() {
            return Some(StaleCause::DeadMount(words.to_owned()));
        }
        if self.shown.root.deleted {
            return Some(StaleCause::DeletedRoot);
        }
        (self.shown.device != self.expected.device).then_some(StaleCause::OtherDevice)
    }

    fn older_payload(&self, current: &TimestampDirectory) -> Option<StaleCause> {
        let shown = self.expected.sub_path.timestamp.as_ref()?;
        (shown != current).then(|| StaleCause::OlderPayload {
            shown: shown.clone(),
            current: current.clone(),
        })
    }

    /// Nothing has the sub path's name. A directory that containers wrote can be made again; a
    /// directory in a payload cannot.
    fn vanished(&self, shown: &FileIdentity) -> Verdict {
        let is_plain = self.expected.writer == Writer::Containers
            && self.expected.sub_path.timestamp.is_none();
        let can_be_made = is_plain && shown.kind == FileKind::Directory;
        self.orphaned(
            Lack::Key(self.expected.sub_path.path.clone()),
            can_be_made.then(|| self.expected.remedy(RepairMethod::Remake)),
        )
    }

    /// True if the key was missing at the bind: the kubelet made an empty directory to have
    /// something to bind.
    fn is_placeholder(&self) -> bool {
        self.expected.writer == Writer::Kubelet && self.expected.sub_path.timestamp.is_none()
    }

    fn orphaned(&self, lacks: Lack, remake: Option<Remedy>) -> Verdict {
        let cause = match self.shown.reach.error_of_dead_source() {
            Some(words) => StaleCause::DeadMount(words.to_owned()),
            None if self.shown.root.deleted => StaleCause::DeletedRoot,
            None if self.is_placeholder() => StaleCause::Placeholder,
            None => StaleCause::Replaced,
        };
        Verdict::Orphaned {
            cause,
            lacks,
            remake,
        }
    }

    fn stale(&self, cause: StaleCause, method: RepairMethod) -> Verdict {
        let remedy = match self.shown.on_it {
            OnIt::Nothing | OnIt::Cover => Ok(self.expected.remedy(method)),
            OnIt::Inside => Err(NoRemedy::Occupied),
        };
        Verdict::Stale { cause, remedy }
    }
}

/// A file cannot be mounted over a directory, nor a directory over a file: move_mount(2) returns
/// ENOTDIR.
fn method_over(shown: &FileIdentity, file: &FileIdentity) -> RepairMethod {
    if shown.kind == file.kind {
        RepairMethod::Rebind
    } else {
        RepairMethod::PointSpecAtVolume
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
