//! The words in which the guard speaks of a bind source.

use std::fmt;
use std::path::PathBuf;

use crate::kubelet::{Layout, MountedVolume, SubPath, TimestampDirectory, Writer};
use crate::mount_table::FsType;
use crate::policy::Kept;
use crate::source::SourceKind;

/// One bind, and what was found of its source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// The bind's position in the spec's `mounts`; `None` when no spec was looked at.
    pub bind: Option<usize>,
    /// The bind's source.
    pub source: PathBuf,
    /// The bind's destination in the container; `None` when no spec was looked at.
    pub destination: Option<PathBuf>,
    /// What the source is.
    pub kind: SourceKind,
    /// What was found.
    pub verdict: Verdict,
}

/// What was found of a bind source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It is what the kubelet would bind today, and lets the host's umounts in where that matters.
    Current,
    /// It is not what the kubelet would bind today, and what would be is there.
    Stale {
        /// How that was told.
        cause: StaleCause,
        /// What can be done, or why nothing can.
        remedy: Result<Remedy, String>,
    },
    /// It is stale, and what the kubelet would bind today is gone, too.
    Orphaned {
        /// How that was told.
        cause: StaleCause,
        /// What is missing.
        lacks: Lack,
        /// A directory that containers wrote can be made again, empty, as the kubelet does for a new container.
        remake: Option<Remedy>,
    },
    /// What has to be mounted is not.
    Unmounted(Unmounted),
    /// A bind that keeps the host's mounts alive, or will not hear of their umounts.
    Pinning(Pinning),
    /// A bind that was made rslave, whose mount in the container has no master all the same.
    WithoutMaster,
    /// Its server does not answer, or its daemon is gone.
    Dead(String),
    /// Whether its server answers is not known: other sources took up the time in which sources are probed.
    NotProbed,
    /// Not bindguard's to judge.
    Foreign,
    /// It could not be told, and this is why.
    Unknown(String),
}

/// How a stale source was told.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StaleCause {
    /// The kernel says that the mount's root was deleted: binding it gives ENOENT.
    #[error("the file it was bound from is deleted")]
    DeletedRoot,
    /// The mount shows a payload directory that `..data` no longer names.
    #[error("it shows the payload of {shown}, and ..data is {current}")]
    OlderPayload {
        /// The payload directory that it shows.
        shown: TimestampDirectory,
        /// The one that `..data` names.
        current: TimestampDirectory,
    },
    /// Another file has its name now.
    #[error("another file has its name now")]
    Replaced,
    /// The volume was mounted anew since.
    #[error("its volume was mounted anew since")]
    OtherDevice,
    /// The filesystem is there again, this mount of it is dead: a daemon that was restarted, a handle that the server forgot.
    #[error("it answers: {0}, and its volume is alive")]
    DeadMount(String),
    /// It shows its volume's own root, which a `subPath` never names.
    #[error("it shows the whole volume")]
    WrongRoot,
    /// The kubelet bound a directory of its own making because the key was missing then.
    #[error("a directory has the place of its key")]
    Placeholder,
}

/// What is not mounted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unmounted {
    /// A volume-subpath.
    Subpath,
    /// A volume; `found`: what is mounted in its place.
    Volume {
        /// The volume.
        volume: MountedVolume,
        /// Another filesystem than its plugin mounts.
        found: Option<FsType>,
    },
}

impl fmt::Display for Unmounted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Subpath => f.write_str("nothing is mounted there: a container would see the empty file underneath"),
            Self::Volume { volume, found: None } => {
                write!(
                    f,
                    "{volume} is not mounted: a container would write to the node's own disk; usually {}",
                    volume.required_mount().usual_cause()
                )
            }
            Self::Volume { volume, found: Some(fs_type) } => {
                write!(
                    f,
                    "{volume} shows a {} filesystem, which its plugin does not mount; usually {}",
                    fs_type.0,
                    volume.required_mount().usual_cause()
                )
            }
        }
    }
}

