//! containerd's config.toml: a runtime handler `bindguard`, and on request the default one.
//!
//! The file to edit is found by trial: the main file, then every import with the CRI plugin's section, until `containerd config
//! dump` shows the intended change and nothing else ([`effective`]). This module writes no permanent file.

mod effective;
mod handler;
mod program;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use bindguard_core::program_names::RUNTIME;
use toml_edit::{Array, DocumentMut, Item};

use self::effective::{Effective, Meant};
use self::handler::{Handler, HandlerKind, as_item};
use self::program::{Containerd, trial_beside};
use crate::install::change::{self, Change};
use crate::install::plan::{Options, Plan};
use crate::install::toml_text::{Place, parse};

/// The default path of containerd's main file.
pub const CONFIG: &str = "/etc/containerd/config.toml";

/// The command after which containerd reads its files again.
pub const RESTART: &str = "systemctl restart containerd";

/// Plans the changes to containerd's files.
pub fn plan(options: &Options) -> Result<Plan> {
    let containerd = Containerd::locate(options.containerd.as_deref())?;
    let main = Main::read(&options.containerd_config, &containerd)?;
    let before = containerd.effective_with(&main.path, &main.text)?;
    let (base, handler) = wanted(&before, &containerd, options)?;
    let meant = Meant { handler: handler.table.clone(), default: options.default.then(|| RUNTIME.to_owned()) };
    let (path, text) = edited(&containerd, &main, &before, &meant)?;
    let mut plan = Plan::default();
    plan.changes.push(Change::of(&path, Some(text.into_bytes()), 0o644)?);
    plan.needs_runtime = handler.needs_runtime;
    if !handler.lost.is_empty() {
        let lost = handler.lost.join(", ");
        plan.notes.push(format!(
            "containerd 1.6 does not hand these options of {base} to another shim: {lost}; with --wrapper they stay"
        ));
    }
    plan.command = Some(RESTART.to_owned());
    Ok(plan)
}

/// The text without the handler; `original` has the earlier default.
pub fn cleaned(text: &str, original: &str) -> Result<String> {
    let without = |text: String, place: &Place| place.without_runtime(&text, RUNTIME, original);
    Ok(places().iter().try_fold(text.to_owned(), without)?)
}

/// The tables of runtimes in version 2 and version 3 of the file. Cleaning a text uses both.
fn places() -> [Place; 2] {
    ["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"].map(|plugin| {
        let at = |key| ["plugins", plugin, "containerd", key];
        Place::new(&at("runtimes"), &at("default_runtime_name"))
    })
}

/// The main file, read and parsed.
struct Main {
    path: PathBuf,
    text: String,
    place: Place,
    plugin: &'static str,
}

impl Main {
    /// Reads the main file. An empty or missing one gets the newest version.
    fn read(path: &Path, containerd: &Containerd) -> Result<Self> {
        let newest = if containerd.version() < (2, 0) { 2 } else { 3 };
        let bytes = change::read(path)?.unwrap_or_default();
        let mut text = String::from_utf8(bytes).map_err(|_| anyhow!("{} is not text", path.display()))?;
        let mut document = parse(&text).with_context(|| format!("understand {}", path.display()))?;
        if document.is_empty() {
            text = format!("{text}version = {newest}\n");
            document = parse(&text)?;
        }
        ensure!(
            !names_in(&document, "disabled_plugins").iter().any(|plugin| plugin == "cri" || plugin.contains(".cri")),
            "{} disables the CRI plugin: no pods run on this containerd",
            path.display()
        );
        let [v2, v3] = places();
        let (place, plugin) = match document.get("version").and_then(Item::as_integer) {
            Some(2) => (v2, "io.containerd.grpc.v1.cri"),
            Some(3) => (v3, "io.containerd.cri.v1.runtime"),
            _ => bail!(
                "{} is not of version 2 or 3: move it there first, containerd config migrate shows how",
                path.display()
            ),
        };
        Ok(Self { path: path.to_owned(), text, place, plugin })
    }

    /// The files that it imports, in order.
    fn imports(&self) -> Result<Vec<PathBuf>> {
        let folder = self.path.parent().unwrap_or(Path::new("/"));
        let patterns = names_in(&parse(&self.text)?, "imports");
        Ok(patterns
            .iter()
            .flat_map(|pattern| expanded(&folder.join(pattern)))
            .filter(|path| *path != self.path)
            .collect())
    }
}

