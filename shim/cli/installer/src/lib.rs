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

mod change;
mod config_text;
pub mod drift;
mod install;
mod own_files;
pub mod record;
pub mod removal;
mod restart;
pub mod running;
mod runtimes;
pub mod session;
mod uninstall;

pub use self::change::{Owner, private_folder};
pub use self::install::Install;
pub use self::runtimes::{has_agent_unit, recorded};
pub use self::uninstall::Uninstall;
