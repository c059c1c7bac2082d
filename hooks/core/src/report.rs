//! What is told of one look at a bundle or a node: the same words in the journal, in logs and on the command line.

use std::path::PathBuf;

use serde::Serialize;

use crate::judge::Finding;

/// The report of one admission or inspection. Its JSON form is what `--json` prints and what the journal holds.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// The bundle that was looked at.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bundle: Option<PathBuf>,
    /// The container, as the spec's annotations name it.
    #[serde(skip_serializing_if = "Container::is_empty")]
    pub container: Container,
    /// Every bind that is not foreign.
    pub binds: Vec<BindReport>,
    /// How many binds are foreign.
    pub foreign: usize,
    /// What went wrong with the look itself.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
    /// What it took, in microseconds.
    pub took_us: u64,
}

/// A container by the names that the CRI annotations give it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Container {
    /// Its name in the pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The pod's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// The pod's namespace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// The pod's uid.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uid: Option<String>,
}

impl Container {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// One bind of a report.
#[derive(Debug, Clone, Serialize)]
pub struct BindReport {
    /// The bind's source.
    pub source: PathBuf,
    /// Its destination in the container.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub destination: Option<PathBuf>,
    /// `subpath` or `host-root`.
    pub kind: &'static str,
    /// The verdict's name.
    pub verdict: &'static str,
    /// Why.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// What was done, or would be done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outcome: Option<Outcome>,
}

impl BindReport {
    /// The report of a finding, and what came of it.
    pub fn from_finding(finding: &Finding, outcome: Option<Outcome>) -> Self {
        Self {
            source: finding.source.clone(),
            destination: finding.destination.clone(),
            kind: finding.kind.name(),
            verdict: finding.verdict.name(),
            reason: finding.verdict.reason(),
            outcome,
        }
    }
}

/// What came of a finding.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "what", rename_all = "kebab-case")]
pub enum Outcome {
    /// The current target is bound in the stale one's place.
    Rebound {
        /// How often it had to be tried while the volume changed.
        tries: u32,
    },
    /// Somebody else had mended it meanwhile.
    AlreadyCurrent,
    /// The spec's source points at the volume's own path.
    PointedAtVolume {
        /// The new source.
        source: PathBuf,
    },
    /// The spec asks for rslave now.
    MadeRslave,
    /// What would be done if it were not only looked at.
    WouldBe {
        /// In words.
        done: &'static str,
    },
    /// It was tried and failed; the runtime gets the bind as it was.
    Failed {
        /// Why.
        why: String,
    },
}

impl Outcome {
    /// The outcome in a few words.
    pub fn in_words(&self) -> String {
        match self {
            Self::Rebound { tries: 1 } => "re-bound to the current target".to_owned(),
            Self::Rebound { tries } => format!("re-bound to the current target, at try {tries}"),
            Self::AlreadyCurrent => "mended by somebody else meanwhile".to_owned(),
            Self::PointedAtVolume { source } => format!("source pointed at {}", source.display()),
            Self::MadeRslave => "made rslave".to_owned(),
            Self::WouldBe { done } => format!("would be {done}"),
            Self::Failed { why } => format!("could not be mended: {why}"),
        }
    }
}
