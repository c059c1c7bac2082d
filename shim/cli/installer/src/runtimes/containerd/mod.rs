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
//! ([`effective`]). This module writes no permanent file.

mod files;
mod handler;
mod node;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use bindguard_core::program_names::{RUNTIME, WRAPPER};
use bindguard_core::text::shell_word;
use bindguard_operator::terminal::print_text;
use toml::{Table, Value};

use crate::change::{self, Change, Content};
use crate::options::{Healing, InstallOptions, Owner, TargetPlan, USUAL_RUNTIME};
use crate::record::{HEADING, Record, text_of};
use crate::runtimes::containerd::files::{
    Files, Texts, imports_of, matches, patterns, with_import, with_imports_of_others,
    without_import,
};
use crate::runtimes::containerd::handler::{
    Effective, Handler, HandlerKind, Meant, PLUGINS, is_guarded,
};
use crate::runtimes::containerd::node::{
    ContainerdLayout, Distribution, Instruction, node_config, of_template,
};
use crate::search_path::{SearchPath, Unusable};
use crate::toml_text::{Place, find, parse};

pub use self::node::unit_exists;

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
        section,
        runtimes: "runtimes",
        default: "default_runtime_name",
    }
}
/// The place of runtimes in version 2 of the file, and in version 3.
const V2: Place = place(&["plugins", PLUGINS[0], "containerd"]);
const V3: Place = place(&["plugins", PLUGINS[1], "containerd"]);

/// A file and its new text.
type Edited = (PathBuf, String);

/// Plans the changes to containerd's files, from any state in which an earlier install left them.
pub fn plan(options: &InstallOptions, record: &Record) -> Result<TargetPlan> {
    let layout = ContainerdLayout::detect(options.containerd_config.as_deref())?;
    let distribution = layout.distribution;
    let mut plan = TargetPlan {
        command: Some(layout.restart.clone()),
        ..TargetPlan::default()
    };
    let is_named = options.containerd_config.is_some();
    if let Some(instruction) = distribution.instruction().filter(|_| !is_named) {
        return refuse(distribution, &instruction);
    }
    if let Some(read) = &layout.unread {
        let (named, read) = (layout.config.display(), read.display());
        plan.notes
            .push(format!("the running containerd reads {read}, not {named}"));
    }
    let files = Files::open(layout, options.containerd.as_deref(), record)?;
    let (version, places) = files.places()?;
    let before = files.effective(&files.without)?;
    let wanted = wanted(&before, &files, options)?;
    let attempt = Attempt {
        files: &files,
        place: places[0],
        version,
        before: &before,
        meant: &Meant {
            handler: wanted.handler.table.clone(),
            default: wanted.default,
        },
    };
    let now = match files.without.is_empty() {
        true => before.clone(),
        false => files.effective(&Texts::new())?,
    };
    if !attempt.is_right(&now) {
        match distribution {
            Distribution::EksAl2023 if !is_named => {
                let fragment = attempt.fragment()?;
                let file = &files.layout.config;
                return refuse(distribution, &node_config(&fragment, &options.prefix, file));
            }
            _ => match attempt.at_any_place(places)? {
                Some(edits) => plan.changes = changes(edits, &files, record)?,
                None => plan.advice = Some(attempt.advice()?),
            },
        }
        for kind in HandlerKind::all_on(files.version) {
            let Ok(handler) = kind.handler(&wanted.guarded, &options.prefix) else {
                continue;
            };
            let meant = Meant {
                handler: handler.table,
                default: attempt.meant.default.clone(),
            };
            plan.guards_already |= before.surprises(&now, &meant).is_empty();
        }
    }
    let handler = wanted.handler;
    // Both are true of the wrapper alone.
    if handler.needs_runtime.is_some() && is_guarded(&handler.table) {
        let program = options.prefix.join(WRAPPER);
        plan.notes.push(format!(
            "every create fails while {} is missing: `bindguard install --wrapper` puts it back",
            program.display()
        ));
    }
    plan.needs_runtime = handler.needs_runtime;
    plan.needs_programs = wanted.programs;
    plan.notes.extend(wanted.note);
    if !handler.lost.is_empty() {
        plan.notes.push(format!(
            "containerd 1.6 does not hand these options of {} to another shim: {}; with --wrapper they stay",
            wanted.base,
            handler.lost.join(", ")
        ));
    }
    Ok(plan)
}

