//! A line about the copies of unmounted mounts that a running container was to release.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::journal_line::LineKind;
use super::{Actor, microseconds};
use crate::identity::Identity;

/// A line about a running container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReleaseLine {
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
    /// The copies.
    pub copies: Vec<ReleasedCopy>,
    /// The number of copies that are not in the line, because it would be too long.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub omitted_copies: Option<usize>,
    /// Total time, in microseconds.
    pub duration_us: u64,
}

/// A copy of a mount that the host has unmounted, and the result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReleasedCopy {
    /// Its mount point in the container.
    pub mount_point: String,
    /// The type of its filesystem.
    pub fs_type: String,
    /// Its device, `major:minor`.
    pub device: String,
    /// The result.
    pub result: ReleaseResult,
    /// Why the copy is not released.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// The result for a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ReleaseResult {
    /// The copy is unmounted, or detached.
    Released,
    /// The copy would be released: a dry run, which has no line in the journal.
    Kept,
    /// The copy is in use.
    Busy,
    /// The copy stays for another reason.
    Refused,
}

impl ReleaseLine {
    /// A line about a container that has no copy.
    pub fn new(by: Actor, id: &str, container: Identity) -> Self {
        let kind = LineKind::Release;
        Self {
            version: kind.version(),
            kind,
            time: None,
            by,
            id: id.to_owned(),
            container,
            copies: Vec::new(),
            omitted_copies: None,
            duration_us: 0,
        }
    }

    /// Sets the total time.
    pub fn set_duration(&mut self, elapsed: Duration) {
        self.duration_us = microseconds(elapsed);
    }

    /// True if the container still has a copy.
    pub fn has_unrepaired(&self) -> bool {
        let is_left = |copy: &ReleasedCopy| copy.result != ReleaseResult::Released;
        self.copies.iter().any(is_left)
    }
}

impl ReleaseResult {
    /// Its name in JSON and in texts.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Released => "released",
            Self::Kept => "kept",
            Self::Busy => "busy",
            Self::Refused => "refused",
        }
    }
}

impl fmt::Display for ReleasedCopy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({} {})", self.mount_point, self.fs_type, self.device)
    }
}
