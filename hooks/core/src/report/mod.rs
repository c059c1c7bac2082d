//! The report of a check of a bundle or a node, for the journal, logs and the command line.
//!
//! A bind keeps its [`Finding`] and [`Outcome`] as types until a program prints them.
//! [`BindRecord`] is the only JSON form: every report is written through it, and the journal is
//! read through it.

mod journal_line;

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize, Serializer};

use crate::identity::Identity;
use crate::judge::{Finding, Verdict, VerdictName};
use crate::places::{KindName, SourceKind};
use crate::text::{cut, shell_word};

pub use crate::report::journal_line::{
    Actor, AttachMethod, CreateLine, JournalLine, MountResult, Notification, RebindLine,
    RefreshLine, RefreshedMount, ReleaseLine, ReleaseResult, ReleasedCopy, Unchecked, UnreadLine,
};

/// The report of an admission or inspection.
pub type Report = ReportOf<BindReport>;

/// A report that was read from a journal.
pub type RecordedReport = ReportOf<BindRecord>;

/// A report with its binds as [`BindReport`]s, or as [`BindRecord`]s of a journal.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ReportOf<B> {
    /// The checked bundle. Its path need not be text.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "as_text")]
    pub bundle: Option<PathBuf>,
    /// The container, as the spec's annotations name it.
    #[serde(default, skip_serializing_if = "Identity::is_empty")]
    pub container: Identity,
    /// Every bind that is not foreign.
    pub binds: Vec<B>,
    /// The number of foreign binds.
    pub foreign: usize,
    /// The number of binds whose mounts in the container cannot be compared with the spec.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub unproven: usize,
    /// Errors of the check itself.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
    /// Time until every bind was judged, in microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inspection_us: Option<u64>,
    /// Total time, in microseconds.
    pub duration_us: u64,
}

impl<B> Default for ReportOf<B> {
    fn default() -> Self {
        Self {
            bundle: None,
            container: Identity::default(),
            binds: Vec::new(),
            foreign: 0,
            unproven: 0,
            problems: Vec::new(),
            inspection_us: None,
            duration_us: 0,
        }
    }
}

impl Report {
    /// An empty report on a bundle.
    pub fn about_bundle(bundle: &Path) -> Self {
        Self {
            bundle: Some(bundle.to_owned()),
            ..Self::default()
        }
    }

    /// Adds findings and the outcome of each. Foreign binds are only counted.
    pub fn add(&mut self, findings: Vec<Finding>, outcome: impl Fn(&Finding) -> Option<Outcome>) {
        for finding in findings {
            if finding.verdict == Verdict::Foreign {
                self.foreign += 1;
                continue;
            }
            let outcome = outcome(&finding);
            self.binds.push(BindReport { finding, outcome });
        }
    }
    /// Sets the time until every bind was judged.
    pub fn set_inspection_time(&mut self, elapsed: Duration) {
        self.inspection_us = Some(microseconds(elapsed));
    }

    /// Sets the total time.
    pub fn set_duration(&mut self, elapsed: Duration) {
        self.duration_us = microseconds(elapsed);
    }
}

fn as_text<S: Serializer>(path: &Option<PathBuf>, serializer: S) -> Result<S::Ok, S::Error> {
    let path = path.as_deref().map(Path::to_string_lossy);
    path.serialize(serializer)
}

#[allow(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde passes a reference"
)]
fn is_zero(number: &usize) -> bool {
    *number == 0
}

fn microseconds(elapsed: Duration) -> u64 {
    u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX)
}

// A bind of a report: the finding and its outcome, their JSON form, and the log message.

/// A bind of a report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BindReport {
    pub finding: Finding,
    /// The action that was taken or is planned.
    pub outcome: Option<Outcome>,
}

impl BindReport {
    pub fn source(&self) -> &Path {
        &self.finding.source
    }

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
    pub fn log_message(&self) -> Option<String> {
        BindRecord::from(self).log_message()
    }
}

/// The JSON form of a bind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BindRecord {
    pub source: String,
    /// Its destination in the container.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub destination: Option<String>,
    /// The kind of the source.
    pub kind: KindName,
    pub verdict: VerdictName,
    /// The reason for the verdict; absent if the bind is healthy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The action that was taken or is planned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outcome: Option<Outcome>,
}

impl BindRecord {
    /// True if it is not healthy, or could not be checked.
    pub fn is_finding(&self) -> bool {
        self.reason.is_some()
    }

    /// True if the bind was repaired.
    pub fn is_repaired(&self) -> bool {
        self.outcome.as_ref().is_some_and(Outcome::is_repaired)
    }

