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

mod admit;
mod emptydir_mounts;
mod inspect;
mod probes;
mod prove;
mod rebind;
pub mod refresh;

pub use admit::{Admission, Attempt, admit, admit_spec, admit_with_spec};
pub use bindguard_sys::files::bundle_and_pid;
pub use bindguard_sys::journal::{
    record, record_rebind, record_refresh, record_release, record_unchecked,
};
pub use emptydir_mounts::{NotDetached, detach_below_emptydirs};
pub use inspect::{OpenError, check_bundle, judge_subpaths, planned_outcome};
pub use probes::{Answers, Probes, dead_volume, in_real_folder, kubelet_roots_by_all_names};
pub use prove::{
    ExpectedSources, Proved, prove_container, prove_new_container, uncompared_container,
};
pub use rebind::{NotRebound, rebind};

/// What a program of the guard needs of the kernel and the disk besides.
pub use bindguard_sys::{
    Handle, SourceError, inherited_pipe, leave_room, read_file, restore_inherited_state,
    unless_absent, with_size_errors, write_new_file,
};
