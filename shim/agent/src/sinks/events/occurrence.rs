//! An occurrence that is worth an event on a pod.

use std::time::Duration;

use bindguard_core::identity::PodName;
use serde::Serialize;

/// The reason of an event: `reason` of the API's object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub enum Reason {
    /// A bind mount was repaired before a create, or by the agent.
    BindMountRepaired,
    /// Policy refused the container.
    ContainerRefused,
    /// A bind mount is stale and stays so.
    BindMountNotRepaired,
    /// The file server or FUSE daemon of a volume does not answer.
    BindSourceDead,
    /// A volume that must be mounted is not.
    VolumeNotMounted,
    /// A container keeps the host's mounts alive.
    HostMountsPinned,
    /// The kubelet will remove files of the host with the pod, or cannot delete the pod.
    MountBelowEmptyDir,
    /// The runtime mounted something else than the spec says.
    BindMountWrong,
    /// A running container got the current file.
    BindMountRefreshed,
    /// A running container still shows an old file.
    BindMountNotRefreshed,
    /// A running container got the current file, and its application does not know.
    ApplicationNotNotified,
    /// An annotation for live refresh has no effect.
    RefreshRequestIgnored,
}

/// The type of an event: `type` of the API's object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum EventType {
    /// Nothing is wrong any more.
    Normal,
    /// Something is.
    Warning,
}

impl Reason {
    /// Its type.
    pub fn event_type(self) -> EventType {
        match self {
            Self::BindMountRepaired | Self::BindMountRefreshed => EventType::Normal,
            Self::ContainerRefused | Self::BindMountNotRepaired | Self::BindSourceDead => {
                EventType::Warning
            }
            Self::VolumeNotMounted | Self::HostMountsPinned => EventType::Warning,
            Self::MountBelowEmptyDir => EventType::Warning,
            Self::BindMountWrong => EventType::Warning,
            Self::BindMountNotRefreshed | Self::ApplicationNotNotified => EventType::Warning,
            Self::RefreshRequestIgnored => EventType::Warning,
        }
    }
}

/// An occurrence on a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Occurrence {
    /// The pod, at least by its uid.
    pub pod: PodName,
    /// The container's name in the pod.
    pub container: Option<String>,
    /// The reason.
    pub reason: Reason,
    /// One or two sentences for the pod's owner.
    pub message: String,
}

impl Occurrence {
    /// True for an event, false for a state: an event with an equal message later is a new
    /// occurrence.
    pub fn is_over(&self) -> bool {
        match self.reason {
            Reason::BindMountRepaired
            | Reason::BindMountRefreshed
            | Reason::BindMountWrong
            | Reason::ApplicationNotNotified => true,
            Reason::ContainerRefused => true,
            Reason::BindMountNotRepaired | Reason::BindSourceDead | Reason::VolumeNotMounted => {
                false
            }
            Reason::HostMountsPinned | Reason::BindMountNotRefreshed => false,
            Reason::RefreshRequestIgnored | Reason::MountBelowEmptyDir => false,
        }
    }
}

/// The time since 1970, and a time that no step of the clock changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment {
    /// For the API's objects.
    pub since_epoch: Duration,
    /// For intervals.
    pub uptime: Duration,
}
