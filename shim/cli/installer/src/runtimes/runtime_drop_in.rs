//! A drop-in for Podman or CRI-O: a file of bindguard's own in a folder whose files are read in
//! order.
//!
//! Existing files are not edited. The daemon merges a drop-in with the existing files: all runtimes
//! count, and the last named default wins.

use std::path::{Path, PathBuf};

use anyhow::Result;
use bindguard_core::program_names::RUNTIME;
use toml_edit::Item;

use crate::change::Change;
use crate::plan::{InstallOptions, USUAL_RUNTIME};
use crate::search_path;
use crate::toml_text::Place;

/// The first line of a file that is bindguard's own.
pub const HEADING: &str = "# Written by `bindguard install`; `bindguard uninstall` removes it.\n";

/// Plans a drop-in with a runtime, on request as the default.
pub fn plan_drop_in(
    path: &Path,
    place: &Place,
    runtime: &Item,
    options: &InstallOptions,
) -> Result<Change> {
    let mut text = place.with_runtime("", RUNTIME, runtime)?;
    if options.default {
        text = place.with_default(&text, RUNTIME)?;
    }
    let text = format!("{HEADING}{}", text.trim_start());
    Change::of(path, Some(text.into_bytes()), 0o644)
}

/// runc, or crun on a node without runc.
pub fn usual_runtime() -> PathBuf {
    let crun = search_path::find("crun").filter(|_| search_path::find(USUAL_RUNTIME).is_none());
    crun.unwrap_or_else(|| USUAL_RUNTIME.into())
}
