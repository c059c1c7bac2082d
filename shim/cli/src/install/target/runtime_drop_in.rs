//! A drop-in for Podman or CRI-O: a file of bindguard's own in a folder whose files are read in order.
//!
//! No other file is edited. The contents of a drop-in are merged with the other files: a runtime is added, and the default is
//! the last one that a file names.

use std::path::{Path, PathBuf};

use anyhow::Result;
use toml_edit::{Array, Item, value};

use super::change::Change;
use super::containerd::on_path;
use super::planned::{Planned, Wishes};
use super::programs::GUARD;
use super::toml_text::Place;

const NAME: &str = "bindguard";

/// The drop-in of Podman.
pub const PODMAN: &str = "/etc/containers/containers.conf.d/50-bindguard.conf";

/// Plans the change for Podman: see containers.conf(5).
pub fn podman(wishes: &Wishes) -> Result<Planned> {
    let path = wishes.prefix.join(GUARD).display().to_string();
    plan(Path::new(PODMAN), &podman_place(), value(Array::from_iter([path])), wishes)
}

/// The place of runtimes in Podman's files.
pub fn podman_place() -> Place {
    Place::new(&["engine", "runtimes"], &["engine", "runtime"])
}

/// Plans a drop-in with one runtime, and with the default on request.
pub fn plan(path: &Path, place: &Place, runtime: Item, wishes: &Wishes) -> Result<Planned> {
    let heading = "# Put here by `bindguard install`; `bindguard uninstall` takes it away.\n";
    let mut text = place.with_runtime("", NAME, runtime)?;
    if wishes.default {
        text = place.with_default(&text, NAME)?;
    }
    let text = format!("{heading}{}", text.trim_start());
    let change = Change::of(path, Some(text.into_bytes()), 0o644)?;
    Ok(Planned { changes: vec![change], needs_runtime: without_runc(), ..Planned::default() })
}

/// bindguard-runtime becomes runc unless its config names another runtime. A node that has only crun needs that.
pub fn without_runc() -> Option<PathBuf> {
    if on_path("runc").is_some() { None } else { on_path("crun") }
}
