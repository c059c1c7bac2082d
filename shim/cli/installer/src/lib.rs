//! `bindguard install` and `bindguard uninstall`: put bindguard onto a node, and remove it, byte
//! for byte.
//!
//! ```text
//!   options ──► plan a runtime ──► changes, as diffs ──► record ──► programs, then files ──► the command that is left to run
//! ```
//!
//! All changes are planned before the first byte is written; those to containerd are also tried
//! out. Only `--restart` restarts a service: the operator of two thousand nodes chooses the moment.

#![forbid(unsafe_code)]

mod attributes;
mod change;
pub mod drift;
mod helper;
mod install;
mod json_text;
mod kept_name;
mod lock;
mod node_label;
mod options;
mod own_program;
mod owner;
mod plan;
mod program_users;
mod programs;
mod put;
pub mod record;
pub mod removal;
mod report;
mod restart;
mod restart_slot;
pub mod root;
pub mod running;
mod runtimes;
mod scratch;
mod search_path;
mod settings;
mod stay;
mod toml_text;
mod trial_sandbox;
mod uninstall;
mod versions;

pub use self::install::Install;
pub use self::runtimes::agent::has_agent_unit;
pub use self::scratch::private_folder;
pub use self::uninstall::Uninstall;

/// The record of the node's installation.
///
/// # Errors
/// If the record cannot be read, or is not root's.
pub fn recorded() -> anyhow::Result<record::Record> {
    record::Record::load(runtimes::may_write)
}
