//! A line about the subpaths of a volume that were re-bound on the host, between creates.

use serde::{Deserialize, Serialize};

use super::journal_line::LineKind;
use super::{BindRecord, Report};
use crate::identity::{Identity, PodName};

/// The program that acted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Actor {
    /// The node agent.
    Agent,
    /// A command of an operator.
    Operator,
    /// The guard, at the end of a pod's sandbox.
    Guard,
}

/// A line about a volume of a pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RebindLine {
    version: u32,
    kind: LineKind,
    /// RFC 3339, UTC; none if the clock shows a year past 9999.
    pub time: Option<String>,
    /// The program that acted.
    pub by: Actor,
    /// The pod; its names are known only if the writer read them.
    pub container: Identity,
    /// The volume's name in the pod's spec.
    pub volume: String,
    /// The subpaths that are not healthy, or were not.
    pub binds: Vec<BindRecord<'static>>,
    /// Errors of the check itself.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
    /// The number of subpaths that are not in the line, because it would be too long.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub omitted_binds: Option<usize>,
    /// Total time, in microseconds.
    pub duration_us: u64,
}

impl RebindLine {
    /// A line with the findings of a report on a volume. Healthy subpaths are left out.
    pub fn new(by: Actor, pod_uid: &str, volume: &str, report: &Report) -> Self {
        let kind = LineKind::Rebind;
        Self {
            version: kind.version(),
            kind,
            time: None,
            by,
            container: Identity {
                container: None,
                pod: PodName::of_uid(pod_uid),
            },
            volume: volume.to_owned(),
            binds: BindRecord::findings(&report.binds),
            problems: report.problems.clone(),
            omitted_binds: None,
            duration_us: report.duration_us,
        }
    }

    /// The line's volume as `UID/VOLUME`.
    pub fn about(&self) -> String {
        let uid = self.container.pod.uid.as_deref().unwrap_or_default();
        format!("{uid}/{}", self.volume)
    }
}
