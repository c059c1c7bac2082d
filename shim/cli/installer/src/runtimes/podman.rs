//! Podman's drop-in: see containers.conf(5). Podman has no daemon, so nothing is restarted.

use std::path::Path;

use anyhow::Result;
use bindguard_core::program_names::{RUNTIME, WRAPPER};
use toml_edit::{Array, value};

use super::runtime_drop_in::{plan_drop_in, usual_runtime};
use crate::plan::{InstallOptions, TargetPlan};
use crate::toml_text::Place;

/// Its drop-in.
pub const DROP_IN: &str = "/etc/containers/containers.conf.d/50-bindguard.conf";

/// Plans the change.
pub fn plan(options: &InstallOptions) -> Result<TargetPlan> {
    let path = options.prefix.join(WRAPPER).display().to_string();
    let change = plan_drop_in(
        Path::new(DROP_IN),
        &place(),
        &value(Array::from_iter([path])),
        options,
    )?;
    Ok(TargetPlan {
        changes: vec![change],
        needs_runtime: Some(usual_runtime()),
        ..TargetPlan::default()
    })
}

/// The text without bindguard's runtime; `original` has the earlier default.
pub fn cleaned(text: &str, original: &str) -> Result<String> {
    Ok(place().without_runtime(text, RUNTIME, original)?)
}

fn place() -> Place {
    Place::new(&["engine", "runtimes"], &["engine", "runtime"])
}