/// An installation that is being planned.
#[derive(Clone, Copy)]
struct Attempt<'a> {
    files: &'a Files,
    /// The place of the handler in the edited file.
    place: Place,
    version: i64,
    /// The effective configuration without bindguard.
    before: &'a Effective,
    meant: &'a Meant,
}

impl Attempt<'_> {
    /// True if the files have this effect as they are.
    fn is_right(&self, now: &Effective) -> bool {
        self.before.surprises(now, self.meant).is_empty()
    }

    fn effective_with(&self, edits: &[Edited]) -> Result<Effective> {
        let mut texts = self.files.without.clone();
        for (path, text) in edits {
            texts.insert(path.clone(), Some(text.clone()));
        }
        self.files.effective(&texts)
    }

    /// The edits, with the handler at the first place that containerd reads. `None` if the edit is the
    /// operator's. If containerd reads no place, the error of the first place.
    fn at_any_place(&self, places: [Place; 2]) -> Result<Option<Vec<Edited>>> {
        let first = self.edits();
        if first.is_ok() {
            return first;
        }
        let place = places[1];
        Self { place, ..*self }.edits().or(first)
    }

    fn edits(&self) -> Result<Option<Vec<Edited>>> {
        let layout = &self.files.layout;
        let main = self.files.main_text(&self.files.without)?;
        let mut has_folder = false;
        for pattern in patterns(&layout.config, &main)? {
            let path = pattern.with_file_name(DROP_IN);
            if !matches(&pattern, &path) || pattern == path {
                continue;
            }
            has_folder = true;
            let edits = vec![(path.clone(), self.drop_in(&path)?)];
            if self.is_right(&self.effective_with(&edits)?) {
                return Ok(Some(edits));
            }
        }
        match layout.distribution {
            // a program writes the main file from a template
            Distribution::K3s | Distribution::Rke2 | Distribution::Microk8s => return Ok(None),
            Distribution::K0s if main.contains(K0S_MANAGED) => {
                // k0s before 1.36.1 merges the drop-ins into a file, and the attempt is on that
                for import in self.files.imports(&self.files.without)? {
                    if self.in_file(&import)?.is_some() {
                        let path = Path::new(K0S_FOLDER).join(DROP_IN);
                        let text = self.drop_in(&path)?;
                        return Ok(Some(vec![(path, text)]));
                    }
                }
                bail!("k0s' containerd would not read a runtime {RUNTIME:?}: nothing was changed");
            }
            _ => {}
        }
        if self.files.version >= (2, 0) && !has_folder {
            let folder = layout.config.with_file_name(FOLDER);
            let pattern = folder.join("*.toml").display().to_string();
            let path = folder.join(DROP_IN);
            let imports = with_import(&main, &pattern)?;
            let drop_in = self.drop_in(&path)?;
            let edits = vec![(path, drop_in), (layout.config.clone(), imports)];
            if self.is_right(&self.effective_with(&edits)?) {
                return Ok(Some(edits));
            }
        }
        let mut candidates = vec![layout.config.clone()];
        candidates.extend(self.files.imports(&self.files.without)?);
        for path in candidates {
            if let Some(edited) = self.in_file(&path)? {
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
    fn drop_in(&self, path: &Path) -> Result<String> {
        let present = self.files.text(&self.files.without, path)?;
        let text = present.unwrap_or_else(|| format!("{HEADING}version = {}\n", self.version));
        self.with_handler(&text)
            .with_context(|| format!("edit {}", path.display()))
    }

    /// The lines of the handler alone.
    fn fragment(&self) -> Result<String> {
        let mut text = String::new();
        if let Some(default) = &self.meant.default {
            text = self.place.with_default(&text, default)?;
        }
        let handler = Value::Table(self.meant.handler.clone());
        Ok(self.place.with_runtime(&text, RUNTIME, &handler)?)
    }

    /// The operator's own steps where a distribution writes containerd's file from a template.
    fn advice(&self) -> Result<String> {
        let layout = &self.files.layout;
        let handler = Value::Table(self.meant.handler.clone());
        let table = self.place.with_runtime("", RUNTIME, &handler)?;
        let template = match layout.distribution {
            Distribution::Microk8s => PathBuf::from(MICROK8S),
            _ => k3s_template(&layout.config, self.version),
        };
        let default = self.meant.default.as_deref();
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

    /// The text with the handler, and with the default if that is meant.
    fn with_handler(&self, text: &str) -> Result<String> {
        let mut edited = text.to_owned();
        if let Some(default) = &self.meant.default
            && self.before.default() != default
        {
            edited = self.place.with_default(&edited, default)?;
        }
        if self.before.runtime(RUNTIME).as_ref() != Some(&self.meant.handler) {
            let handler = Value::Table(self.meant.handler.clone());
            edited = self.place.with_runtime(&edited, RUNTIME, &handler)?;
        }
        Ok(edited)
    }

    /// An edit of the main file or of an import, with the runtimes that would be lost by naming one.
    /// `None` if containerd does not take its runtimes from this file.
    fn in_file(&self, path: &Path) -> Result<Option<Edited>> {
        let doing = || format!("edit {}", path.display());
        let main = &self.files.layout.config;
        let text = match path == main {
            true => Some(self.files.main_text(&self.files.without)?),
            false => self.files.text(&self.files.without, path)?,
        };
        let Some(text) = text else {
            return Ok(None);
        };
        if path != main && find(&parse(&text)?, self.place.section).is_none() {
            return Ok(None);
        }
        let mut edit = [(
            path.to_owned(),
            self.with_handler(&text).with_context(doing)?,
        )];
        let mut after = self.effective_with(&edit)?;
        if after.runtime(RUNTIME).as_ref() != Some(&self.meant.handler) {
            return Ok(None);
        }
        let lost: Vec<_> = self.before.lost_in(&after).collect();
        for (name, table) in lost {
            let text = self
                .place
                .with_runtime(&edit[0].1, name, &Value::Table(table));
            edit[0].1 = text.with_context(doing)?;
            after = self.effective_with(&edit)?;
        }
        let meant = self.meant.default.as_deref();
        if after.default() != meant.unwrap_or(self.before.default())
            && let Some(later) = self.files.import_with_default()?
        {
            bail!(
                "make bindguard containerd's default: {} names the default {:?}, and containerd reads that file after {}; remove default_runtime_name from the file, or run this without --default",
                later.display(),
                after.default(),
                path.display()
            );
        }
        let surprises = self.before.surprises(&after, self.meant);
        if !surprises.is_empty() {
            bail!(
                "with {} edited, containerd config dump differs in more than was meant ({}), so nothing was changed: {}",
                path.display(),
                surprises.join(", "),
                self.next_step()
            );
        }
        let [edit] = edit;
        Ok(Some(edit))
    }
}

/// The changes: the files to edit, and the files of earlier installs that become what they were.
fn changes(edits: Vec<Edited>, files: &Files, record: &Record) -> Result<Vec<Change>> {
    let mut changes = Vec::new();
    for (path, text) in edits {
        changes.push(Change::of(&path, Some(text.into_bytes()), 0o644)?);
    }
    for entry in record
        .files
        .iter()
        .filter(|it| it.owner == Owner::Containerd)
    {
        if changes.iter().any(|change| change.path == entry.path) {
            continue;
        }
        let Some(present) = change::content(&entry.path)? else {
            continue;
        };
        let without = without_bindguard(&entry.path, &present, record)?;
        let without = without.as_ref().and_then(Content::bytes);
        // a file of an earlier install on another main file is not read by this one
        changes.push(Change::of(&entry.path, without.map(<[u8]>::to_vec), 0o644)?);
    }
    let main = change::resolved(&files.layout.config);
    // the import before the file that it names, and the file before its import
    changes.sort_by_key(|change| change.path == main && change.after.is_some());
    Ok(changes)
}

/// The template of k3s and RKE2 for this version of the file.
fn k3s_template(config: &Path, version: i64) -> PathBuf {
    let [of_version, older] = k3s_templates(config);
    match version {
        3 if of_version.symlink_metadata().is_ok() || older.symlink_metadata().is_err() => {
            of_version
        }
        _ => older,
    }
}

fn k3s_templates(config: &Path) -> [PathBuf; 2] {
    ["config-v3.toml.tmpl", "config.toml.tmpl"].map(|name| config.with_file_name(name))
}

/// The image of a pod's sandbox, by containerd's files. The status of containerd 2.x does not name
/// the image.
pub fn sandbox_image(options: &InstallOptions, record: &Record) -> Result<Option<String>> {
    let layout = ContainerdLayout::detect(options.containerd_config.as_deref())?;
    let files = Files::open(layout, options.containerd.as_deref(), record)?;
    let effective = files.effective(&Texts::new())?;
    Ok(effective.sandbox_image().map(str::to_owned))
}

/// The files in which an installation may have put an entry, and the templates in which an operator
/// may have. `named`: the main file that the operator named.
pub fn files(named: Option<&Path>) -> (Vec<PathBuf>, Vec<PathBuf>) {
    let Ok(layout) = ContainerdLayout::detect(named) else {
        return (Vec::new(), Vec::new());
    };
    let mut files = imports_of(&layout.config).unwrap_or_default();
    let mut templates = Vec::new();
    match layout.distribution {
        Distribution::K3s | Distribution::Rke2 => templates.extend(k3s_templates(&layout.config)),
        Distribution::Microk8s => templates.push(MICROK8S.into()),
        Distribution::K0s => files.push(Path::new(K0S_FOLDER).join(DROP_IN)),
        _ => files.push(layout.config),
    }
    files.sort();
    files.dedup();
    (files, templates)
}

/// True if containerd reads this file as its main file.
pub fn is_read(path: &Path) -> bool {
    ContainerdLayout::detect(None).is_ok_and(|layout| change::resolved(&layout.config) == path)
}

/// The command after which containerd reads its files again.
pub fn restart_command() -> Option<String> {
    let layout = ContainerdLayout::detect(None).ok()?;
    Some(layout.restart)
}

/// The content that a removal leaves at a path: see [`Record::content_without`]. An import that files
/// of others need stays.
pub fn without_bindguard(
    path: &Path,
    present: &Content,
    record: &Record,
) -> Result<Option<Content>> {
    let left = record.content_without(path, present, cleaned)?;
    match (&left, present) {
        (Some(Content::File(after)), Content::File(before)) if after != before => {
            let text = with_imports_of_others(text_of(after)?, text_of(before)?, path)?;
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

fn refuse<T>(distribution: Distribution, instruction: &Instruction) -> Result<T> {
    print_text(&instruction.advice)?;
    bail!(
        "edit containerd's files on {}: {}; see the lines above",
        distribution.name(),
        instruction.why
    )
}

struct Wanted {
    /// The runtime that it guards.
    base: String,
    /// That runtime's table.
    guarded: Table,
    handler: Handler,
    /// The default runtime, if it has to change.
    default: Option<String>,
    /// The programs that new containers need, without bindguard's own.
    programs: Vec<PathBuf>,
    /// The default that was replaced.
    note: Option<String>,
}

/// The handler for this node. A default that starts no container is replaced by runc, with a note:
/// a create never runs another runtime than the configured one, so an installation has to.
fn wanted(before: &Effective, files: &Files, options: &InstallOptions) -> Result<Wanted> {
    let path = &files.layout.search_path(files.program());
    let mut default = options.default.then(|| RUNTIME.to_owned());
    let mut base = base_of(before, options).to_owned();
    let mut note = None;
    let of_default = match options.default {
        true => Ok(Vec::new()),
        false => before.usable_default(path),
    };
    let found = of_default.and_then(|mut found| {
        found.extend(before.oci_runtime(&base, path)?);
        Ok(found)
    });
    let programs = match found {
        Ok(programs) => programs,
        Err(why) => {
            let (programs, replaced) = replaced(before, why, path)?;
            note = Some(replaced);
            USUAL_RUNTIME.clone_into(&mut base);
            default.get_or_insert(base.clone());
            programs
        }
    };
    let guarded = before.runtime(&base).with_context(|| {
        format!(
            "find the runtime {base:?} in containerd's effective configuration: {}",
            before.names().join(", ")
        )
    })?;
    let kind = HandlerKind::on(files.version, options.wrapper, options.default, &guarded);
    let handler = kind
        .handler(&guarded, &options.prefix)
        .with_context(|| format!("guard the runtime {base:?}"))?;
    Ok(Wanted {
        base,
        guarded,
        handler,
        default,
        programs,
        note,
    })
}

/// The programs of runc, which takes the place of a default that starts no container, and the note
/// about that.
///
/// # Errors
/// If runc starts no container either: then there is no better default, and nothing is written.
fn replaced(
    effective: &Effective,
    why: Unusable,
    path: &SearchPath,
) -> Result<(Vec<PathBuf>, String)> {
    let programs = effective.usable(USUAL_RUNTIME, path).map_err(|runc| {
        anyhow!(
            "containerd would have no default runtime that starts containers: {why}, and {runc}; nothing was changed, configure a default runtime whose programs exist, then run this again"
        )
    })?;
    let note = format!(
        "containerd's default runtime starts no container: {why}; {USUAL_RUNTIME} takes its place"
    );
    Ok((programs, note))
}

/// The edit after which containerd's default starts containers, once nothing of bindguard's is in
/// its files. A default of the record may have gone since then, with the tool that configured it.
///
/// # Errors
/// If no edit gives containerd such a default: then bindguard has to stay in the files.
pub fn default_after_removal(record: &Record) -> Result<Healing> {
    let options = record.verified(Owner::Containerd).map(|it| &it.options);
    let named = options.and_then(|options| options.containerd_config.as_deref());
    let program = options.and_then(|options| options.containerd.as_deref());
    let unknown = |error: anyhow::Error| Healing {
        notes: vec![format!(
            "containerd's default runtime after the removal is not known: {error:#}"
        )],
        edits: Vec::new(),
    };
    let found = ContainerdLayout::detect(named).and_then(|layout| {
        let files = Files::open(layout, program, record)?;
        files.places()?;
        Ok(files)
    });
    let files = match found {
        Ok(files) => files,
        // a containerd that was removed, or serves no pods, needs no default
        Err(error) => return Ok(unknown(error)),
    };
    let after = match files.effective(&files.without) {
        Ok(after) => after,
        Err(error) if files.effective(&Texts::new()).is_ok() => {
            return Err(error.context(
                "containerd would not read its files after the removal: nothing was changed",
            ));
        }
        Err(error) => return Ok(unknown(error)),
    };
    let path = files.layout.search_path(files.program());
    let Err(why) = after.usable_default(&path) else {
        return Ok(Healing::default());
    };
    let gone = after.default();
    let (_, note) = replaced(&after, why, &path)?;
    match files.with_default_instead_of(gone, USUAL_RUNTIME)? {
        Some(edit) if !files.layout.is_generated(&edit.0) => Ok(Healing {
            notes: vec![note],
            edits: vec![edit],
        }),
        _ => bail!(
            "containerd's default runtime {gone:?} would start no container, and no file that names this default can be edited: nothing was changed, make {USUAL_RUNTIME} the default, then run this again"
        ),
    }
}

/// The runtime to guard: the node's default, whatever its name, because pods need its options. If
/// the default calls no runc, as kata does, pods that request bindguard get runc.
fn base_of<'e>(before: &'e Effective, options: &InstallOptions) -> &'e str {
    let is_guarded = |name: &str| {
        let table = before.runtime(name);
        table.is_some_and(|table| is_guarded(&table))
    };
    let default = before.default();
    if options.default || is_guarded(default) || !is_guarded("runc") {
        default
    } else {
        "runc"
    }
}
