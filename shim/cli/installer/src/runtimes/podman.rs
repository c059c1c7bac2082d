//! Podman's drop-in: see containers.conf(5). Podman has no daemon, so nothing is restarted.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use bindguard_core::program_names::{RUNTIME, WRAPPER};
use toml::Value;

use crate::change::Change;
use crate::options::{Healing, InstallOptions, PlannedChange, TargetPlan, USUAL_RUNTIME};
use crate::record::HEADING;
use crate::runtimes::runtime_drop_in::{
    FileText, default_of, drop_in_text, heal, paths_in_order, refuse_later_default, runtime_of,
    texts_after, usual_runtime,
};
use crate::search_path::{SearchPath, Unusable, find, is_gone};
use crate::toml_text::{Place, with_value, without_value};

/// Its drop-in; the last default wins.
pub const DROP_IN: &str = "/etc/containers/containers.conf.d/zz-bindguard.conf";

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

/// The runtimes that Podman takes without a configured default, in its order: `findRuntime` in
/// `pkg/config/config.go` of containers/common.
const SEARCHED: [&str; 6] = ["crun", "runc", "runj", "kata", "runsc", "ocijail"];
/// Podman's lists of runtimes with an ability, and the lists' built-in values in Podman 5. The man
/// page has `runtime_supports_nocgroups`; Podman reads the key without the last letter.
const ABILITIES: [(&str, &[&str]); 3] = [
    (
        "runtime_supports_json",
        &["crun", "runc", "kata", "runsc", "youki", "krun", "ocijail"],
    ),
    ("runtime_supports_nocgroup", &["crun", "krun"]),
    (
        "runtime_supports_kvm",
        &["kata", "kata-runtime", "kata-qemu", "kata-fc", "krun"],
    ),
];

const PLACE: Place = Place {
    section: &["engine"],
    runtimes: "runtimes",
    default: "runtime",
};

/// Plans the change.
pub fn plan(options: &InstallOptions) -> Result<TargetPlan> {
    let mut others = files();
    others.retain(|path| path != Path::new(DROP_IN));
    let texts = texts_after(others.clone(), &[])?;
    let guarded = guarded(&texts, options)?;
    let path = options.prefix.join(WRAPPER).display().to_string();
    let mut text = drop_in_text(PLACE, &Value::from(vec![path]), options)?;
    for (key, built_in) in ABILITIES {
        let mut names = names_in(&texts, key, built_in)?;
        let name = guarded.file_name().and_then(OsStr::to_str);
        if name.is_some_and(|name| names.iter().any(|it| it == name)) {
            names.push(RUNTIME.to_owned());
            text = with_value(&text, &["engine", key], &Value::from(names).to_string())?;
        }
    }
    let change = Change::of(Path::new(DROP_IN), Some(text.into_bytes()), 0o644)?;
    let mut plan = TargetPlan {
        changes: vec![change],
        needs_runtime: Some(guarded),
        ..TargetPlan::default()
    };
    if options.default {
        refuse_later_default("Podman", &texts, Path::new(DROP_IN), PLACE)?;
    } else {
        plan.take(healed(others, &[])?)?;
    }
    Ok(plan)
}

/// The runtime that the guard becomes: with `--default` the default of Podman's other files, or the
/// first that Podman finds.
fn guarded(others: &[FileText], options: &InstallOptions) -> Result<PathBuf> {
    if !options.default {
        return Ok(usual_runtime());
    }
    let named = default_of(others, PLACE)?.map(|(_, name)| name);
    let names = match &named {
        Some(name) => vec![name.as_str()],
        None => SEARCHED.to_vec(),
    };
    for name in names {
        if name.starts_with('/') {
            return Ok(PathBuf::from(name));
        }
        let entry = runtime_of(others, PLACE, name)?;
        let paths = entry.as_ref().and_then(Value::as_array);
        for path in paths.into_iter().flatten().filter_map(Value::as_str) {
            if !is_gone(Path::new(path)) {
                return Ok(PathBuf::from(path));
            }
        }
        match find(name) {
            Some(_) if name == USUAL_RUNTIME => return Ok(USUAL_RUNTIME.into()),
            Some(path) => return Ok(path),
            None => {}
        }
    }
    Ok(usual_runtime())
}

/// The names in one of Podman's lists. The last file with the list replaces the list, or adds to the
/// list if it says `{append=true}`.
fn names_in(files: &[FileText], key: &str, built_in: &[&str]) -> Result<Vec<String>> {
    let mut names: Vec<String> = built_in.iter().map(|name| (*name).to_owned()).collect();
    for (path, text) in files {
        let table: toml::Table =
            toml::from_str(text).with_context(|| format!("parse {}", path.display()))?;
        let list = table
            .get("engine")
            .and_then(|engine| engine.get(key)?.as_array());
        let Some(list) = list else {
            continue;
        };
        let appends = |it: &Value| it.get("append").and_then(Value::as_bool) == Some(true);
        if !list.iter().any(appends) {
            names.clear();
        }
        names.extend(list.iter().filter_map(|it| it.as_str().map(str::to_owned)));
    }
    Ok(names)
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
        PLACE,
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
    let mut text = PLACE.without_runtime(text, RUNTIME, original)?;
    for (key, _) in ABILITIES {
        let table: toml::Table = toml::from_str(&text)?;
        let list = table
            .get("engine")
            .and_then(|engine| engine.get(key)?.as_array());
        if list.is_some_and(|list| list.contains(&Value::from(RUNTIME))) {
            text = without_value(&text, &["engine", key])?;
        }
    }
    Ok(text)
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
    let text = PLACE.without_runtime(text, RUNTIME, original)?;
    let paths = Value::from(vec![runtime.display().to_string()]);
    let text = PLACE.with_runtime(&text, RUNTIME, &paths)?;
    Ok(Some(text.replacen(
        HEADING,
        &format!("{HEADING}{NAME_ONLY}"),
        1,
    )))
}
