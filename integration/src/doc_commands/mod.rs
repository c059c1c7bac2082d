//! The commands that the documents show, run as they stand there.
//!
//! A command that an operator copies from a document at night must work. So a document's `sh`
//! blocks contain only commands (text for reading is `text` or `toml`), and a story for each
//! document runs every command:
//!
//! ```text
//! docs/runbook.md ── ```sh blocks ──► commands ── names replaced ──► sh -ec, as a process of a node
//! ```
//!
//! [`NOT_RUN`] lists the commands that cannot be run, each with the reason; the test prints them.

mod document;
mod not_run;
mod rehearsal;

use std::path::{Path, PathBuf};

pub use self::document::{
    DocCommand, all_documents, commands_of, commands_outside_of_sh, documents_with_commands,
};
pub use self::not_run::{NOT_RUN, NotRun};
pub use self::rehearsal::Rehearsal;

/// The folder that holds the workspace.
pub fn repository() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().unwrap_or(manifest).to_path_buf()
}
