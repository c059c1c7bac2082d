//! Verdicts on bind sources, with their causes and remedies.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use strum::{Display, IntoStaticStr};

use crate::judge::PathInVolume;
use crate::kubelet::{MountedVolume, TimestampDirectory, VolumeLayout, Writer};
use crate::mount_table::{Device, FsType};
use crate::policy::Kept;
use crate::proof::Difference;
use crate::source::SourceKind;

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
