//! Reports on a terminal, and for programs.
//!
//! Text is coloured on a terminal that supports it (`NO_COLOR` is respected); `--json` is the same
//! report, whole.

mod bundle;
mod node;
mod style;

use std::fmt::Display;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::OnceLock;

use bindguard_core::identity::PodName;
use bindguard_operator::pods::PodContainer;
use serde::Serialize;

pub use bindguard_operator::terminal::{print_bytes, print_json, print_remark, print_text};
pub use bundle::{exit_code, print, print_bind};
pub use node::{OldFilesCount, node_exit_code, print_node};
pub use style::{DIMMED, FAULTY, HEALTHY, Lines, UNCHECKED, verdict_style};

/// Prints a report, as text or as one JSON object.
pub fn print_report<R: Serialize>(
    report: &R,
    json: bool,
    text: impl FnOnce(&R) -> Lines,
) -> anyhow::Result<()> {
    if json {
        print_json(report)
    } else {
        print_text(text(report).text())
    }
}

/// The known names of a container's pod and of the container.
pub fn joined_names(pod: &PodName, container: &PodContainer, separator: &str) -> String {
    let names = [pod.display_name(), container.name.clone()];
    let names: Vec<String> = names.into_iter().flatten().collect();
    names.join(separator)
}

/// A number and its noun.
pub fn counted<N: PartialEq + From<u8> + Display>(count: N, one: &str, more: &str) -> String {
    let noun = if count == N::from(1) { one } else { more };
    format!("{count} {noun}")
}

/// The node's root, as the pod sees it in which this program runs.
pub static NODE_ROOT: OnceLock<PathBuf> = OnceLock::new();

/// The exit code of an incomplete check, for scripts.
pub const COULD_NOT_TELL: u8 = 2;

/// 2 if the check is incomplete, else 1 if there are findings, else 0.
pub fn code(is_incomplete: bool, has_findings: bool) -> ExitCode {
    match (is_incomplete, has_findings) {
        (true, _) => ExitCode::from(COULD_NOT_TELL),
        (false, true) => ExitCode::FAILURE,
        (false, false) => ExitCode::SUCCESS,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_singular() {
        let texts = [0_u32, 1, 2].map(|count| counted(count, "time", "times"));
        assert_eq!(texts, ["0 times", "1 time", "2 times"]);
    }
}
