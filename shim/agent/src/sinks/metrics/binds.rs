//! Checked binds, by verdict and outcome.

use bindguard_core::judge::VerdictName;
use bindguard_core::report::Outcome;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;

/// A counter for each verdict and outcome.
#[derive(Debug, Default)]
pub(super) struct BindCounters(Family<BindLabels, Counter>);

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct BindLabels {
    verdict: &'static str,
    outcome: &'static str,
}

impl BindCounters {
    /// The counters, to be registered.
    pub(super) fn family(&self) -> Family<BindLabels, Counter> {
        self.0.clone()
    }

    /// Starts the counter of wrong mounts at zero: an alert on an increase needs the zero before
    /// the first wrong mount.
    pub(super) fn start_wrong(&self) {
        let labels = BindLabels {
            verdict: VerdictName::Wrong.as_str(),
            outcome: name_of(None),
        };
        drop(self.0.get_or_create(&labels));
    }

    /// Counts a bind.
    pub(super) fn count(&self, verdict: VerdictName, outcome: Option<&Outcome>) {
        let labels = BindLabels {
            verdict: verdict.as_str(),
            outcome: name_of(outcome),
        };
        self.0.get_or_create(&labels).inc();
    }
}

fn name_of(outcome: Option<&Outcome>) -> &'static str {
    match outcome {
        None => "none",
        Some(Outcome::Rebound { .. }) => "rebound",
        Some(Outcome::AlreadyCurrent) => "already_current",
        Some(Outcome::Detached) => "detached",
        Some(Outcome::PointedAtVolume { .. }) => "pointed_at_volume",
        Some(Outcome::MadeRslave) => "made_rslave",
        Some(Outcome::NeedsSharedMount { .. }) => "needs_shared_mount",
        Some(Outcome::Planned { .. }) => "planned",
        Some(Outcome::Refused) => "refused",
        Some(Outcome::Failed { .. }) => "failed",
    }
}
