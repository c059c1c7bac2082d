//! containerd's configuration: a runtime handler `bindguard`, on request as the default.
//!
//! | edit | where |
//! |---|---|
//! | a drop-in of bindguard's own | the main file imports a folder, and this containerd merges what is in it |
//! | the same, and the line `imports` | containerd 2 whose main file imports no folder |
//! | the main file | containerd 1.7: an import replaces the whole table of a plugin |
//! | an import with the CRI plugin's section | containerd 1.7 takes the whole section from it |
//!
//! An edit is right if `containerd config dump` shows the intended change and nothing else
//! ([`files`]). This module writes no permanent file.

mod files;
mod node;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use bindguard_core::handover::{RUNTIME, SHIM, WRAPPER};
use bindguard_core::text::shell_word;
use bindguard_operator::terminal::print_text;
use serde_json::{Value, json};

use crate::change::{self, Change, Content, Doing, Owner, Plan};
use crate::config_text::{Place, find, parse};
use crate::record::{HEADING, InstallOptions, Record, USUAL_RUNTIME, text_of};
use crate::running::SearchPath;
use crate::runtimes::containerd::files::{
    Effective, Files, PLUGINS, RUNC, Texts, binary_name, imports, kind_of, matches, patterns,
    with_import, with_imports_of_others, without_import,
};
use crate::runtimes::containerd::node::{Distribution, node_config, of_template};

pub use self::node::{ContainerdLayout, unit_exists};

/// The name of the drop-in. containerd reads the files of a folder in the order of their names, and
/// the last default wins: GPU toolkits write `99-nvidia.toml`.
const DROP_IN: &str = "zz-bindguard.toml";
/// The folder that the main file is to import, beside that file: the folder of containerd 2.2's own
/// default.
const FOLDER: &str = "conf.d";
/// k0s merges this folder's files into a file that k0s' containerd imports.
const K0S_FOLDER: &str = "/etc/k0s/containerd.d";
/// The line by which k0s recognizes a main file of its own.
const K0S_MANAGED: &str = "k0s_managed=true";
const MICROK8S: &str = "/var/snap/microk8s/current/args/containerd-template.toml";

const fn place(section: &'static [&'static str]) -> Place {
    Place {
        is_json: false,
        section,
        runtimes: "runtimes",
        default: "default_runtime_name",
    }
}
/// The place of runtimes in version 2 of the file, and in version 3.
const V2: Place = place(&["plugins", PLUGINS[0], "containerd"]);
const V3: Place = place(&["plugins", PLUGINS[1], "containerd"]);

/// Plans the changes to containerd's files, from any state in which an earlier install left them.
pub fn plan(options: &InstallOptions, record: &Record) -> Result<Plan> {
    let layout = ContainerdLayout::detect(options.containerd_config.as_deref())?;
    let distribution = layout.distribution;
    let mut plan = Plan {
        command: Some(layout.restart.clone()),
        ..Plan::default()
    };
    let is_named = options.containerd_config.is_some();
    if let Some((why, advice)) = distribution.instruction().filter(|_| !is_named) {
        return refuse(distribution, why, &advice);
    }
    if let Some(read) = &layout.unread {
        let (named, read) = (layout.config.display(), read.display());
        plan.notes
            .push(format!("the running containerd reads {read}, not {named}"));
    }
    let files = Files::open(layout, options.containerd.as_deref(), record)?;
    let (major, minor) = files.version;
    ensure!(
        (major, minor) >= (1, 7),
        "install needs containerd 1.7 or newer, and this is {major}.{minor}"
    );
    if options.wrapper {
        let program = options.prefix.join(WRAPPER);
        plan.notes.push(format!(
            "every create fails while {} is missing: `bindguard install --wrapper` puts it back",
            program.display()
        ));
    }
    let (version, places) = files.places()?;
    let edit = Edit::of(&files, version, options, &mut plan)?;
    let is_right = match files.without.is_empty() {
        true => edit.before == edit.wanted,
        false => edit
            .wanted
            .differences(&files.effective(&Texts::new())?)
            .is_empty(),
    };
    if is_right {
        return Ok(plan);
    }
    if distribution == Distribution::EksAl2023 && !is_named {
        let fragment = edit.with_handler(places[0], "", true)?;
        let advice = node_config(&fragment, &options.prefix, &files.layout.config);
        let why = "nodeadm writes containerd's file at each boot";
        return refuse(distribution, why, &advice);
    }
    // if containerd reads no place, the error of the first place
    let first = edit.edits(places[0]);
    let edits = match first {
        Err(_) => edit.edits(places[1]).or(first)?,
        Ok(edits) => edits,
    };
    match edits {
        Some(edits) => plan.changes = changes(edits, &files, record)?,
        None => plan.advice = Some(edit.advice(places[0])?),
    }
    Ok(plan)
}

