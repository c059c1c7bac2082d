//! Fault points: places where a test can kill or stop the guard, and switches that disable newer
//! kernel features.
//!
//! Compiled in only with the feature `fault-points`. `BINDGUARD_FAULT` then names the faults,
//! separated by commas:
//! * `PLACE` kills the process there, as an out-of-memory kill would
//! * `stop:PLACE` stops it there, as a hung server would
//! * `panic:PLACE` panics there
//! * `no-beneath` disables `MOVE_MOUNT_BENEATH`, as before Linux 6.5
//! * `list` prints every place and exits
//!
//! There is a place for each state that a killed guard can leave behind. After each step that
//! changes something, a test can inspect the change.

use crate::named_variants::named_variants;

// In the order in which an admission reaches the places.
named_variants! {
    /// A place at which a test can end the guard.
    FaultPoint,
    /// Its name in `BINDGUARD_FAULT`.
    name,
    /// Nothing is read yet.
    Start = "start",
    /// The spec is read and understood.
    SpecRead = "spec-read",
    /// Every bind is judged, nothing is done yet.
    Judged = "judged",
    /// The subpath and its volume are open and judged again.
    Held = "held",
    /// The current target is open.
    TargetOpened = "target-opened",
    /// A bind of the target exists, attached nowhere.
    Cloned = "cloned",
    /// Older kernels: a thread is in a mount namespace of its own.
    NamespaceUnshared = "namespace-unshared",
    /// Older kernels: a copy of the parent mount lies in that namespace.
    CopyAttached = "copy-attached",
    /// Older kernels: the new mount lies in the copy, and by propagation under the stale mount.
    Tucked = "tucked",
    /// The new mount is attached, the stale mount is not yet detached.
    AfterAttach = "after-attach",
    /// The stale mount is detached; the result is not checked yet.
    Detached = "detached",
    /// The result is checked and current.
    Verified = "verified",
    /// The payload that a swap stranded in the volume is removed.
    Cleared = "cleared",
    /// The file for the edited spec is made beside the old spec, and empty.
    SpecBegun = "spec-begun",
    /// The edited spec is written beside the old spec.
    SpecWritten = "spec-written",
    /// The edited spec is in its place, the runtime not yet started.
    AfterEdit = "after-edit",
    /// The journal's line is written.
    Journaled = "journaled",
    /// The journal is full, locked and about to be moved away.
    Rotating = "rotating",
    /// The full journal is moved away, and there is no new journal yet.
    Rotated = "rotated",
}

/// Kills or stops the process, or panics, if `BINDGUARD_FAULT` names this place.
#[cfg(feature = "fault-points")]
pub fn reach(point: FaultPoint) {
    use rustix::process::{Signal, getpid, kill_process};
    if IS_DISABLED.load(std::sync::atomic::Ordering::Relaxed) {
        return;
    }
    if asks_for("list") {
        FaultPoint::ALL
            .iter()
            .for_each(|point| println!("{}", point.name()));
        std::process::exit(0);
    }
    let signal = match point.name() {
        name if asks_for(name) => Signal::KILL,
        name if asks_for(&format!("stop:{name}")) => Signal::STOP,
        name if asks_for(&format!("panic:{name}")) => panic!("requested at {name}"),
        _ => return,
    };
    // A signal to the own process cannot fail.
    let _ = kill_process(getpid(), signal);
}

/// Does nothing: this build has no fault points.
#[cfg(not(feature = "fault-points"))]
pub fn reach(_: FaultPoint) {}

/// True if a test disables `MOVE_MOUNT_BENEATH`.
#[cfg(feature = "fault-points")]
pub fn denies_beneath() -> bool {
    asks_for("no-beneath")
}

/// Always false: this build has no fault points.
#[cfg(not(feature = "fault-points"))]
pub fn denies_beneath() -> bool {
    false
}

/// No place is reached in this process from now on: a test ends the guard or the agent, not a
/// process of theirs.
#[cfg(feature = "fault-points")]
pub(crate) fn disable() {
    IS_DISABLED.store(true, std::sync::atomic::Ordering::Relaxed);
}

/// Does nothing: this build has no fault points.
#[cfg(not(feature = "fault-points"))]
pub(crate) fn disable() {}

#[cfg(feature = "fault-points")]
static IS_DISABLED: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);

#[cfg(feature = "fault-points")]
fn asks_for(fault: &str) -> bool {
    std::env::var(bindguard_core::program_names::FAULT_VARIABLE)
        .is_ok_and(|faults| faults.split(',').any(|word| word == fault))
}