/// The runtime that the handler guards, and the handler. A handler that is the default already is kept, because the runtime
/// that it was made from is no longer known.
fn wanted(before: &Effective, containerd: &Containerd, options: &Options) -> Result<(String, Handler)> {
    if let (RUNTIME, Some(table)) = (before.default(), before.runtime(RUNTIME)) {
        return Ok((RUNTIME.to_owned(), Handler { table, needs_runtime: None, lost: Vec::new() }));
    }
    let default = before.default();
    let base = if options.default || before.runtime("runc").is_none() { default } else { "runc" };
    let table = before.runtime(base).with_context(|| {
        format!("find the runtime {base:?} in containerd's effective configuration: {}", before.names().join(", "))
    })?;
    let kind = HandlerKind::on(containerd.version(), options.wrapper, options.default, &table);
    let handler = kind.handler(&table, &options.prefix).with_context(|| format!("guard the runtime {base:?}"))?;
    Ok((base.to_owned(), handler))
}

/// The file whose edit makes the intended change and nothing else, and its new text.
fn edited(containerd: &Containerd, main: &Main, before: &Effective, meant: &Meant) -> Result<(PathBuf, String)> {
    let try_main = |text: &str| containerd.effective_with(&main.path, text);
    if let Some(text) = edit_until_right(&main.text, &main.place, before, meant, &main.path, try_main)? {
        return Ok((main.path.clone(), text));
    }
    let imports = main.imports()?;
    for import in &imports {
        let text = fs::read_to_string(import).with_context(|| format!("read {}", import.display()))?;
        let document = parse(&text).with_context(|| format!("understand {}", import.display()))?;
        if document.get("plugins").and_then(|plugins| plugins.get(main.plugin)).is_none() {
            continue;
        }
        let try_import = |text: &str| effective_with_import(containerd, main, &imports, import, text);
        if let Some(text) = edit_until_right(&text, &main.place, before, meant, import, try_import)? {
            return Ok((import.clone(), text));
        }
    }
    bail!(
        "no edit of {} or its imports gives containerd a runtime {RUNTIME:?}: nothing was changed",
        main.path.display()
    )
}

/// The text with the handler, and with the runtimes that would be lost by naming it. `None` if containerd does not take its
/// runtimes from this file.
fn edit_until_right(
    text: &str,
    place: &Place,
    before: &Effective,
    meant: &Meant,
    path: &Path,
    effective: impl Fn(&str) -> Result<Effective>,
) -> Result<Option<String>> {
    let doing = || format!("edit {}", path.display());
    let mut edited = text.to_owned();
    if before.runtime(RUNTIME).as_ref() != Some(&meant.handler) {
        edited = place.with_runtime(&edited, RUNTIME, as_item(&meant.handler)).with_context(doing)?;
    }
    if let Some(default) = meant.default.as_ref().filter(|default| *default != before.default()) {
        edited = place.with_default(&edited, default).with_context(doing)?;
    }
    let mut after = effective(&edited)?;
    if after.runtime(RUNTIME).as_ref() != Some(&meant.handler) {
        return Ok(None);
    }
    let lost: Vec<_> = before.lost_in(&after).collect();
    for (name, table) in lost {
        edited = place.with_runtime(&edited, name, as_item(&table)).with_context(doing)?;
        after = effective(&edited)?;
    }
    let surprises = before.surprises(&after, meant);
    ensure!(
        surprises.is_empty(),
        "with {} edited, containerd config dump differs in more than was meant ({}): nothing was changed",
        path.display(),
        surprises.join(", ")
    );
    Ok(Some(edited))
}

/// The effective configuration with another text in place of one import.
fn effective_with_import(
    containerd: &Containerd,
    main: &Main,
    imports: &[PathBuf],
    import: &Path,
    text: &str,
) -> Result<Effective> {
    let trial = trial_beside(import, text)?;
    let list = imports.iter().map(|path| if path == import { trial.path() } else { path.as_path() });
    let mut document = parse(&main.text)?;
    document["imports"] = toml_edit::value(list.map(|path| path.display().to_string()).collect::<Array>());
    containerd.effective_with(&main.path, &document.to_string())
}

fn names_in(document: &DocumentMut, key: &str) -> Vec<String> {
    let array = document.get(key).and_then(Item::as_array);
    array.into_iter().flatten().filter_map(|name| name.as_str().map(str::to_owned)).collect()
}

/// A path, or the files that match the `*` in its last part.
fn expanded(pattern: &Path) -> Vec<PathBuf> {
    let name = pattern.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let Some((start, end)) = name.split_once('*') else { return vec![pattern.to_owned()] };
    let entries = pattern.parent().and_then(|folder| folder.read_dir().ok()).into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    files.retain(|path| {
        path.file_name()
            .and_then(|name| name.to_str())
            .is_some_and(|name| !name.starts_with('.') && name.starts_with(start) && name.ends_with(end))
    });
    files.sort();
    files
}