fn refuse<T>(distribution: Distribution, why: &str, advice: &str) -> Result<T> {
    print_text(advice)?;
    bail!(
        "edit containerd's files on {}: {why}; see the lines above",
        distribution.name_and_services().0
    )
}

/// An installation that is being planned.
struct Edit<'a> {
    files: &'a Files,
    /// The version of the main file.
    version: i64,
    /// The effective configuration without bindguard.
    before: Effective,
    /// The effective configuration that is meant.
    wanted: Effective,
    handler: Value,
    /// The default runtime, if it has to change.
    default: Option<String>,
}

impl<'a> Edit<'a> {
    /// The handler for this node. A default that starts no container is replaced by runc, with a note:
    /// a create never runs another runtime than the configured one, so an installation has to.
    fn of(
        files: &'a Files,
        version: i64,
        options: &InstallOptions,
        plan: &mut Plan,
    ) -> Result<Self> {
        let path = &files.search_path();
        let before = files.effective(&files.without)?;
        let mut default = options.default.then(|| RUNTIME.to_owned());
        let mut base = base_of(&before, options);
        let find_programs = || -> Result<Vec<PathBuf>> {
            let mut found = Vec::new();
            if !options.default {
                found = before.usable(&before.default, path)?;
            }
            found.extend(before.oci_runtime(base, path)?);
            Ok(found)
        };
        plan.needs_programs = match find_programs() {
            Ok(programs) => programs,
            Err(why) => {
                base = USUAL_RUNTIME;
                default.get_or_insert(base.to_owned());
                replaced(&before, why, path, plan)?
            }
        };
        let guarded = before.runtime(base).ok().with_context(|| {
            let names: Vec<&str> = before.runtimes.keys().map(String::as_str).collect();
            format!(
                "find the runtime {base:?} in containerd's effective configuration: {}",
                names.join(", ")
            )
        })?;
        let handler =
            handler(guarded, options).with_context(|| format!("guard the runtime {base:?}"))?;
        if options.wrapper {
            plan.needs_runtime = Some(binary_name(guarded).into());
        }
        let mut wanted = before.clone();
        wanted.runtimes.insert(RUNTIME.to_owned(), handler.clone());
        wanted
            .default
            .clone_from(default.as_ref().unwrap_or(&before.default));
        Ok(Self {
            files,
            version,
            before,
            wanted,
            handler,
            default,
        })
    }

