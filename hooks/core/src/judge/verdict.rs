//! Verdicts on bind sources, with their causes and remedies, and the planned actions for them.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use strum::{Display, IntoStaticStr};

use crate::judge::PathInVolume;
use crate::kubelet::{
    DATA_LINK, MountedVolume, TimestampDirectory, VolumeLayout, VolumeSubpath, Writer,
};
use crate::mount_table::{Device, FsType};
use crate::places::SourceKind;
use crate::policy::{Alarm, FailedRepair, Kept, Mode, Policy, Vanished};
use crate::proof::Difference;
use crate::spec::SpecEdit;

/// A bind, and the verdict on the bind's source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// The bind's position in the spec's `mounts`; `None` if no spec was read.
    pub bind: Option<usize>,
    pub source: PathBuf,
    /// The bind's destination in the container; `None` if no spec was read.
    pub destination: Option<PathBuf>,
    /// The kind of the source.
    pub kind: SourceKind,
    pub verdict: Verdict,
}

/// The verdict on a bind source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It is what the kubelet would bind today, and receives the host's umounts where that matters.
    Current,
    /// It is not what the kubelet would bind today, and the file or directory to bind exists.
    Stale {
        cause: StaleCause,
        /// The repair, or why none is possible.
        remedy: Result<Remedy, NoRemedy>,
    },
    /// It is stale, and the file or directory that the kubelet would bind today is also gone.
    Orphaned {
        cause: StaleCause,
        /// The part that is missing.
        lacks: Lack,
        /// Set for a directory that containers wrote: it can be made again, empty, as the kubelet
        /// does for a new container.
        remake: Option<Remedy>,
    },
    /// A required mount is missing.
    Unmounted(Unmounted),
    /// A bind that keeps the host's mounts alive, or will not receive their umounts.
    Pinning(Pinning),
    /// The new container's mounts differ from the bind in the spec.
    Wrong(Difference),
    /// Its server does not answer, or its daemon is gone.
    Dead(String),
    /// The source was not probed: the other sources used up the time for probes.
    NotProbed,
    /// bindguard does not judge it.
    Foreign,
    /// No verdict was possible, for this reason.
    Unknown(String),
}

/// The cause that makes a source stale.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StaleCause {
    /// The kernel reports that the mount's root was deleted: binding it gives ENOENT.
    #[error("the file it was bound from is deleted")]
    DeletedRoot,
    /// The mount shows a payload directory that `..data` no longer names.
    #[error("it shows the payload of {shown}, and ..data is {current}")]
    OlderPayload {
        /// The payload directory that the mount shows.
        shown: TimestampDirectory,
        /// The timestamp directory that `..data` names.
        current: TimestampDirectory,
    },
    /// The bound file's name now belongs to another file.
    #[error("another file has its name now")]
    Replaced,
    /// The volume was mounted again since.
    #[error("its volume was mounted anew since")]
    OtherDevice,
    /// The filesystem is back, but this mount of it is dead: the daemon was restarted, or the
    /// server forgot the handle.
    #[error("it answers: {0}, and its volume is alive")]
    DeadMount(String),
    /// The subpath shows the volume's own root, which a `subPath` never names.
    #[error("it shows the whole volume")]
    WrongRoot,
    /// The kubelet bound a directory of its own making because the key was missing then.
    #[error("a directory has the place of its key")]
    Placeholder,
    /// A bind of the spec that was nested in the mount is gone.
    #[error("the nested bind at {} is gone", .0.display())]
    LacksBind(PathBuf),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unmounted {
    Subpath,
    /// A volume-subpath that no running container uses: the kubelet binds the subpath before it
    /// starts a container.
    UnusedSubpath,
    /// A volume without the mount that its plugin requires.
    Volume {
        volume: MountedVolume,
        /// The filesystem at the volume's path, if its type is not the plugin's.
        found: Option<FsType>,
    },
}

impl fmt::Display for Unmounted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::Volume { volume, found } = self else {
            return f.write_str(
                "nothing is mounted there: a container would see the empty file underneath",
            );
        };
        match found {
            None => write!(
                f,
                "{volume} is not mounted: a container would write to the node's own disk"
            )?,
            Some(FsType(found)) => {
                write!(
                    f,
                    "{volume} shows a {found} filesystem, which its plugin does not mount"
                )?;
            }
        }
        write!(f, "; usually {}", volume.required.usual_cause)
    }
}

