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

use strum::{IntoStaticStr, VariantArray};

// In the order in which an admission reaches the places.
/// A place at which a test can end the guard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "kebab-case", const_into_str)]
pub enum FaultPoint {
    /// Nothing is read yet.
    Start,
    /// The spec is read and understood.
    SpecRead,
    /// Every bind is judged, nothing is done yet.
    Judged,
    /// The subpath and its volume are open and judged again.
    Held,
    /// The current target is open.
    TargetOpened,
    /// A bind of the target exists, attached nowhere.
    Cloned,
    /// Older kernels: a thread is in a mount namespace of its own.
    NamespaceUnshared,
    /// Older kernels: a copy of the parent mount lies in that namespace.
    CopyAttached,
    /// Older kernels: the new mount lies in the copy, and by propagation under the stale mount.
    Tucked,
    /// The new mount is attached, the stale mount is not yet detached.
    AfterAttach,
    /// The stale mount is detached; the result is not checked yet.
    Detached,
    /// The result is checked and current.
    Verified,
    /// The payload that a swap stranded in the volume is removed.
    Cleared,
    /// The file for the edited spec is made beside the old spec, and empty.
    SpecBegun,
    /// The edited spec is written beside the old spec.
    SpecWritten,
    /// The edited spec is in its place, the runtime not yet started.
    AfterEdit,
    /// The journal's line is written.
    Journaled,
    /// The journal is full, locked and about to be moved away.
    Rotating,
    /// The full journal is moved away, and there is no new journal yet.
    Rotated,
}

/// Kills or stops the process, or panics, if `BINDGUARD_FAULT` names this place.
#[cfg(feature = "fault-points")]
pub fn reach(point: FaultPoint) {
    use rustix::process::{Signal, getpid, kill_process};
    if IS_DISABLED.load(std::sync::atomic::Ordering::Relaxed) {
        return;
    }
    if asks_for("list") {
        for point in FaultPoint::VARIANTS {
            println!("{}", point.into_str());
        }
        std::process::exit(0);
    }
    let signal = match point.into_str() {
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
    std::env::var(bindguard_core::handover::FAULT_VARIABLE)
        .is_ok_and(|faults| faults.split(',').any(|word| word == fault))
}
