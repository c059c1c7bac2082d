//! An admission, from the bundle to the report.
//!
//! ```text
//! bundle ─ read ─► spec ─ inspect ─► findings ─ plan ─► re-bind, verify ─► edit the spec ─► report
//!                          └── bindguard check and diagnose stop here
//! ```
//!
//! [`admit`] never fails: every error becomes a problem in its report, and the runtime gets the
//! bundle unchanged. A guard that breaks creates is worse than the fault that it guards against.
#![forbid(unsafe_code)]

use std::error::Error;

mod admit;
mod bundle;
mod emptydir_mounts;
mod expect;
mod inspect;
mod journal;
mod probes;
mod prove;
mod rebind;
pub mod refresh;

pub use admit::{Admission, Attempt, admit, admit_spec, admit_with_spec};
pub use bundle::{OpenError, bundle_and_pid};
pub use emptydir_mounts::{NotDetached, detach_below_emptydirs};
pub use expect::{ExpectedSources, dead_volume};
pub use inspect::{check_bundle, judge_subpaths, planned_outcome};
pub use journal::{record, record_rebind, record_refresh, record_release, record_unchecked};
pub use probes::{Answers, Probes, in_real_folder, kubelet_roots_by_all_names};
pub use prove::{Proved, prove_container, prove_new_container, uncompared_container};
pub use rebind::{NotRebound, rebind};

/// Reads a small file that may lie on a server that does not answer, without waiting for that
/// server.
pub use bindguard_sys::read_file;
/// The pipe and the process state that a runtime's caller passes.
pub use bindguard_sys::{inherited_pipe, restore_inherited_state};
/// Runs code in which a write beyond RLIMIT_FSIZE is an error, not the end of the process.
pub use bindguard_sys::{leave_room, with_size_errors};

/// Why a step failed, for people.
#[derive(Debug, thiserror::Error)]
#[error("{act}")]
pub struct SourceError {
    act: String,
    source: Option<Box<dyn Error + Send + Sync>>,
}

impl SourceError {
    pub(crate) fn new(act: impl Into<String>) -> Self {
        Self {
            act: act.into(),
            source: None,
        }
    }

    /// Makes the error of an act from its cause.
    pub(crate) fn of<E: Error + Send + Sync + 'static>(
        act: impl Into<String>,
    ) -> impl FnOnce(E) -> Self {
        move |source| Self {
            act: act.into(),
            source: Some(Box::new(source)),
        }
    }
}