/// The part of a sub path that is missing today.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Lack {
    /// The volume has no payload.
    #[error("its volume has no ..data")]
    Payload,
    /// Nothing has the sub path's name.
    #[error("{} is no longer in its volume", .0.display())]
    Key(PathBuf),
    /// The sub path's name changed from a file to a directory, or from a directory to a file.
    #[error("{} became a {is}", path.display(), is = if *.directory { "directory" } else { "file" })]
    OtherKind {
        path: PathBuf,
        /// True if it is a directory today.
        directory: bool,
    },
}

/// The reasons why a host-root bind pins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pinning {
    /// The bind itself must become rslave.
    pub bind: bool,
    /// `linux.rootfsPropagation` must become rslave.
    pub rootfs: bool,
    /// The source's mount on the host, if it is private: rslave has no effect there.
    pub private_mount: Option<PathBuf>,
    /// Why the bind must not be changed; the fields above then only describe it.
    pub kept: Option<Kept>,
}

/// The name of a verdict in reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Display, IntoStaticStr, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case", const_into_str)]
pub enum VerdictName {
    Current,
    Stale,
    Orphaned,
    Unmounted,
    /// [`Verdict::Pinning`], and [`Difference::WithoutMaster`]
    Pinning,
    Wrong,
    Dead,
    Foreign,
    /// [`Verdict::Unknown`] and [`Verdict::NotProbed`]
    Unknown,
}

impl VerdictName {
    pub fn as_str(self) -> &'static str {
        self.into_str()
    }
}

impl Verdict {
    /// The verdict's name in reports.
    pub fn name(&self) -> VerdictName {
        match self {
            Self::Current => VerdictName::Current,
            Self::Stale { .. } => VerdictName::Stale,
            Self::Orphaned { .. } => VerdictName::Orphaned,
            Self::Unmounted(_) => VerdictName::Unmounted,
            Self::Pinning(_) | Self::Wrong(Difference::WithoutMaster) => VerdictName::Pinning,
            Self::Wrong(_) => VerdictName::Wrong,
            Self::Dead(_) => VerdictName::Dead,
            Self::Foreign => VerdictName::Foreign,
            Self::NotProbed | Self::Unknown(_) => VerdictName::Unknown,
        }
    }

    /// True if the source is not healthy, or could not be checked.
    pub fn is_finding(&self) -> bool {
        self.reason().is_some()
    }

    /// The reason for the verdict, in one line. `None` for a healthy source.
    pub fn reason(&self) -> Option<String> {
        Some(match self {
            Self::Current | Self::Foreign | Self::Unmounted(Unmounted::UnusedSubpath) => {
                return None;
            }
            Self::Stale { cause, remedy } => match remedy {
                Ok(_) => cause.to_string(),
                Err(why) => format!("{cause}; {why}"),
            },
            Self::Orphaned {
                cause,
                lacks,
                remake,
            } => {
                // The next step of the pod's owner, where no mount can help.
                let next_step = match (remake, lacks) {
                    (Some(_), _) => "",
                    (None, Lack::Payload) => {
                        ": delete the pod, so that the kubelet writes the volume anew"
                    }
                    (None, Lack::Key(_)) => ": put it back, or remove the subPath from the pod",
                    (None, Lack::OtherKind { .. }) => ": make it what it was, or delete the pod",
                };
                format!("{cause}, and {lacks}{next_step}")
            }
            Self::Unmounted(unmounted) => unmounted.to_string(),
            Self::Pinning(pinning) => pinning.reason(),
            Self::Wrong(difference) => difference.to_string(),
            Self::NotProbed => {
                "it was not probed: there was no time left to wait for its server".to_owned()
            }
            Self::Dead(why) | Self::Unknown(why) => why.clone(),
        })
    }
}

