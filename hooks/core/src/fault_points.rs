//! The names by which a test breaks a program that was built with the feature `fault-points`.

/// The variable that names the guard's faults, separated by commas.
pub const VARIABLE: &str = "BINDGUARD_FAULT";
/// The shim panics in a method for a container whose id is this text and the method's name.
pub const PANIC_IN: &str = "panic-in-";
