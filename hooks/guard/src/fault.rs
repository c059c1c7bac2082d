//! Places where a test can kill or stop the guard, or take a kernel's newer ways from it.
//!
//! Compiled in only with the feature `fault-points`. `BINDGUARD_FAULT` then names the fault: `PLACE` kills the process
//! there as an out-of-memory kill would, `stop:PLACE` stops it as a hung server would, `no-beneath` makes this kernel one
//! from before 6.5.

/// A place at which a test may want the guard to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultPoint {
    /// Before anything was looked at.
    Start,
    /// The new mount is attached, the stale one is not yet detached.
    AfterAttach,
    /// The edited spec is in its place, the runtime not yet started.
    AfterEdit,
}

/// Ends or stops the process when a test asked for it here.
#[cfg(feature = "fault-points")]
pub fn reach(point: FaultPoint) {
    use rustix::process::{Signal, getpid, kill_process};
    let name = match point {
        FaultPoint::Start => "start",
        FaultPoint::AfterAttach => "after-attach",
        FaultPoint::AfterEdit => "after-edit",
    };
    let Ok(asked) = std::env::var("BINDGUARD_FAULT") else { return };
    let (signal, place) = match asked.strip_prefix("stop:") {
        Some(place) => (Signal::STOP, place),
        None => (Signal::KILL, asked.as_str()),
    };
    if place == name {
        // A signal to oneself cannot fail, and there is nobody to tell.
        let _ = kill_process(getpid(), signal);
    }
}

/// Does nothing: this build has no fault points.
#[cfg(not(feature = "fault-points"))]
pub fn reach(_: FaultPoint) {}

/// Whether a test asked for a kernel without `MOVE_MOUNT_BENEATH`.
#[cfg(feature = "fault-points")]
pub fn denies_beneath() -> bool {
    std::env::var("BINDGUARD_FAULT").is_ok_and(|asked| asked == "no-beneath")
}

/// This build takes the kernel as it is.
#[cfg(not(feature = "fault-points"))]
pub fn denies_beneath() -> bool {
    false
}