    /// The files to edit and their new texts, with the handler at this place. `None` if the edit is the
    /// operator's.
    fn edits(&self, place: Place) -> Result<Option<Vec<(PathBuf, String)>>> {
        let files = self.files;
        let layout = &files.layout;
        let main = files.main_text(&files.without)?;
        let mut has_folder = false;
        for pattern in patterns(&layout.config, &main)? {
            let path = pattern.with_file_name(DROP_IN);
            if !matches(&pattern, &path) || pattern == path {
                continue;
            }
            has_folder = true;
            let edits = vec![self.drop_in(place, path)?];
            if self
                .wanted
                .differences(&files.effective_with(&edits)?)
                .is_empty()
            {
                return Ok(Some(edits));
            }
        }
        match layout.distribution {
            // a program writes the main file from a template
            Distribution::K3s | Distribution::Rke2 | Distribution::Microk8s => return Ok(None),
            Distribution::K0s if main.contains(K0S_MANAGED) => {
                // k0s before 1.36.1 merges the drop-ins into a file, and the attempt is on that
                for import in imports(&layout.config, &files.without)? {
                    if self.in_file(place, &import)?.is_some() {
                        let path = Path::new(K0S_FOLDER).join(DROP_IN);
                        return Ok(Some(vec![self.drop_in(place, path)?]));
                    }
                }
                bail!("k0s' containerd would not read a runtime {RUNTIME:?}: nothing was changed");
            }
            _ => {}
        }
        if files.version >= (2, 0) && !has_folder {
            let folder = layout.config.with_file_name(FOLDER);
            let pattern = folder.join("*.toml").display().to_string();
            let imports = (layout.config.clone(), with_import(&main, &pattern)?);
            let edits = vec![self.drop_in(place, folder.join(DROP_IN))?, imports];
            if self
                .wanted
                .differences(&files.effective_with(&edits)?)
                .is_empty()
            {
                return Ok(Some(edits));
            }
        }
        for path in files.read()? {
            if let Some(edited) = self.in_file(place, &path)? {
                return Ok(Some(vec![edited]));
            }
        }
        bail!(
            "no edit of {} or its imports gives containerd a runtime {RUNTIME:?}, so nothing was changed: {}",
            layout.config.display(),
            self.next_step()
        )
    }

    /// The drop-in's text: the present text plus the handler, or a new text.
    fn drop_in(&self, place: Place, path: PathBuf) -> Result<(PathBuf, String)> {
        let present = self.files.text(&path)?;
        let text = present.unwrap_or_else(|| format!("{HEADING}version = {}\n", self.version));
        let text = self
            .with_handler(place, &text, false)
            .doing("edit", &path)?;
        Ok((path, text))
    }

    /// The operator's own steps where a distribution writes containerd's file from a template.
    fn advice(&self, place: Place) -> Result<String> {
        let layout = &self.files.layout;
        let table = place.with_runtime("", RUNTIME, &self.handler)?;
        let template = match layout.distribution {
            Distribution::Microk8s => PathBuf::from(MICROK8S),
            _ => {
                let [of_version, older] = k3s_templates(&layout.config);
                let is_there = |template: &Path| template.symlink_metadata().is_ok();
                match self.version {
                    3 if is_there(&of_version) || !is_there(&older) => of_version,
                    _ => older,
                }
            }
        };
        let default = self.default.as_deref();
        Ok(of_template(layout, &template, &table, default))
    }

    fn next_step(&self) -> String {
        if self.files.version < (2, 0) || self.version > 2 {
            return "edit the file by hand, as docs/install.md of bindguard shows".to_owned();
        }
        let path = shell_word(&self.files.layout.config);
        format!(
            "replace the file's text by that of `containerd --config {path} config migrate`, and install again"
        )
    }

    /// The text with the handler, and with the default if that is meant. A part that is effective
    /// without bindguard is added only to `all`.
    fn with_handler(&self, place: Place, text: &str, all: bool) -> Result<String> {
        let mut edited = text.to_owned();
        if let Some(default) = &self.default
            && (all || self.before.default != *default)
        {
            edited = place.with_default(&edited, default)?;
        }
        if all || self.before.runtimes.get(RUNTIME) != Some(&self.handler) {
            edited = place.with_runtime(&edited, RUNTIME, &self.handler)?;
        }
        Ok(edited)
    }

