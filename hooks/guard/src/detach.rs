//! Taking a stale subpath's mount away, and no more: the kubelet binds it anew when it starts the container next.
//!
//! That is what somebody wants on a node whose kubelet has the fix of 1.19 and whose re-bind is not possible, and what
//! kubediag's recoverer does. Until the kubelet comes by, the path shows the empty file underneath.

use std::time::Duration;

use bindguard_core::judge::{Verdict, judge_subpath};
use bindguard_core::kubelet::VolumeSubpath;
use bindguard_sys::Mounts;
use bindguard_sys::observe::HeldSubpath;
use bindguard_sys::pod_lock::PodLock;
use bindguard_sys::swap::detach;

use crate::ask::observe;
use crate::causes::in_full;

/// How long to wait for a guard of the same pod.
const PATIENCE: Duration = Duration::from_secs(2);

/// Why a mount was not taken away.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotDetached {
    /// A guard mended it, or the pod went away.
    #[error("it is no longer stale: {0}")]
    NoLongerStale(&'static str),
    /// It is there still.
    #[error("{0}")]
    Failed(String),
}

/// Detaches the mount of a subpath that is still stale once the pod is locked.
pub(crate) fn detach_stale(subpath: &VolumeSubpath) -> Result<(), NotDetached> {
    let _lock = PodLock::acquire(&subpath.pod_directory(), PATIENCE).map_err(|e| NotDetached::Failed(in_full(e)))?;
    let held = HeldSubpath::hold(subpath.clone());
    match judge_subpath(subpath, &observe(&held, &Mounts::default())) {
        Verdict::Stale { .. } => {}
        verdict => return Err(NotDetached::NoLongerStale(verdict.name())),
    }
    let stale = held.handle().ok_or_else(|| NotDetached::Failed("it went away".to_owned()))?;
    detach(stale).map_err(|error| NotDetached::Failed(error.in_full()))
}
