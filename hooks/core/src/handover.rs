//! The protocol between the shim and `bindguard-runtime`. Both are installed together, but an
//! upgrade may combine a newer program with an older one: readers skip unknown lines.

/// The variable that names the real runtime: a path, or a name on `PATH`.
pub const RUNTIME_VARIABLE: &str = "BINDGUARD_RUNTIME";
/// The variable with the number of the descriptor to write to: a pipe, which the guard inherits.
pub const PIPE_VARIABLE: &str = "BINDGUARD_HANDOVER_FD";
/// The variable with the number of this create of the container, counted from 0.
pub const ATTEMPT_VARIABLE: &str = "BINDGUARD_ATTEMPT";

/// The file with the shim's version, in the bundle of the container that the shim was started for.
/// Operators' programs read it.
pub const VERSION_FILE: &str = "shim.version";

/// First line: the process is the runtime from here on.
pub const HANDOVER: &str = "handover";
/// After [`HANDOVER`] and a space: the mounts of the new container should be compared with the
/// record in its bundle.
pub const PROVE: &str = "prove";
/// First line, in a retry: nothing was stale, and no runtime runs.
pub const UNCHANGED: &str = "unchanged";
/// First line, with a reason: policy refuses the container.
pub const REFUSED: &str = "refused";
/// Second line, with a reason: a bind that the guard left as it was.
pub const UNREPAIRED: &str = "unrepaired";
/// The longest line, in bytes.
pub const MAX_LINE: usize = 4096;

/// The verb that records a create whose guard did not come to an end.
pub const UNCHECKED_VERB: &str = "bindguard-unchecked";

/// The verb that compares the mounts of a new container with the record in its bundle. If policy
/// refuses the container, it prints the reason.
pub const PROVE_VERB: &str = "bindguard-prove";