    /// An edit of the main file or of an import, with the runtimes that would be lost by naming one.
    /// `None` if containerd does not take its runtimes from this file.
    fn in_file(&self, place: Place, path: &Path) -> Result<Option<(PathBuf, String)>> {
        let files = self.files;
        let is_main = path == files.layout.config;
        let text = match is_main {
            true => Some(files.main_text(&files.without)?),
            false => files.text(path)?,
        };
        let Some(text) = text else {
            return Ok(None);
        };
        if !is_main && find(&parse(&text)?, place.section).is_none() {
            return Ok(None);
        }
        let text = self.with_handler(place, &text, false).doing("edit", path)?;
        let mut edit = [(path.to_owned(), text)];
        let mut after = files.effective_with(&edit)?;
        if after.runtimes.get(RUNTIME) != Some(&self.handler) {
            return Ok(None);
        }
        let kept = after.runtimes.clone();
        for (name, table) in &self.before.runtimes {
            if !kept.contains_key(name) {
                let text = place.with_runtime(&edit[0].1, name, table);
                edit[0].1 = text.doing("edit", path)?;
                after = files.effective_with(&edit)?;
            }
        }
        let mut defaults = files.defaults()?.into_iter();
        if after.default != self.wanted.default
            && let Some((later, ..)) = defaults.find(|(file, ..)| *file != files.layout.config)
        {
            bail!(
                "make bindguard containerd's default: {} names the default {:?}, and containerd reads that file after {}; remove default_runtime_name from the file, or run this without --default",
                later.display(),
                after.default,
                path.display()
            );
        }
        let surprises = self.wanted.differences(&after);
        ensure!(
            surprises.is_empty(),
            "with {} edited, containerd config dump differs in more than was meant ({}), so nothing was changed: {}",
            path.display(),
            surprises.join(", "),
            self.next_step()
        );
        Ok(edit.into_iter().next())
    }
}

/// The changes: the files to edit, and the files of earlier installs that become what they were.
fn changes(edits: Vec<(PathBuf, String)>, files: &Files, record: &Record) -> Result<Vec<Change>> {
    let owner = Owner::Containerd;
    let mut changes = Vec::new();
    for (path, text) in edits {
        changes.push(Change::text(owner, &path, text)?);
    }
    for entry in record.files.iter().filter(|entry| entry.owner == owner) {
        if changes.iter().any(|change| change.path == entry.path) {
            continue;
        }
        let Some(present) = change::content(&entry.path)? else {
            continue;
        };
        let without = without_bindguard(&entry.path, &present, record)?;
        // a file of an earlier install on another main file is not read by this one
        changes.push(Change::to(owner, entry.path.clone(), without)?);
    }
    let main = change::resolved(&files.layout.config);
    // the import before the file that it names, and the file before its import
    changes.sort_by_key(|change| change.path == main && change.after.is_some());
    Ok(changes)
}

/// The templates of k3s and RKE2: for version 3 of the file, and for any.
fn k3s_templates(config: &Path) -> [PathBuf; 2] {
    ["config-v3.toml.tmpl", "config.toml.tmpl"].map(|name| config.with_file_name(name))
}

/// The image of a pod's sandbox, by containerd's files. The status of containerd 2.x does not name
/// the image.
pub fn sandbox_image(record: &Record) -> Result<Option<String>> {
    let effective = Files::of(record)?.effective(&Texts::new())?;
    Ok(effective.sandbox_image().map(str::to_owned))
}

/// The files in which an installation may have put an entry, with `true`, and the templates in which an
/// operator may have. `named`: the main file that the operator named.
pub fn files(named: Option<&Path>) -> Vec<(Owner, PathBuf, bool)> {
    let Ok(layout) = ContainerdLayout::detect(named) else {
        return Vec::new();
    };
    let mut files = imports(&layout.config, &Texts::new()).unwrap_or_default();
    let mut templates = Vec::new();
    match layout.distribution {
        Distribution::K3s | Distribution::Rke2 => templates.extend(k3s_templates(&layout.config)),
        Distribution::Microk8s => templates.push(MICROK8S.into()),
        Distribution::K0s => files.push(Path::new(K0S_FOLDER).join(DROP_IN)),
        _ => files.push(layout.config),
    }
    files.sort();
    files.dedup();
    let mut found = Vec::new();
    for (paths, is_edited) in [(files, true), (templates, false)] {
        found.extend(
            paths
                .into_iter()
                .map(|path| (Owner::Containerd, path, is_edited)),
        );
    }
    found
}

