//! The names under which programs and runtimes find each other on a node.

pub const SHIM: &str = "containerd-shim-bindguard-v2";
/// The `runtime_type` from which containerd derives the name of the shim on its `PATH`.
pub const SHIM_RUNTIME_TYPE: &str = "io.containerd.bindguard.v2";
pub const WRAPPER: &str = "bindguard-runtime";
pub const CLI: &str = "bindguard";
pub const AGENT: &str = "bindguard-agent";
/// The runtime of an installation: containerd's handler, and the name for Docker, Podman and CRI-O.
pub const RUNTIME: &str = "bindguard";
/// The only argument of a call of [`WRAPPER`] that shows that the program runs. Its `--version` is
/// the runtime's.
pub const SELF_TEST: &str = "--bindguard-self-test";

/// The argument with which a program of bindguard shows that the kernel runs the program: the output
/// is the program's name. No runtime is needed.
pub fn self_test_of(program: &str) -> &'static str {
    match program {
        WRAPPER => SELF_TEST,
        SHIM => "-v",
        _ => "--version",
    }
}

/// The variable that names the guard's faults, separated by commas, for a program that was built
/// with the feature `fault-points`.
pub const FAULT_VARIABLE: &str = "BINDGUARD_FAULT";
/// The fault of a shim that panics in a method for a container whose id is this text and the
/// method's name.
pub const PANIC_IN: &str = "panic-in-";