impl Pinning {
    fn reason(&self) -> String {
        let requested = match (self.bind, self.rootfs) {
            (true, true) => "neither the bind nor linux.rootfsPropagation is rslave",
            (true, false) => "the bind is not rslave",
            (false, true) => "linux.rootfsPropagation is not rslave",
            (false, false) => "the bind is rslave",
        };
        let effect = match &self.private_mount {
            Some(mount) => format!(
                ", and rslave has no effect: {} is private on the host",
                mount.display()
            ),
            None => String::new(),
        };
        let kept = match self.kept {
            Some(Kept::RecursivelyReadOnly) => {
                "; it is recursively read-only (rro), which needs a private bind"
            }
            Some(Kept::ReadOnly) => {
                "; it is read-only, and policy keeps read-only binds as the pod has them"
            }
            None => "",
        };
        format!("the container would keep the host's mounts alive: {requested}{effect}{kept}")
    }
}

// The repair of a stale subpath, or the reason why bindguard has none.

/// The repair of a stale subpath.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remedy {
    pub volume: PathBuf,
    pub sub_path: PathInVolume,
    /// The writer of the volume.
    pub writer: Writer,
    /// The layout of its files.
    pub layout: VolumeLayout,
    pub method: RepairMethod,
}

/// The methods that repair a stale subpath.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RepairMethod {
    /// Bind the current target in place of the stale target.
    Rebind,
    /// A directory is in the way of a file: only the spec's source can be changed.
    PointSpecAtVolume,
    /// Create the missing directory again, then bind it.
    Remake,
}

/// Why a stale subpath or volume has no repair.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoRemedy {
    /// The pod has no volume of that name whose files bindguard can compare.
    #[error("no volume of that name is one that can be repaired")]
    NoVolume,
    /// It shows a whole share, so its root does not contain the sub path.
    #[error("its sub path is recorded nowhere; delete the pod")]
    WholeShare,
    /// The NFS client renamed the deleted file, so its root does not contain the sub path.
    #[error(
        "the NFS client keeps it by another name; its sub path is recorded nowhere; delete the pod"
    )]
    RenamedByClient,
    /// The source is a whole volume, and a driver mounts a volume once for a pod.
    #[error("only its driver can mount it anew, for a new pod")]
    MountedByDriver,
    /// The directory contains mounts, which a detach would lose.
    #[error("other mounts are in its directory")]
    Occupied,
    /// The mount's filesystem is not the filesystem of the volume today.
    #[error("its mount is of device {mount}, its volume of {volume}")]
    OtherDevice { mount: Device, volume: Device },
    /// The mount's root is not in the volume, which has this place in the filesystem.
    #[error("its mount shows {}, which is not in the volume at {}", root.display(), volume.display())]
    Outside { root: PathBuf, volume: PathBuf },
    /// The evidence about its volume could not be read.
    #[error("{0}")]
    Unreadable(String),
}

// Derives the planned actions from findings.

/// The planned actions for a bundle's findings.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// Subpaths to re-bind.
    pub rebinds: Vec<Rebind>,
    /// Changes to the spec.
    pub edits: Vec<SpecEdit>,
    /// The reason, if policy refuses the container.
    pub refusal: Option<String>,
}

impl Plan {
    /// Plans for these findings. A plan contains only repairs that policy wants, and never a
    /// foreign or unknown bind.
    pub fn from_findings(findings: &[Finding], policy: &Policy) -> Self {
        let mut plan = Self::default();
        for finding in findings {
            match &finding.verdict {
                Verdict::Stale { remedy: Ok(_), .. } | Verdict::Orphaned { .. }
                    if policy.stale_subpaths == Mode::Repair =>
                {
                    match Rebind::from_finding(finding, policy) {
                        Some(rebind) if rebind.remedy.method == RepairMethod::PointSpecAtVolume => {
                            plan.edits.extend(rebind.spec_edit());
                        }
                        rebind => plan.rebinds.extend(rebind),
                    }
                }
                Verdict::Pinning(pinning)
                    if policy.host_root == Mode::Repair && pinning.kept.is_none() =>
                {
                    if let (true, Some(bind)) = (pinning.bind, finding.bind) {
                        plan.edits.push(SpecEdit::BindRslave { bind });
                    }
                    if pinning.rootfs && !plan.edits_rootfs() {
                        plan.edits.push(SpecEdit::RootfsRslave);
                    }
                }
                _ if plan.refusal.is_none() => plan.refusal = refusal_of(finding, policy),
                _ => {}
            }
        }
        plan
    }