/// The content that a removal leaves at a path: see [`Record::content_without`]. An import that files
/// of others need stays.
pub fn without_bindguard(
    path: &Path,
    present: &Content,
    record: &Record,
) -> Result<Option<Content>> {
    let left = record.content_without(path, present, Some(cleaned))?;
    match (&left, present) {
        (Some(Content::File(_)), Content::File(_)) if left.as_ref() != Some(present) => {
            let (after, before) = (text_of(left.as_ref())?, text_of(Some(present))?);
            let text = with_imports_of_others(after, before, path)?;
            Ok(Some(Content::File(text.into_bytes())))
        }
        _ => Ok(left),
    }
}

/// The text without the handler; `original` has the earlier default and imports.
fn cleaned(text: &str, original: Option<&str>) -> Result<String> {
    let mut text = text.to_owned();
    for place in [V2, V3] {
        text = place.without_runtime(&text, RUNTIME, original.unwrap_or_default())?;
    }
    match original {
        Some(original) => without_import(&text, original),
        None => Ok(text),
    }
}

/// The programs of runc, which takes the place of a default that starts no container. The plan gets a
/// note about that.
///
/// # Errors
/// If runc starts no container either: then there is no better default, and nothing is written.
fn replaced(
    effective: &Effective,
    why: anyhow::Error,
    path: &SearchPath,
    plan: &mut Plan,
) -> Result<Vec<PathBuf>> {
    let programs = effective.usable(USUAL_RUNTIME, path).map_err(|runc| {
        anyhow!(
            "containerd would have no default runtime that starts containers: {why}, and {runc}; nothing was changed, configure a default runtime whose programs exist, then run this again"
        )
    })?;
    plan.notes.push(format!(
        "containerd's default runtime starts no container: {why}; {USUAL_RUNTIME} takes its place"
    ));
    Ok(programs)
}

/// The edit after which containerd's default starts containers, once nothing of bindguard's is in
/// its files. A default of the record may have gone since then, with the tool that configured it.
///
/// # Errors
/// If no edit gives containerd such a default: then bindguard has to stay in the files.
pub fn default_after_removal(record: &Record) -> Result<Plan> {
    let mut plan = Plan::default();
    let read = || -> Result<(Files, Result<Effective>)> {
        let files = Files::of(record)?;
        files.places()?;
        match files.effective(&files.without) {
            Err(error) if files.effective(&Texts::new()).is_err() => Err(error),
            after => Ok((files, after)),
        }
    };
    let (files, after) = match read() {
        Ok(read) => read,
        // a containerd that was removed, or serves no pods, needs no default
        Err(error) => {
            plan.notes.push(format!(
                "containerd's default runtime after the removal is not known: {error:#}"
            ));
            return Ok(plan);
        }
    };
    let after = after
        .context("containerd would not read its files after the removal: nothing was changed")?;
    let path = files.search_path();
    let gone = &after.default;
    let Err(why) = after.usable(gone, &path) else {
        return Ok(plan);
    };
    replaced(&after, why, &path, &mut plan)?;
    match files.with_runc_instead_of(gone)? {
        Some((file, text)) if !files.layout.is_generated(&file) => {
            let change = Change::text(Owner::Containerd, &file, text)?;
            plan.changes.push(change);
            Ok(plan)
        }
        _ => bail!(
            "containerd's default runtime {gone:?} would start no container, and no file that names this default can be edited: nothing was changed, make {USUAL_RUNTIME} the default, then run this again"
        ),
    }
}

