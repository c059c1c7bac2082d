//! The names under which the programs of bindguard find each other on a node, and the protocol
//! between the shim and `bindguard-runtime`.
//!
//! Shim and wrapper are installed together, but an upgrade may combine a newer program with an older
//! program. So readers skip unknown lines, and unknown words at the end of a line.

use crate::text::cut;

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

// The protocol between the shim and `bindguard-runtime`.

/// The variable that names the real runtime: a path, or a name on `PATH`.
pub const RUNTIME_VARIABLE: &str = "BINDGUARD_RUNTIME";
/// The variable with the number of the descriptor to write to: a pipe, which the guard inherits.
pub const PIPE_VARIABLE: &str = "BINDGUARD_HANDOVER_FD";
/// The variable with the number of this create of the container, counted from 0.
pub const ATTEMPT_VARIABLE: &str = "BINDGUARD_ATTEMPT";

/// The file with the shim's version, in the bundle of the container that the shim was started for.
/// Operators' programs read it.
pub const VERSION_FILE: &str = "shim.version";

/// Size limit of an answer, in bytes.
pub const MAX_ANSWER: usize = 4096;

/// The verb that detaches the mounts below the emptyDirs of a pod whose sandbox ended.
pub const DETACH_VERB: &str = "bindguard-detach";

/// The verb that records a create whose guard did not come to an end.
pub const UNCHECKED_VERB: &str = "bindguard-unchecked";

/// The verb that compares the mounts of a new container with the record in its bundle. If policy
/// refuses the container, the verb prints the reason. With the reason why a comparison came to no
/// end, the verb only records that reason.
pub const PROVE_VERB: &str = "bindguard-prove";

/// Size limit of a reason, in bytes: much less than [`MAX_ANSWER`].
const MAX_REASON: usize = MAX_ANSWER / 2;

/// The word of a second line, with the reason for a bind that the guard left as it was.
const UNREPAIRED: &str = "unrepaired";

/// The first line of the guard's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GuardAnswer {
    /// From here on the process is the runtime.
    Handover {
        /// True if the mounts of the new container must be compared with the record in its bundle.
        prove: bool,
    },
    /// In a retry: nothing was stale, and no runtime runs.
    Unchanged,
    /// Policy refuses the container, for this reason.
    Refused(String),
}

impl GuardAnswer {
    /// The answer as text. `unrepaired`: the reason for which the runtime may fail.
    pub fn text(&self, unrepaired: Option<&str>) -> String {
        let mut text = match self {
            Self::Handover { prove: false } => "handover\n".to_owned(),
            Self::Handover { prove: true } => "handover prove\n".to_owned(),
            Self::Unchanged => "unchanged\n".to_owned(),
            Self::Refused(reason) => format!("refused {}\n", in_one_line(reason)),
        };
        if let Some(reason) = unrepaired {
            text += &format!("{UNREPAIRED} {}\n", in_one_line(reason));
        }
        text
    }

    /// Parses the first line of an answer. `None` if it is no line of the protocol.
    pub fn parse(line: &str) -> Option<Self> {
        match line.split_once(' ').unwrap_or((line, "")) {
            ("handover", more) => Some(Self::Handover {
                prove: more == "prove",
            }),
            ("unchanged", _) => Some(Self::Unchanged),
            ("refused", reason) => Some(Self::Refused(reason.to_owned())),
            _ => None,
        }
    }
}

/// The reason for which the runtime may have failed, in a whole answer.
pub fn unrepaired_in(answer: &str) -> Option<&str> {
    answer
        .lines()
        .skip(1)
        .find_map(|line| line.strip_prefix(UNREPAIRED)?.strip_prefix(' '))
}

/// The pod chooses the paths in a reason.
fn in_one_line(reason: &str) -> String {
    cut(reason, MAX_REASON).replace(char::is_control, " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first_line(text: &str) -> &str {
        text.lines().next().unwrap_or_default()
    }

    #[test]
    fn an_answer_is_read_as_it_was_written() {
        for answer in [
            GuardAnswer::Handover { prove: false },
            GuardAnswer::Handover { prove: true },
            GuardAnswer::Unchanged,
            GuardAnswer::Refused("/mnt is not mounted".to_owned()),
        ] {
            for unrepaired in [None, Some("app.conf is gone")] {
                let text = answer.text(unrepaired);
                assert_eq!(GuardAnswer::parse(first_line(&text)), Some(answer.clone()));
                assert_eq!(unrepaired_in(&text), unrepaired, "{text:?}");
                assert!(text.ends_with('\n'));
            }
        }
    }

    #[test]
    fn words_and_lines_of_a_later_version_are_skipped() {
        let at_once = GuardAnswer::parse("handover at once");
        assert_eq!(at_once, Some(GuardAnswer::Handover { prove: false }));
        assert_eq!(GuardAnswer::parse("panic at"), None);
        assert_eq!(GuardAnswer::parse(""), None);
        let later = "unchanged\nof a later guard\nunrepaired why\n";
        assert_eq!(unrepaired_in(later), Some("why"));
        assert_eq!(unrepaired_in("unrepaired is no first line\n"), None);
    }

    /// A pod chooses names of binds.
    #[test]
    fn a_reason_is_one_line_and_short() {
        let reason = format!("a\nhandover\n{}", "x".repeat(2 * MAX_ANSWER));
        let text = GuardAnswer::Refused(reason).text(None);
        assert_eq!(text.lines().count(), 1);
        assert!(text.len() < MAX_ANSWER && text.starts_with("refused a handover x"));
    }
}
