//! A line about the refresh of a running container.

use std::borrow::Cow;
use std::fmt;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::journal_line::LineKind;
use super::{Actor, microseconds};
use crate::identity::Identity;
use crate::refresh::RefusedReason;
use crate::refresh_request::Notify;
use crate::source::KindName;

/// A line about a running container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RefreshLine {
    version: u32,
    kind: LineKind,
    /// RFC 3339, UTC; none if the clock shows a year past 9999.
    pub time: Option<String>,
    /// The program that acted.
    pub by: Actor,
    /// The container's id.
    pub id: String,
    /// The container, by its names.
    #[serde(default, skip_serializing_if = "Identity::is_empty")]
    pub container: Identity,
    /// The mounts that were stale.
    pub mounts: Vec<RefreshedMount>,
    /// The notification, if the pod requested a notification and a mount was replaced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub notification: Option<Notification>,
    /// Errors that kept the whole container from its refresh.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
    /// The number of mounts that are not in the line, because it would be too long.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub omitted_mounts: Option<usize>,
    /// Total time, in microseconds.
    pub duration_us: u64,
}

impl RefreshLine {
    /// A line about a container whose mounts are all current.
    pub fn new(by: Actor, id: &str, container: Identity) -> Self {
        let kind = LineKind::Refresh;
        Self {
            version: kind.version(),
            kind,
            time: None,
            by,
            id: id.to_owned(),
            container,
            mounts: Vec::new(),
            notification: None,
            problems: Vec::new(),
            omitted_mounts: None,
            duration_us: 0,
        }
    }

    /// Sets the total time.
    pub fn set_duration(&mut self, elapsed: Duration) {
        self.duration_us = microseconds(elapsed);
    }

    /// True if a mount is still stale, or something failed.
    pub fn has_unrepaired(&self) -> bool {
        let is_left = |mount: &RefreshedMount| !mount.outcome.is_replaced();
        let is_failed = |notification: &Notification| notification.error.is_some();
        self.mounts.iter().any(is_left)
            || !self.problems.is_empty()
            || self.notification.as_ref().is_some_and(is_failed)
    }
}

/// A stale mount of a container, and the result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RefreshedMount {
    /// Its mount point in the container.
    pub destination: String,
    /// The current file on the host.
    pub source: String,
    /// The kind of the bind, if the bind is a host root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<KindName>,
    /// The result.
    pub outcome: MountResult,
}

/// The result for a stale mount of a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "result", rename_all = "kebab-case", deny_unknown_fields)]
pub enum MountResult {
    /// The container shows the current file.
    Replaced {
        /// The method.
        method: AttachMethod,
    },
    /// The stale mount was not replaced.
    Stale,
    /// The volume lost the key: the container keeps the old content.
    KeyGone,
    /// The container mounted something over the mount, or in its place.
    Hidden,
    /// Mounts are in the stale directory.
    Occupied,
    /// A bind of the spec that was mounted in a directory of the volume is gone.
    Missing,
    /// The volume changed faster than the mount could be replaced.
    Restless,
    /// A rule leaves the mount as it is.
    Refused {
        /// The reason.
        reason: RefusedReason,
        /// The symlink, folder, file or mount that the rule is about.
        path: String,
        /// Details that the reason lacks.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        error: Option<String>,
    },
    /// It could not be replaced.
    Failed {
        /// Why.
        error: String,
    },
}

/// The method that attached a new mount.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AttachMethod {
    /// `MOVE_MOUNT_BENEATH`, Linux 6.5 and newer.
    Beneath,
    /// Through propagation.
    Tucked,
    /// An earlier refresh had attached the new mount; this refresh detached the stale mount.
    Finished,
}

/// The notification of an application after a refresh.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Notification {
    /// The notification, as an annotation requests it.
    pub request: Notify,
    /// Why the application was not notified.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl RefreshedMount {
    /// A mount of a container, and the file on the host that it is to show.
    pub fn new(destination: &Path, source: &Path, outcome: MountResult) -> Self {
        let text = |path: &Path| path.to_string_lossy().into_owned();
        Self {
            destination: text(destination),
            source: text(source),
            kind: None,
            outcome,
        }
    }

    /// True for a bind of the host's root, which keeps old mounts, not old content.
    pub fn is_host_root(&self) -> bool {
        self.kind == Some(KindName::HostRoot)
    }

    /// Why the container does not show the current file.
    pub fn reason(&self) -> Option<Cow<'_, str>> {
        Some(match &self.outcome {
            MountResult::Replaced { .. } | MountResult::Stale => return None,
            MountResult::KeyGone => {
                let key = self.source.rsplit('/').next().unwrap_or_default();
                format!("its volume has no {key} any more").into()
            }
            MountResult::Hidden => "the container mounted over it".into(),
            MountResult::Occupied => "other mounts are in the directory, and would be lost".into(),
            MountResult::Missing => {
                "the kernel detached this bind when the directory around it was updated; restart the container".into()
            }
            MountResult::Restless => "its volume changed all the time".into(),
            MountResult::Refused {
                reason,
                path,
                error,
            } => reason.describe(path, error.as_deref()).into(),
            MountResult::Failed { error } => error.into(),
        })
    }
}

impl MountResult {
    /// Its name in JSON and in texts.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Replaced { .. } => "replaced",
            Self::Stale => "stale",
            Self::KeyGone => "key-gone",
            Self::Hidden => "hidden",
            Self::Occupied => "occupied",
            Self::Missing => "missing",
            Self::Restless => "restless",
            Self::Refused { .. } => "refused",
            Self::Failed { .. } => "failed",
        }
    }

    /// True if the container shows the current file.
    pub fn is_replaced(&self) -> bool {
        matches!(self, Self::Replaced { .. })
    }
}

impl fmt::Display for RefreshedMount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.destination)?;
        self.reason()
            .map_or(Ok(()), |reason| write!(f, ": {reason}"))
    }
}