    /// True if there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.rebinds.is_empty() && self.edits.is_empty() && self.refusal.is_none()
    }

    /// True if the bind at this position is edited.
    pub fn edits_bind(&self, index: usize) -> bool {
        self.edits.iter().any(|edit| match edit {
            SpecEdit::Source { bind, .. } | SpecEdit::BindRslave { bind } => *bind == index,
            SpecEdit::RootfsRslave => false,
        })
    }

    /// True if `linux.rootfsPropagation` is edited.
    pub fn edits_rootfs(&self) -> bool {
        self.edits.contains(&SpecEdit::RootfsRslave)
    }
}

/// The refusal of a container that could not be checked in full, if policy requires a refusal. The
/// unchecked part may contain a fault that policy refuses.
pub fn refusal_of_unseen(unseen: &str, policy: &Policy) -> Option<String> {
    let refuses = policy.unmounted_volumes == Alarm::Refuse
        || policy.proof == Alarm::Refuse
        || policy.dead_sources == Alarm::Refuse
        || refuses_unrepaired(policy);
    refuses.then(|| format!("{unseen}: policy refuses what may be there"))
}

/// The refusal of a container with this finding, if policy requires a refusal.
pub fn refusal_of(finding: &Finding, policy: &Policy) -> Option<String> {
    let source = finding.source.display();
    let (is_refused, reason) = match &finding.verdict {
        Verdict::Unmounted(unmounted) => (
            policy.unmounted_volumes == Alarm::Refuse,
            match unmounted {
                Unmounted::Subpath | Unmounted::UnusedSubpath => {
                    format!("the bind source {source}: {unmounted}")
                }
                Unmounted::Volume { .. } => unmounted.to_string(),
            },
        ),
        Verdict::Stale {
            cause,
            remedy: Err(why),
        } => (
            refuses_unrepaired(policy),
            unrepaired(finding, &format!("{cause}; {why}")),
        ),
        Verdict::Dead(why) => (
            policy.dead_sources == Alarm::Refuse,
            format!("the bind source {source} is dead: {why}"),
        ),
        Verdict::NotProbed => (
            policy.dead_sources == Alarm::Refuse,
            format!("the bind source {source} may be dead: it was not probed in time"),
        ),
        _ => return None,
    };
    is_refused.then_some(reason)
}

/// The refusal of a new container with this finding, if policy requires a refusal.
pub fn refusal_of_wrong(finding: &Finding, policy: &Policy) -> Option<String> {
    match &finding.verdict {
        Verdict::Wrong(Difference::WithoutMaster) => None,
        Verdict::Wrong(difference) if policy.proof == Alarm::Refuse => Some(format!(
            "the runtime did not mount {} as the spec says: {difference}",
            finding.source.display()
        )),
        _ => None,
    }
}

/// The refusal of a new container whose mounts could not be compared with its spec, if policy
/// requires a refusal.
pub fn refusal_of_uncompared(why: &str, policy: &Policy) -> Option<String> {
    (policy.proof == Alarm::Refuse)
        .then(|| format!("its mounts could not be compared with its spec: {why}"))
}

/// The refusal of a container with this finding, whose repair failed because of `why`, if policy
/// requires a refusal.
pub fn refusal_of_failed(finding: &Finding, why: &str, policy: &Policy) -> Option<String> {
    (policy.failed_repairs == FailedRepair::Refuse).then(|| unrepaired(finding, why))
}

fn refuses_unrepaired(policy: &Policy) -> bool {
    policy.stale_subpaths == Mode::Repair && policy.failed_repairs == FailedRepair::Refuse
}

fn unrepaired(finding: &Finding, why: &str) -> String {
    format!(
        "the bind source {} is {} and could not be repaired: {why}",
        finding.source.display(),
        finding.verdict.name()
    )
}

// The repair of a stale subpath.

/// The order to bind a subpath's current target in place of a stale target.
///
/// Only a finding with a remedy yields a re-bind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rebind {
    /// The bind's position in the spec's `mounts`.
    pub bind: Option<usize>,
    pub subpath: VolumeSubpath,
    pub remedy: Remedy,
}

