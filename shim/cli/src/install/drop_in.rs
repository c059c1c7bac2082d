//! A drop-in, Podman's and CRI-O's: a file of bindguard's own in a folder that they read in order.
//!
//! Nothing of anybody else's is edited. What a drop-in says is merged with the other files: a runtime is added, and the
//! default is the last one that a file names.

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

/// What Podman has to be told: see containers.conf(5).
pub fn podman(wishes: &Wishes) -> Result<Planned> {
    let path = wishes.prefix.join(GUARD).display().to_string();
    plan(Path::new(PODMAN), &podman_place(), value(Array::from_iter([path])), wishes)
}

/// Where Podman's files name runtimes.
pub fn podman_place() -> Place {
    Place::new(&["engine", "runtimes"], &["engine", "runtime"])
}

/// A drop-in with one runtime, and the default if that is wished.
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

/// bindguard-runtime becomes runc unless its config says otherwise. Where there is only crun, it has to.
pub fn without_runc() -> Option<PathBuf> {
    if on_path("runc").is_some() { None } else { on_path("crun") }
}
