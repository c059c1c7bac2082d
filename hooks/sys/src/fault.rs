//! Places where a test can kill or stop the guard, or take a kernel's newer ways from it.
//!
//! Compiled in only with the feature `fault-points`. `BINDGUARD_FAULT` then names the faults, with commas between them:
//! `PLACE` kills the process there as an out-of-memory kill would, `stop:PLACE` stops it as a hung server would, `panic:PLACE`
//! is a fault of its own, `no-beneath` makes this kernel one from before 6.5, `no-setattr` one from before 5.12. `list` has the guard print every place and end.
//!
//! There is one for each state that a guard can leave behind when it is killed: whatever a step changes, the place behind
//! it is where a test looks at the change.

/// Declares the places, in the order in which an admission comes to them, with the name that a test calls each by.
macro_rules! fault_points {
    ($($(#[$about:meta])* $point:ident = $name:literal,)*) => {
        /// A place at which a test may want the guard to end.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum FaultPoint {
            $($(#[$about])* $point,)*
        }

        impl FaultPoint {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$point),*];

            /// What a test calls it.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$point => $name,)*
                }
            }
        }
    };
}

fault_points! {
    /// Before anything was looked at.
    Start = "start",
    /// The spec is read and understood.
    SpecRead = "spec-read",
    /// Every bind is judged, nothing is done yet.
    Judged = "judged",
    /// The subpath and its volume are held and judged once more.
    Held = "held",
    /// The current target is open.
    TargetOpened = "target-opened",
    /// A bind of the target exists, attached nowhere.
    Cloned = "cloned",
    /// Older kernels: a thread is in a mount namespace of its own.
    NamespaceUnshared = "namespace-unshared",
    /// Older kernels: a copy of the parent mount lies in that namespace.
    CopyAttached = "copy-attached",
    /// Older kernels: the new mount lies in the copy, and by propagation under the stale one.
    Tucked = "tucked",
    /// The new mount is attached, the stale one is not yet detached.
    AfterAttach = "after-attach",
    /// The stale mount is detached, nobody has looked at the result.
    Detached = "detached",
    /// The result was looked at and is current.
    Verified = "verified",
    /// What a swap stranded in the volume is removed.
    Cleared = "cleared",
    /// The file for the edited spec is made beside the old one, and empty.
    SpecBegun = "spec-begun",
    /// The edited spec is written beside the old one.
    SpecWritten = "spec-written",
    /// The edited spec is in its place, the runtime not yet started.
    AfterEdit = "after-edit",
    /// The journal's line is written.
    Journaled = "journaled",
    /// The journal is full, locked and about to be moved away.
    Rotating = "rotating",
    /// The full journal is moved away, and there is no new one yet.
    Rotated = "rotated",
}

/// Ends or stops the process when a test asked for it here.
#[cfg(feature = "fault-points")]
pub fn reach(point: FaultPoint) {
    use rustix::process::{Signal, getpid, kill_process};
    if asks_for("list") {
        FaultPoint::ALL.iter().for_each(|point| println!("{}", point.name()));
        std::process::exit(0);
    }
    let signal = match point.name() {
        name if asks_for(name) => Signal::KILL,
        name if asks_for(&format!("stop:{name}")) => Signal::STOP,
        name if asks_for(&format!("panic:{name}")) => panic!("asked for at {name}"),
        _ => return,
    };
    // A signal to oneself cannot fail, and there is nobody to tell.
    let _ = kill_process(getpid(), signal);
}

/// Does nothing: this build has no fault points.
#[cfg(not(feature = "fault-points"))]
pub fn reach(_: FaultPoint) {}

/// Whether a test asked for a kernel without `MOVE_MOUNT_BENEATH`.
#[cfg(feature = "fault-points")]
pub fn denies_beneath() -> bool {
    asks_for("no-beneath")
}

/// This build takes the kernel as it is.
#[cfg(not(feature = "fault-points"))]
pub fn denies_beneath() -> bool {
    false
}

/// Whether a test asked for a kernel without mount_setattr(2).
#[cfg(feature = "fault-points")]
pub fn denies_setattr() -> bool {
    asks_for("no-setattr")
}

/// This build takes the kernel as it is.
#[cfg(not(feature = "fault-points"))]
pub fn denies_setattr() -> bool {
    false
}

#[cfg(feature = "fault-points")]
fn asks_for(fault: &str) -> bool {
    std::env::var("BINDGUARD_FAULT").is_ok_and(|asked| asked.split(',').any(|word| word == fault))
}