impl Rebind {
    /// The re-bind for a finding; `None` if there is nothing to repair, no repair is possible, or
    /// policy does not want a directory created again.
    pub fn from_finding(finding: &Finding, policy: &Policy) -> Option<Self> {
        let SourceKind::Subpath(subpath) = &finding.kind else {
            return None;
        };
        let remedy = match &finding.verdict {
            Verdict::Stale {
                remedy: Ok(remedy), ..
            } => remedy,
            Verdict::Orphaned {
                remake: Some(remedy),
                ..
            } if policy.vanished_directories == Vanished::Remake => remedy,
            _ => return None,
        };
        Some(Self {
            bind: finding.bind,
            subpath: subpath.clone(),
            remedy: remedy.clone(),
        })
    }

    /// The edit that points the spec's source at the volume's own path, used when binding is
    /// impossible.
    ///
    /// `None` for volumes that containers write: a container may redirect a path there before the
    /// runtime resolves it. A kubelet-written volume's own names are links through `..data`: the
    /// runtime resolves them to the payload of that moment.
    pub fn spec_edit(&self) -> Option<SpecEdit> {
        let Remedy {
            volume, sub_path, ..
        } = &self.remedy;
        if self.remedy.writer == Writer::Containers {
            return None;
        }
        let to = match sub_path.path.as_os_str().is_empty() {
            // A pod may mount the payload directory itself.
            true => volume.join(DATA_LINK),
            false => volume.join(&sub_path.path),
        };
        self.bind.map(|bind| SpecEdit::Source { bind, to })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_healthy_foreign_or_unused_source_is_no_finding() {
        for (verdict, expected) in [
            (Verdict::Current, false),
            (Verdict::Foreign, false),
            (Verdict::Unmounted(Unmounted::UnusedSubpath), false),
            (Verdict::Unmounted(Unmounted::Subpath), true),
            (Verdict::NotProbed, true),
            (Verdict::Unknown("EIO".to_owned()), true),
        ] {
            assert_eq!(verdict.is_finding(), expected, "{verdict:?}");
            assert_eq!(verdict.reason().is_some(), expected, "{verdict:?}");
        }
    }
}

#[cfg(test)]
mod rebind_tests {
    use super::*;
    use std::path::Path;

    use crate::judge::{Lack, PathInVolume, StaleCause};
    use crate::kubelet::VolumeLayout;

    fn rebind(path: &str, bind: Option<usize>, vanished: Vanished) -> Option<Rebind> {
        let subpath = VolumeSubpath::from_path(
            Path::new("/var/lib/kubelet/pods/u/volume-subpaths/v/app/0"),
            [Path::new("/var/lib/kubelet")],
        );
        let remedy = Remedy {
            volume: "/volume".into(),
            sub_path: PathInVolume {
                timestamp: None,
                path: path.into(),
            },
            writer: Writer::Kubelet,
            layout: VolumeLayout::Payload,
            method: RepairMethod::Remake,
        };
        let finding = Finding {
            bind,
            source: "/source".into(),
            destination: None,
            kind: SourceKind::Subpath(subpath.unwrap()),
            verdict: Verdict::Orphaned {
                cause: StaleCause::Replaced,
                lacks: Lack::Key(path.into()),
                remake: Some(remedy),
            },
        };
        let policy = Policy {
            vanished_directories: vanished,
            ..Policy::default()
        };
        Rebind::from_finding(&finding, &policy)
    }

    #[test]
    fn policy_decides_whether_a_directory_is_made_again() {
        assert_eq!(rebind("x", Some(3), Vanished::Leave), None);
        let remade = rebind("x", Some(3), Vanished::Remake).unwrap();
        assert_eq!(remade.bind, Some(3));
        assert_eq!(remade.remedy.volume, Path::new("/volume"));
    }

    #[test]
    fn a_spec_is_pointed_at_the_name_or_at_the_payload() {
        let edit = |path, bind| {
            let rebind = rebind(path, bind, Vanished::Remake).unwrap();
            rebind.spec_edit()
        };
        let to = |to: &str| {
            let to = to.into();
            Some(SpecEdit::Source { bind: 3, to })
        };
        assert_eq!(edit("x", Some(3)), to("/volume/x"));
        assert_eq!(edit("", Some(3)), to("/volume/..data"));
        assert_eq!(edit("x", None), None);
    }
}
