//! A drop-in for Podman or CRI-O: a file of bindguard's own in a folder whose files are read in
//! order.
//!
//! No other file is edited. The contents of a drop-in are merged with the other files: a runtime is
//! added, and the default is the last one that a file names.

use std::path::{Path, PathBuf};

use anyhow::Result;
use bindguard_core::program_names::RUNTIME;
use toml_edit::Item;

use crate::change::Change;
use crate::plan::InstallOptions;
use crate::search_path;
use crate::toml_text::Place;

/// The first line of a file that is bindguard's own.
pub const HEADING: &str = "# Written by `bindguard install`; `bindguard uninstall` removes it.\n";

/// Plans a drop-in with one runtime, and with the default on request.
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

/// crun, on a node without runc: bindguard-runtime uses runc unless its config names a runtime.
pub fn crun_instead_of_runc() -> Option<PathBuf> {
    if search_path::find("runc").is_some() {
        None
    } else {
        search_path::find("crun")
    }
}