    /// The log message; `None` if the bind is healthy.
    pub fn log_message(&self) -> Option<String> {
        let reason = self.reason.as_deref()?;
        let mut message = format!("bind of {}", self.source);
        if let Some(path) = &self.destination {
            message += &format!(" at {path}");
        }
        message += &format!(" is {}: {reason}; ", self.verdict);
        match &self.outcome {
            Some(outcome) => message += &outcome.to_string(),
            None => message += "left as it is",
        }
        Some(message)
    }
}

impl From<&BindReport> for BindRecord {
    fn from(BindReport { finding, outcome }: &BindReport) -> Self {
        let text = |path: &PathBuf| path.to_string_lossy().into_owned();
        Self {
            source: text(&finding.source),
            destination: finding.destination.as_ref().map(text),
            kind: finding.kind.name(),
            verdict: finding.verdict.name(),
            reason: finding.verdict.reason(),
            outcome: outcome.clone(),
        }
    }
}

impl Serialize for BindReport {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        BindRecord::from(self).serialize(serializer)
    }
}

// The outcome of a finding.

/// The outcome of a finding.
#[derive(Debug, Clone, PartialEq, Eq, strum::IntoStaticStr, Serialize, Deserialize)]
#[serde(tag = "result", rename_all = "kebab-case", deny_unknown_fields)]
#[strum(serialize_all = "kebab-case")]
pub enum Outcome {
    /// The current target is bound in place of the stale target.
    Rebound {
        /// The number of tries; the volume changed during the earlier tries.
        tries: u32,
    },
    /// Another repairer made the bind current meanwhile.
    AlreadyCurrent,
    /// The stale mount is detached; the kubelet binds again when it next starts the container.
    Detached,
    /// The spec's source points at the volume's own path.
    PointedAtVolume { source: PathBuf },
    /// The spec now requests rslave.
    MadeRslave,
    /// The spec now requests rslave, which helps only after this command is run on the host.
    NeedsSharedMount { command: String },
    /// The action that an admission or a repair would take; this run only checked.
    Planned { action: PlannedAction },
    /// Policy refused the container.
    Refused,
    /// The repair failed; the runtime gets the bind as it was.
    Failed { error: String },
}

/// An action that a check plans and does not take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::Display, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PlannedAction {
    /// Bind the current target in place of the stale target.
    #[strum(to_string = "re-bound to the current target")]
    Rebind,
    /// Create the missing directory again, then bind it.
    #[strum(to_string = "created again and bound")]
    Remake,
    /// Point the spec's source at the volume's own path.
    #[strum(to_string = "pointed at the volume's own path")]
    PointAtVolume,
    /// Request rslave in the spec.
    #[strum(to_string = "made rslave")]
    MakeRslave,
    /// Refuse the container.
    #[strum(to_string = "refused")]
    Refuse,
}

impl Outcome {
    /// The command that helps if a mount on the host is private: mount(8). systemd does the same
    /// with `/` at boot.
    pub fn needs_shared(mount_point: &Path) -> Self {
        Self::NeedsSharedMount {
            command: format!("mount --make-rshared {}", shell_word(mount_point)),
        }
    }

    /// True if the bind is healthy now, or its stale mount is gone.
    pub fn is_repaired(&self) -> bool {
        match self {
            Self::Rebound { .. } | Self::AlreadyCurrent | Self::Detached => true,
            Self::PointedAtVolume { .. } | Self::MadeRslave => true,
            Self::NeedsSharedMount { .. } | Self::Planned { .. } => false,
            Self::Refused | Self::Failed { .. } => false,
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rebound { tries: 1 } => f.write_str("re-bound to the current target"),
            Self::Rebound { tries } => write!(f, "re-bound to the current target, at try {tries}"),
            Self::AlreadyCurrent => f.write_str("another repair was first"),
            Self::Detached => {
                f.write_str("detached: the kubelet binds it anew at the container's next start")
            }
            Self::PointedAtVolume { source } => write!(f, "source pointed at {}", source.display()),
            Self::MadeRslave => f.write_str("made rslave"),
            Self::NeedsSharedMount { command } => {
                write!(f, "for it to have one, run on the host: {command}")
            }
            Self::Refused => f.write_str("the container is refused"),
            Self::Planned { action } => write!(f, "would be {action}"),
            Self::Failed { error } => write!(f, "could not be repaired: {error}"),
        }
    }
}

// The binds that can explain a runtime's error: unrepaired binds whose mount fails.
//
// A runtime's error names a path below `volume-subpaths` and ENOENT. The pod's owner needs the
// volume, the reason and the next step, in the error that reaches the pod's events.

/// The number of binds that are named: an event has room for a kibibyte.
const MAX_BINDS: usize = 3;
/// The maximum length of the text for a bind, in bytes.
const MAX_TEXT: usize = 320;

