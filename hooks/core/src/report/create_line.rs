//! A line about a create: the findings and outcomes of the guard.

use std::collections::BTreeMap;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::RecordedReport;
use super::journal_line::LineKind;

/// A line about a create. `R` is a reference to a [`Report`](super::Report) in a line that is
/// written.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct CreateLine<R = RecordedReport> {
    version: u32,
    /// Absent in a line of version 1.
    #[serde(default, skip_serializing_if = "LineKind::is_create")]
    kind: LineKind,
    /// RFC 3339, UTC; none if the clock shows a year past 9999.
    pub time: Option<String>,
    /// The version of bindguard that wrote the line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bindguard: Option<String>,
    /// The container's id, as the runtime gets it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Which create of the container this was, counted from 0.
    pub attempt: u32,
    /// The container's init, in a line about a container that was created.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Why policy refused the create, if it did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
    /// Why no guard checked the create; absent if a guard did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unchecked: Option<Unchecked>,
    /// The findings and outcomes.
    #[serde(flatten)]
    pub report: R,
    /// The number of binds that are not in the line, because it would be too long.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub omitted_binds: Option<usize>,
    /// Keys of a newer version.
    #[serde(flatten)]
    unknown: BTreeMap<String, Value>,
}

/// Why no guard checked a create.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Unchecked {
    /// The guard did not answer in time, and the shim killed it.
    Late,
    /// The guard ended without an answer.
    Died,
    /// The shim found no guard.
    Missing,
}

impl Unchecked {
    /// Every reason.
    pub const ALL: [Self; 3] = [Self::Late, Self::Died, Self::Missing];

    /// The word in the journal.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Late => "late",
            Self::Died => "died",
            Self::Missing => "missing",
        }
    }
}

impl FromStr for Unchecked {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL
            .into_iter()
            .find(|reason| reason.as_str() == text)
            .ok_or(())
    }
}

impl<R> CreateLine<R> {
    /// A line of the shim or the wrapper about the first create of a container.
    pub fn new(report: R) -> Self {
        Self::of_kind(LineKind::Create, report)
    }

    /// A line of the NRI plugin. The shim may write a second line about the same create.
    pub fn of_nri_plugin(report: R) -> Self {
        Self::of_kind(LineKind::NriCreate, report)
    }

    fn of_kind(kind: LineKind, report: R) -> Self {
        let (version, unknown) = (kind.version(), BTreeMap::new());
        Self {
            version,
            kind,
            time: None,
            bindguard: Some(env!("CARGO_PKG_VERSION").to_owned()),
            id: None,
            attempt: 0,
            pid: None,
            refused: None,
            unchecked: None,
            report,
            omitted_binds: None,
            unknown,
        }
    }

    /// True if it has a key of a newer version.
    pub(super) fn has_unknown_keys(&self) -> bool {
        !self.unknown.is_empty()
    }
}
