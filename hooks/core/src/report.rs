//! The report of one check of a bundle or a node, with one wording for the journal, logs and the command line.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Serialize, Serializer};

use crate::judge::{Finding, Verdict};
use crate::spec::SpecView;

/// The report of one admission or inspection. `--json` and the journal contain its JSON form.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Report {
    /// The checked bundle. Its path need not be text.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "as_shown")]
    pub bundle: Option<PathBuf>,
    /// The container, as the spec's annotations name it.
    #[serde(skip_serializing_if = "Container::is_empty")]
    pub container: Container,
    /// Every bind that is not foreign.
    pub binds: Vec<BindReport>,
    /// The number of foreign binds.
    pub foreign: usize,
    /// Errors of the check itself.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
    /// Time until every bind was judged, in microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub looked_us: Option<u64>,
    /// Total time, in microseconds.
    pub took_us: u64,
}

/// The severity of a remark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loudness {
    /// Something was repaired.
    Info,
    /// Something was not.
    Warning,
}

impl Report {
    /// An empty report on a bundle.
    pub fn about_bundle(bundle: &Path) -> Self {
        Self { bundle: Some(bundle.to_owned()), ..Self::default() }
    }

    /// Adds findings and the outcome of each.
    pub fn tell(&mut self, findings: &[Finding], outcome: impl Fn(&Finding) -> Option<Outcome>) {
        let (foreign, ours): (Vec<_>, Vec<_>) =
            findings.iter().partition(|finding| finding.verdict == Verdict::Foreign);
        self.foreign = foreign.len();
        self.binds = ours.into_iter().map(|finding| BindReport::from_finding(finding, outcome(finding))).collect();
    }

    /// Sets the time until every bind was judged.
    pub fn looked(&mut self, elapsed: Duration) {
        self.looked_us = Some(microseconds(elapsed));
    }

    /// Sets the total time.
    pub fn took(&mut self, elapsed: Duration) {
        self.took_us = microseconds(elapsed);
    }
}

fn as_shown<S: Serializer>(path: &Option<PathBuf>, serializer: S) -> Result<S::Ok, S::Error> {
    path.as_deref().map(Path::to_string_lossy).serialize(serializer)
}

fn microseconds(elapsed: Duration) -> u64 {
    u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX)
}

/// A container, by the names in its annotations.
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
    /// The names in a spec's annotations: containerd's CRI plugin sets its own, CRI-O passes the kubelet's labels on
    /// (`pkg/kubelet/types/labels.go` of Kubernetes).
    pub fn from_spec(spec: &SpecView<'_>) -> Self {
        let named = |containerds: &str, kubelets: &str| {
            spec.annotation(containerds).or_else(|| spec.annotation(kubelets)).map(str::to_owned)
        };
        Self {
            name: named("io.kubernetes.cri.container-name", "io.kubernetes.container.name"),
            pod: named("io.kubernetes.cri.sandbox-name", "io.kubernetes.pod.name"),
            namespace: named("io.kubernetes.cri.sandbox-namespace", "io.kubernetes.pod.namespace"),
            uid: named("io.kubernetes.cri.sandbox-uid", "io.kubernetes.pod.uid"),
        }
    }

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
    /// `subpath`, `volume`, `in-volume` or `host-root`.
    pub kind: &'static str,
    /// The verdict's name.
    pub verdict: &'static str,
    /// Why.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The action that was taken or would be taken.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outcome: Option<Outcome>,
}

impl BindReport {
    /// The report of a finding and its outcome.
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

    /// The report of a volume that no plugin has to mount; only a check of the node reports it.
    pub fn of_volume(directory: &Path, verdict: &Verdict) -> Self {
        Self {
            source: directory.to_owned(),
            destination: None,
            kind: "volume",
            verdict: verdict.name(),
            reason: verdict.reason(),
            outcome: None,
        }
    }

    /// The log message; `None` if the bind is healthy.
    pub fn remark(&self) -> Option<(Loudness, String)> {
        let reason = self.reason.as_deref()?;
        let loudness = match &self.outcome {
            Some(Outcome::Rebound { .. } | Outcome::AlreadyCurrent | Outcome::Detached) => Loudness::Info,
            Some(Outcome::PointedAtVolume { .. } | Outcome::MadeRslave) => Loudness::Info,
            Some(Outcome::NeedsSharedMount { .. } | Outcome::Refused | Outcome::WouldBe { .. }) => Loudness::Warning,
            Some(Outcome::Failed { .. }) | None => Loudness::Warning,
        };
        let outcome = self.outcome.as_ref().map_or_else(|| "left as it is".to_owned(), Outcome::in_words);
        let destination = self.destination.as_ref().map(|path| format!(" at {}", path.display())).unwrap_or_default();
        Some((
            loudness,
            format!("bind of {}{destination} is {}: {reason}; {outcome}", self.source.display(), self.verdict),
        ))
    }
}

/// The action for a container whose source policy does not accept.
pub const REFUSED: &str = "refused";

/// The outcome of a finding.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "what", rename_all = "kebab-case")]
pub enum Outcome {
    /// The current target is bound in place of the stale one.
    Rebound {
        /// The number of tries; the volume changed during the earlier ones.
        tries: u32,
    },
    /// Another repair made it current meanwhile.
    AlreadyCurrent,
    /// The stale mount is detached; the kubelet binds again when it next starts the container.
    Detached,
    /// The spec's source points at the volume's own path.
    PointedAtVolume {
        /// The new source.
        source: PathBuf,
    },
    /// The spec now requests rslave.
    MadeRslave,
    /// The spec now requests rslave, which helps only after this command is run on the host.
    NeedsSharedMount {
        /// The command.
        command: String,
    },
    /// The action that a repair would take; this run only checked.
    WouldBe {
        /// In words.
        done: &'static str,
    },
    /// Policy refused the container.
    Refused,
    /// The repair failed; the runtime gets the bind as it was.
    Failed {
        /// Why.
        why: String,
    },
}

impl Outcome {
    /// The command that helps if a mount on the host is private: mount(8). systemd does the same with `/` at boot.
    pub fn needs_shared(mount_point: &Path) -> Self {
        Self::NeedsSharedMount { command: format!("mount --make-rshared {}", mount_point.display()) }
    }

    /// The outcome in a few words.
    pub fn in_words(&self) -> String {
        match self {
            Self::Rebound { tries: 1 } => "re-bound to the current target".to_owned(),
            Self::Rebound { tries } => format!("re-bound to the current target, at try {tries}"),
            Self::AlreadyCurrent => "another repair was first".to_owned(),
            Self::Detached => "detached: the kubelet binds it anew at the container's next start".to_owned(),
            Self::PointedAtVolume { source } => format!("source pointed at {}", source.display()),
            Self::MadeRslave => "made rslave".to_owned(),
            Self::NeedsSharedMount { command } => format!("for it to have one, run on the host: {command}"),
            Self::Refused => "the container is refused".to_owned(),
            Self::WouldBe { done } => format!("would be {done}"),
            Self::Failed { why } => format!("could not be repaired: {why}"),
        }
    }
}