/// The reasons in a single line, with the next step; `None` when no bind explains a failure of the
/// runtime.
pub fn explain_unrepaired(binds: &[BindReport]) -> Option<String> {
    let reasons: Vec<String> = binds.iter().filter_map(explain).collect();
    let mut text = cut(reasons.first()?, MAX_TEXT).into_owned();
    for reason in reasons.iter().take(MAX_BINDS).skip(1) {
        text += "; ";
        text += &cut(reason, MAX_TEXT);
    }
    if reasons.len() > MAX_BINDS {
        text += &format!("; and {} more", reasons.len() - MAX_BINDS);
    }
    Some(text)
}

fn explain(BindReport { finding, outcome }: &BindReport) -> Option<String> {
    let failed = match outcome {
        None | Some(Outcome::Planned { .. }) => String::new(),
        Some(failed @ Outcome::Failed { .. }) => format!("; {failed}"),
        Some(_) => return None,
    };
    let next = match &finding.verdict {
        // The reason contains the next step, which is the same for every reader.
        Verdict::Orphaned { remake: None, .. } => "",
        Verdict::Orphaned { .. } | Verdict::Stale { .. } => "; run on its node: bindguard diagnose",
        Verdict::Dead(_) => "; mount it anew on the node",
        // A mount of these succeeds, or its result is unknown.
        Verdict::Current | Verdict::Unmounted(_) | Verdict::Pinning(_) | Verdict::Wrong(_) => {
            return None;
        }
        Verdict::Foreign | Verdict::NotProbed | Verdict::Unknown(_) => return None,
    };
    // The pod's owner knows the bind by its destination; the runtime's error has the source.
    let path = finding.destination.as_ref().unwrap_or(&finding.source);
    let subject = match &finding.kind {
        SourceKind::Subpath(subpath) => format!("subPath of volume {}", subpath.volume()),
        SourceKind::MountedVolume(_) | SourceKind::PlainVolume => "volume".to_owned(),
        SourceKind::InVolume | SourceKind::HostRoot | SourceKind::Foreign => "mount".to_owned(),
    };
    Some(format!(
        "the {subject} at {} is {}: {}{failed}{next}",
        path.display(),
        finding.verdict.name(),
        finding.verdict.reason()?
    ))
}

#[cfg(test)]
mod unrepaired_tests {
    use std::path::Path;

    use super::*;
    use crate::judge::{Lack, NoRemedy, StaleCause, Unmounted};
    use crate::places::Places;
    use crate::policy::Scope;

    fn finding(verdict: Verdict) -> Finding {
        let source = Path::new("/var/lib/kubelet/pods/u/volume-subpaths/conf/app/0");
        Finding {
            bind: Some(0),
            source: source.to_owned(),
            destination: Some("/etc/app.conf".into()),
            kind: SourceKind::from_path(source, &Places::default(), Scope::default()),
            verdict,
        }
    }

    fn explained(findings: &[Finding], outcome: Option<Outcome>) -> Option<String> {
        let bind = |finding: &Finding| BindReport {
            finding: finding.clone(),
            outcome: outcome.clone(),
        };
        explain_unrepaired(&findings.iter().map(bind).collect::<Vec<_>>())
    }

    fn without_its_key() -> Finding {
        let lacks = Lack::Key("app.conf".into());
        finding(Verdict::Orphaned {
            cause: StaleCause::DeletedRoot,
            lacks,
            remake: None,
        })
    }

    #[test]
    fn a_key_that_is_gone_is_named_with_the_next_step() {
        assert_eq!(
            explained(&[finding(Verdict::Current), without_its_key()], None).unwrap(),
            "the subPath of volume conf at /etc/app.conf is orphaned: the file it was bound from is deleted, and app.conf is \
             no longer in its volume: put it back, or remove the subPath from the pod"
        );
    }

    #[test]
    fn a_repaired_or_mountable_bind_has_no_explanation() {
        let stale = || {
            finding(Verdict::Stale {
                cause: StaleCause::DeletedRoot,
                remedy: Err(NoRemedy::Unreadable("why".to_owned())),
            })
        };
        let repaired = Outcome::Rebound { tries: 1 };
        assert_eq!(explained(&[stale()], Some(repaired)), None);
        assert_eq!(
            explained(&[finding(Verdict::Unmounted(Unmounted::Subpath))], None),
            None
        );
        let failed = Outcome::Failed {
            error: "no such kernel".to_owned(),
        };
        let text = explained(&[stale()], Some(failed)).unwrap();
        assert!(
            text.contains(
                "why; could not be repaired: no such kernel; run on its node: bindguard diagnose"
            ),
            "{text}"
        );
    }

    #[test]
    fn an_event_has_room_for_it() {
        let lacks = Lack::Key("k".repeat(5000).into());
        let long = finding(Verdict::Orphaned {
            cause: StaleCause::DeletedRoot,
            lacks,
            remake: None,
        });
        let text = explained(&vec![long; 9], None).unwrap();
        assert!(
            text.len() < 1024 && text.ends_with("; and 6 more"),
            "{} bytes",
            text.len()
        );
    }
}
