//! The names under which programs and runtimes find each other on a node.

/// The shim.
pub const SHIM: &str = "containerd-shim-bindguard-v2";
/// The `runtime_type` from which containerd derives the name of the shim on its `PATH`.
pub const SHIM_RUNTIME_TYPE: &str = "io.containerd.bindguard.v2";
/// The OCI runtime wrapper.
pub const WRAPPER: &str = "bindguard-runtime";
/// The operator's command line.
pub const CLI: &str = "bindguard";
/// The node agent.
pub const AGENT: &str = "bindguard-agent";
/// The runtime of an installation: containerd's handler, and the name for Docker, Podman and CRI-O.
pub const RUNTIME: &str = "bindguard";
