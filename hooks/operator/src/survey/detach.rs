//! Detaches a stale subpath's mount, and nothing more: the kubelet binds it again when it next
//! starts the container.
//!
//! An operator wants this on a node whose kubelet has the fix of 1.19 and where a re-bind is not
//! possible; kubediag's recoverer does the same. Until the kubelet binds again, the path shows the
//! empty file underneath.

use std::time::Instant;

use bindguard_core::error_chain;
use bindguard_core::judge::{Verdict, VerdictName, judge_subpath};
use bindguard_core::kubelet::VolumeSubpath;
use bindguard_guard::Probes;
use bindguard_sys::Mounts;
use bindguard_sys::observe::HeldSubpath;
use bindguard_sys::replace::detach;

/// The reason why a mount was not detached.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotDetached {
    /// A guard repaired it, or the pod went away.
    #[error("it is no longer stale: {0}")]
    NoLongerStale(VerdictName),
    /// Detaching failed.
    #[error("{0}")]
    Failed(String),
}

/// Detaches the mount of a subpath that is still stale: the very mount that was judged, whatever a
/// guard attaches meanwhile.
pub(crate) fn detach_stale(subpath: &VolumeSubpath) -> Result<(), NotDetached> {
    let held = HeldSubpath::hold(subpath.clone());
    let probes = Probes::for_repairs(Instant::now());
    match judge_subpath(subpath, &probes.observe_one(&held, &Mounts::default())) {
        Verdict::Stale { .. } => {}
        verdict => return Err(NotDetached::NoLongerStale(verdict.name())),
    }
    let stale = held
        .handle()
        .ok_or_else(|| NotDetached::Failed("it went away".to_owned()))?;
    detach(stale).map_err(|error| NotDetached::Failed(error_chain(&error)))
}
