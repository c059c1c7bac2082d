//! Checked binds, by verdict and outcome.

use bindguard_core::judge::VerdictName;
use bindguard_core::report::Outcome;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;

/// A counter for each verdict and outcome.
pub(super) type BindCounters = Family<[(&'static str, &'static str); 2], Counter>;

/// The labels of a bind.
pub(super) fn bind_labels(
    verdict: VerdictName,
    outcome: Option<&Outcome>,
) -> [(&'static str, &'static str); 2] {
    [("verdict", verdict.as_str()), ("outcome", name_of(outcome))]
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