/// What a sub path lacks today.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Lack {
    /// The volume has no payload.
    #[error("its volume has no ..data")]
    Payload,
    /// Nothing has the sub path's name.
    #[error("{} is no longer in its volume", .0.display())]
    Key(PathBuf),
    /// What has the sub path's name is a directory where it was a file, or the other way round.
    #[error("{} became a {is}", path.display(), is = if *.directory { "directory" } else { "file" })]
    OtherKind {
        /// The sub path.
        path: PathBuf,
        /// Whether it is a directory today.
        directory: bool,
    },
}

impl Lack {
    /// What the pod's owner can do: no mount can help.
    fn next_step(&self) -> &'static str {
        match self {
            Self::Payload => "delete the pod, so that the kubelet writes the volume anew",
            Self::Key(_) => "put it back, or remove the subPath from the pod",
            Self::OtherKind { .. } => "make it what it was, or delete the pod",
        }
    }
}

/// How a stale subpath can be mended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remedy {
    /// The volume's directory.
    pub volume: PathBuf,
    /// The path within it.
    pub sub_path: SubPath,
    /// Who writes into the volume.
    pub writer: Writer,
    /// How files lie in it.
    pub layout: Layout,
    /// What may be done.
    pub way: Way,
}

/// The ways to mend a stale subpath.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Bind the current target in the stale one's place.
    Rebind,
    /// A directory is in the way of a file: only the spec's source can be pointed elsewhere.
    PointSpecAtVolume,
    /// Make the directory that is gone again, then bind it.
    Remake,
}

/// In what way a host-root bind pins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pinning {
    /// The bind itself has to become rslave.
    pub bind: bool,
    /// `linux.rootfsPropagation` has to become rslave.
    pub rootfs: bool,
    /// The source's mount on the host, when it is private: rslave has no effect there.
    pub private_mount: Option<PathBuf>,
    /// The bind is not to be changed; the fields above then only describe it.
    pub kept: Option<Kept>,
}

impl Verdict {
    /// The verdict's name in reports.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Current => "current",
            Self::Stale { .. } => "stale",
            Self::Orphaned { .. } => "orphaned",
            Self::Unmounted(_) => "unmounted",
            Self::Pinning(_) | Self::WithoutMaster => "pinning",
            Self::Dead(_) => "dead",
            Self::Foreign => "foreign",
            Self::NotProbed | Self::Unknown(_) => "unknown",
        }
    }

    /// Why the verdict is what it is, in one line.
    pub fn reason(&self) -> Option<String> {
        match self {
            Self::Current | Self::Foreign => None,
            Self::Stale { cause, remedy: Ok(_) } => Some(cause.to_string()),
            Self::Stale { cause, remedy: Err(why) } => Some(format!("{cause}; {why}")),
            Self::Orphaned { cause, lacks, remake: Some(_) } => Some(format!("{cause}, and {lacks}")),
            Self::Orphaned { cause, lacks, remake: None } => {
                Some(format!("{cause}, and {lacks}: {}", lacks.next_step()))
            }
            Self::Unmounted(unmounted) => Some(unmounted.to_string()),
            Self::Pinning(pinning) => Some(pinning.reason()),
            Self::WithoutMaster => {
                Some("its mount in the container has no master: the host's umounts do not reach it".to_owned())
            }
            Self::NotProbed => Some("it was not probed: there was no time left to wait for its server".to_owned()),
            Self::Dead(why) | Self::Unknown(why) => Some(why.clone()),
        }
    }
}

impl Pinning {
    fn reason(&self) -> String {
        let asked = match (self.bind, self.rootfs) {
            (true, true) => "neither the bind nor linux.rootfsPropagation is rslave",
            (true, false) => "the bind is not rslave",
            (false, true) => "linux.rootfsPropagation is not rslave",
            (false, false) => "the bind is rslave",
        };
        let effect = match &self.private_mount {
            Some(mount) => format!(", and rslave has no effect: {} is private on the host", mount.display()),
            None => String::new(),
        };
        let kept = match self.kept {
            Some(Kept::RecursivelyReadOnly) => "; it is recursively read-only (rro), which needs a private bind",
            Some(Kept::ReadOnly) => "; it is read-only, and policy keeps read-only binds as the pod has them",
            None => "",
        };
        format!("the container would keep the host's mounts alive: {asked}{effect}{kept}")
    }
}
