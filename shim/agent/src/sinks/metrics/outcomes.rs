//! The outcomes of re-binds and refreshes, as labels.

use bindguard_core::report::{MountResult, Outcome};
use bindguard_guard::refresh::RefreshError;
use prometheus_client::encoding::EncodeLabelValue;

#[allow(non_camel_case_types, reason = "the label's values")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
pub(super) enum RebindOutcome {
    rebound,
    already_current,
    reported,
    failed,
}

/// The outcome of a refresh, as a label.
#[allow(non_camel_case_types, reason = "the label's values")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum RefreshResult {
    /// The container shows the current file.
    replaced,
    /// The mount is stale, and policy only reports stale mounts.
    reported,
    /// The bound key was removed from the volume.
    key_gone,
    /// The container mounted something over the stale mount.
    hidden,
    /// Other mounts are in the stale directory.
    occupied,
    /// A bind of the spec in a directory of the volume is gone.
    missing,
    /// The volume changed all the time; the refresh is repeated.
    restless,
    /// A rule leaves the mount as it is. Or the container was not entered, because its namespaces
    /// are unknown or were not made by its runtime.
    refused,
    /// The mount could not be replaced.
    failed,
    /// The application was not notified.
    not_notified,
}

impl RefreshResult {
    pub(super) const ALL: [Self; 10] = [
        Self::replaced,
        Self::reported,
        Self::key_gone,
        Self::hidden,
        Self::occupied,
        Self::missing,
        Self::restless,
        Self::refused,
        Self::failed,
        Self::not_notified,
    ];

    /// The label of an outcome.
    pub fn of(outcome: &MountResult) -> Self {
        match outcome {
            MountResult::Replaced { .. } => Self::replaced,
            MountResult::Stale => Self::reported,
            MountResult::KeyGone => Self::key_gone,
            MountResult::Hidden => Self::hidden,
            MountResult::Occupied => Self::occupied,
            MountResult::Missing => Self::missing,
            MountResult::Restless => Self::restless,
            MountResult::Refused { .. } => Self::refused,
            MountResult::Failed { .. } => Self::failed,
        }
    }

    /// The label of a container that could not be refreshed at all.
    pub fn of_error(error: &RefreshError) -> Self {
        match error {
            RefreshError::NoSpec | RefreshError::OldKernel(_) | RefreshError::Namespace(_) => {
                Self::refused
            }
            RefreshError::MountsOfNode(_) | RefreshError::Sandbox(_) => Self::refused,
            RefreshError::Process(_) | RefreshError::Locked(_) => Self::failed,
        }
    }
}

impl RebindOutcome {
    pub(super) const ALL: [Self; 4] = [
        Self::rebound,
        Self::already_current,
        Self::reported,
        Self::failed,
    ];

    /// `None` if the outcome is not a re-bind's.
    pub(super) fn of(outcome: &Outcome) -> Option<Self> {
        match outcome {
            Outcome::Rebound { .. } => Some(Self::rebound),
            Outcome::AlreadyCurrent => Some(Self::already_current),
            Outcome::Planned { .. } => Some(Self::reported),
            Outcome::Failed { .. } => Some(Self::failed),
            Outcome::Detached | Outcome::PointedAtVolume { .. } | Outcome::MadeRslave => None,
            Outcome::NeedsSharedMount { .. } | Outcome::Refused => None,
        }
    }
}
