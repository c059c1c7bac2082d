//! The report of a check of a bundle or a node, for the journal, logs and the command line.
//!
//! A bind keeps its [`Finding`] and [`Outcome`] as types until a program prints them.
//! [`BindRecord`] is the only JSON form: every report is written through it, and the journal is
//! read through it.

mod bind;
mod create_line;
mod journal_line;
mod outcome;
mod rebind_line;
mod refresh_line;
mod release_line;
mod unrepaired;

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize, Serializer};

use crate::identity::Identity;
use crate::judge::{Finding, Verdict};

pub use bind::{BindRecord, BindReport, Severity};
pub use create_line::{CreateLine, Unchecked};
pub use journal_line::{JournalLine, UnreadLine};
pub use outcome::{Outcome, PlannedAction};
pub use rebind_line::{Actor, RebindLine};
pub use refresh_line::{AttachMethod, MountResult, Notification, RefreshLine, RefreshedMount};
pub use release_line::{ReleaseLine, ReleaseResult, ReleasedCopy};
pub use unrepaired::explain_unrepaired;

/// The report of an admission or inspection.
pub type Report = ReportOf<BindReport>;

/// A report that was read from a journal.
pub type RecordedReport = ReportOf<BindRecord<'static>>;

/// A report with its binds as [`BindReport`]s, or as [`BindRecord`]s of a journal.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ReportOf<B> {
    /// The checked bundle. Its path need not be text.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        serialize_with = "as_text"
    )]
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
    #[serde(default, skip_serializing_if = "Option::is_none")]
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
            match finding.verdict {
                Verdict::Foreign => self.foreign += 1,
                _ => self.binds.push(BindReport {
                    outcome: outcome(&finding),
                    finding,
                }),
            }
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
    path.as_deref()
        .map(Path::to_string_lossy)
        .serialize(serializer)
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
