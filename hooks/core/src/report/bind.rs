//! A bind of a report: the finding and its outcome, their JSON form, and the log message.

use std::borrow::Cow;
use std::path::Path;

use serde::{Deserialize, Serialize, Serializer};

use super::Outcome;
use crate::judge::{Finding, VerdictName};
use crate::source::KindName;

/// A bind of a report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BindReport {
    /// The finding.
    pub finding: Finding,
    /// The action that was taken or is planned.
    pub outcome: Option<Outcome>,
}

/// The severity of a log message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Severity {
    /// Something was repaired.
    Info,
    /// Something was not.
    Warning,
}

impl BindReport {
    /// The source's path.
    pub fn source(&self) -> &Path {
        &self.finding.source
    }

    /// The verdict's name.
    pub fn verdict(&self) -> VerdictName {
        self.finding.verdict.name()
    }

    /// The name of the source's kind.
    pub fn kind(&self) -> KindName {
        self.finding.kind.name()
    }

    /// The reason for the verdict; `None` if the bind is healthy.
    pub fn reason(&self) -> Option<String> {
        self.finding.verdict.reason()
    }

    /// True if the bind was repaired.
    pub fn is_repaired(&self) -> bool {
        self.outcome.as_ref().is_some_and(Outcome::is_repaired)
    }

    /// The log message; `None` if the bind is healthy.
    pub fn log_message(&self) -> Option<(Severity, String)> {
        BindRecord::from(self).log_message()
    }
}

/// The JSON form of a bind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BindRecord<'r> {
    /// The bind's source.
    pub source: Cow<'r, str>,
    /// Its destination in the container.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub destination: Option<Cow<'r, str>>,
    /// The kind of the source.
    pub kind: KindName,
    /// The verdict.
    pub verdict: VerdictName,
    /// The reason for the verdict; absent if the bind is healthy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The action that was taken or is planned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outcome: Option<Cow<'r, Outcome>>,
}

impl BindRecord<'_> {
    /// True if it is not healthy, or could not be checked.
    pub fn is_finding(&self) -> bool {
        self.reason.is_some()
    }

    /// True if the bind was repaired.
    pub fn is_repaired(&self) -> bool {
        self.outcome
            .as_ref()
            .is_some_and(|outcome| outcome.is_repaired())
    }

    /// The log message; `None` if the bind is healthy.
    pub fn log_message(&self) -> Option<(Severity, String)> {
        let reason = self.reason.as_deref()?;
        let severity = if self.is_repaired() {
            Severity::Info
        } else {
            Severity::Warning
        };
        let outcome = self
            .outcome
            .as_deref()
            .map_or_else(|| "left as it is".to_owned(), Outcome::to_string);
        let destination = self.destination.as_deref();
        let destination = destination
            .map(|path| format!(" at {path}"))
            .unwrap_or_default();
        let (source, verdict) = (&self.source, self.verdict);
        Some((
            severity,
            format!("bind of {source}{destination} is {verdict}: {reason}; {outcome}"),
        ))
    }

    /// The same, of its own.
    fn into_owned(self) -> BindRecord<'static> {
        BindRecord {
            source: self.source.into_owned().into(),
            destination: self.destination.map(|path| path.into_owned().into()),
            outcome: self.outcome.map(|outcome| Cow::Owned(outcome.into_owned())),
            kind: self.kind,
            verdict: self.verdict,
            reason: self.reason,
        }
    }

    /// The findings among these binds.
    pub(super) fn findings(binds: &[BindReport]) -> Vec<BindRecord<'static>> {
        binds
            .iter()
            .map(BindRecord::from)
            .filter(BindRecord::is_finding)
            .map(BindRecord::into_owned)
            .collect()
    }
}

impl<'r> From<&'r BindReport> for BindRecord<'r> {
    fn from(bind: &'r BindReport) -> Self {
        Self {
            source: bind.source().to_string_lossy(),
            destination: bind
                .finding
                .destination
                .as_deref()
                .map(Path::to_string_lossy),
            kind: bind.kind(),
            verdict: bind.verdict(),
            reason: bind.reason(),
            outcome: bind.outcome.as_ref().map(Cow::Borrowed),
        }
    }
}

impl Serialize for BindReport {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        BindRecord::from(self).serialize(serializer)
    }
}
