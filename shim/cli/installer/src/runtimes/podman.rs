//! Podman's drop-in: see containers.conf(5). Podman has no daemon, so nothing is restarted.

use std::path::{Path, PathBuf};

use anyhow::Result;
use bindguard_core::program_names::{RUNTIME, WRAPPER};
use toml::Value;
use toml_edit::{Array, value};

use super::runtime_drop_in::{
    HEADING, heal, paths_in_order, plan_drop_in, refuse_later_default, texts_after, usual_runtime,
    without_former,
};
use crate::plan::{Healing, InstallOptions, PlannedChange, TargetPlan};
use crate::record::Record;
use crate::search_path::{SearchPath, Unusable};
use crate::toml_text::Place;

/// Its drop-in; the last default wins.
pub const DROP_IN: &str = "/etc/containers/containers.conf.d/zz-bindguard.conf";
/// The drop-in of older versions.
pub const FORMER_DROP_IN: &str = "/etc/containers/containers.conf.d/50-bindguard.conf";

const MAIN: [&str; 2] = [
    "/usr/share/containers/containers.conf",
    "/etc/containers/containers.conf",
];
const FOLDER: &str = "/etc/containers/containers.conf.d";
/// The runtimes for which Podman knows paths.
const BUILT_IN: [&str; 10] = [
    "crun",
    "crun-vm",
    "crun-wasm",
    "kata",
    "krun",
    "ocijail",
    "runc",
    "runj",
    "runsc",
    "youki",
];

/// Plans the change.
pub fn plan(options: &InstallOptions, record: &Record) -> Result<TargetPlan> {
    let path = options.prefix.join(WRAPPER).display().to_string();
    let change = plan_drop_in(
        Path::new(DROP_IN),
        &place(),
        &value(Array::from_iter([path])),
        options,
    )?;
    let mut plan = TargetPlan {
        changes: vec![change],
        needs_runtime: Some(usual_runtime()),
        ..TargetPlan::default()
    };
    plan.changes
        .extend(without_former(Path::new(FORMER_DROP_IN), &place(), record)?);
    let mut others = files();
    others.retain(|path| path != Path::new(DROP_IN) && path != Path::new(FORMER_DROP_IN));
    if options.default {
        let others = texts_after(others, &[])?;
        refuse_later_default("Podman", &others, Path::new(DROP_IN), &place())?;
    } else {
        plan.take(healed(others, &[])?)?;
    }
    Ok(plan)
}

/// The files that Podman reads, in order.
pub fn files() -> Vec<PathBuf> {
    paths_in_order(&MAIN, FOLDER, Some("conf"))
}

/// The edits after which Podman's default starts containers.
pub fn default_after_removal(steps: &[PlannedChange]) -> Result<Healing> {
    healed(files(), steps)
}

fn healed(files: Vec<PathBuf>, steps: &[PlannedChange]) -> Result<Healing> {
    let mut files = texts_after(files, steps)?;
    let path = SearchPath::of(None, None);
    heal(
        "Podman",
        &mut files,
        &place(),
        None,
        &BUILT_IN,
        |name, entry| {
            let paths = match entry {
                Some(Value::Array(paths)) => paths,
                _ if name.starts_with('/') => vec![Value::from(name)],
                _ if BUILT_IN.contains(&name) => return Ok(()),
                _ => return Err(Unusable::NotConfigured(name.to_owned())),
            };
            let mut last = Ok(());
            for program in paths.iter().filter_map(Value::as_str) {
                last = path.program_of(name, program).map(drop);
                if last.is_ok() {
                    break;
                }
            }
            last
        },
    )
}

/// The text without bindguard's runtime; `original` has the earlier default.
pub fn cleaned(text: &str, original: &str) -> Result<String> {
    Ok(place().without_runtime(text, RUNTIME, original)?)
}

/// Stands below the heading of a drop-in in which only the name is left.
const NAME_ONLY: &str = "# bindguard is removed. Podman finds its containers' runtime by this name: delete the file when no\n# container has it, or run `bindguard uninstall --forget-name`.\n";

/// The text in which only the name is left, as that of `runtime`. `None` if the text has no entry of
/// the name.
pub fn with_name_only(text: &str, original: &str, runtime: &Path) -> Result<Option<String>> {
    let table: toml::Table = toml::from_str(text)?;
    let entry = table
        .get("engine")
        .and_then(|engine| engine.get("runtimes")?.get(RUNTIME)?.as_array());
    let Some(paths) = entry else {
        return Ok(None);
    };
    let calls_guard = |path: &Value| path.as_str().is_some_and(|it| it.ends_with(WRAPPER));
    if !paths.iter().any(calls_guard) {
        return Ok(Some(text.to_owned()));
    }
    let text = place().without_runtime(text, RUNTIME, original)?;
    let paths = value(Array::from_iter([runtime.display().to_string()]));
    let text = place().with_runtime(&text, RUNTIME, &paths)?;
    Ok(Some(text.replacen(
        HEADING,
        &format!("{HEADING}{NAME_ONLY}"),
        1,
    )))
}

fn place() -> Place {
    Place::new(&["engine", "runtimes"], &["engine", "runtime"])
}