/// The runtime to guard: the node's default, whatever its name, because pods need its options. If
/// the default calls no runc, as kata does, pods that request bindguard get runc.
fn base_of<'e>(before: &'e Effective, options: &InstallOptions) -> &'e str {
    let is_guarded = |name: &str| {
        before
            .runtime(name)
            .is_ok_and(|table| kind_of(table) == RUNC)
    };
    if options.default || is_guarded(&before.default) || !is_guarded(USUAL_RUNTIME) {
        &before.default
    } else {
        USUAL_RUNTIME
    }
}

/// The handler's table, made from the table of the runtime that it guards. bindguard's shim, by
/// `runtime_path`, keeps every option. With `--wrapper` containerd's own shim stays, and calls
/// bindguard-runtime by `BinaryName`.
///
/// # Errors
/// If the runtime is not of runc's kind.
fn handler(base: &Value, options: &InstallOptions) -> Result<Value> {
    ensure!(
        kind_of(base) == RUNC,
        "its runtime_type is {:?}, and bindguard guards {RUNC} only",
        kind_of(base)
    );
    let program = |name: &str| json!(options.prefix.join(name).display().to_string());
    let mut handler = base.clone();
    if let Value::Object(table) = &mut handler {
        table.retain(|key, _| {
            // with --wrapper, a foreign shim of the operator is kept
            !key.starts_with("runtime_") || key == "runtime_path" && options.wrapper
        });
    }
    handler["runtime_type"] = RUNC.into();
    if !options.wrapper {
        handler["runtime_path"] = program(SHIM);
    } else if let inner @ (Value::Null | Value::Object(_)) = &mut handler["options"] {
        inner["BinaryName"] = program(WRAPPER);
    }
    Ok(handler)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn base() -> Value {
        toml::from_str(
            "runtime_type = 'io.containerd.runc.v2'\nruntime_path = '/old'\nsnapshotter = 's'\npod_annotations = ['a']\n\
             [options]\nSystemdCgroup = true\nBinaryName = '/usr/bin/crun'\nRoot = '/r'\n",
        )
        .unwrap()
    }

    fn made(base: &Value, wrapper: bool, prefix: &str) -> Result<Value> {
        let options = InstallOptions {
            prefix: prefix.into(),
            default: false,
            wrapper,
            containerd: None,
            containerd_config: None,
        };
        handler(base, &options)
    }

    #[test]
    fn the_shim_keeps_every_option() {
        assert_eq!(
            made(&base(), false, "/opt/b").unwrap(),
            toml::from_str::<Value>(
                "runtime_type = 'io.containerd.runc.v2'\nruntime_path = '/opt/b/containerd-shim-bindguard-v2'\n\
                 pod_annotations = ['a']\nsnapshotter = 's'\n\
                 [options]\nBinaryName = '/usr/bin/crun'\nRoot = '/r'\nSystemdCgroup = true\n"
            )
            .unwrap()
        );
    }

    #[test]
    fn the_wrapper_stands_before_the_runtime_that_was_named() {
        let table = made(&base(), true, "/usr/bin").unwrap();
        assert_eq!(binary_name(&table), "/usr/bin/bindguard-runtime");
        assert_eq!(binary_name(&base()), "/usr/bin/crun");
        assert_eq!(table["runtime_path"].as_str(), Some("/old"));
        let mut plain = base();
        plain.as_object_mut().unwrap().remove("options");
        let table = made(&plain, true, "/usr/bin").unwrap();
        assert_eq!(binary_name(&table), "/usr/bin/bindguard-runtime");
        assert_eq!(binary_name(&plain), "runc");
    }

    #[test]
    fn another_kind_of_runtime_is_refused() {
        let kata: Value = toml::from_str("runtime_type = 'io.containerd.kata.v2'").unwrap();
        let error = made(&kata, false, "/b").unwrap_err().to_string();
        assert!(error.contains("kata"), "{error}");
    }
}
