//! containerd's configuration: a runtime handler `bindguard`, on request as the default.
//!
//! ```text
//! layout ──► distribution ──► the file to change ──► trial with `containerd config dump` ──► changes
//! ```
//!
//! The file to edit is found by trial ([`edit`]): an edit is right if `containerd config dump`
//! shows the intended change and nothing else ([`effective`]). This module writes no permanent
//! file.

mod distribution;
mod edit;
mod effective;
mod former;
mod handler;
mod layout;
mod main_file;
mod program;
mod template;
pub mod unit;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use bindguard_core::program_names::{RUNTIME, WRAPPER};
use bindguard_operator::terminal::print_text;
use toml::Table;

use self::distribution::{Distribution, Instruction, node_config};
use self::edit::{DROP_IN, Edited, FORMER_DROP_IN, Trial};
use self::effective::{Effective, Meant, PLUGINS};
use self::former::FormerTexts;
use self::handler::{Handler, HandlerKind, as_item};
use self::layout::ContainerdLayout;
use self::main_file::{MainFile, with_imports};
use self::program::Containerd;
use crate::change::{self, Change};
use crate::owner::Owner;
use crate::plan::{Healing, InstallOptions, TargetPlan, USUAL_RUNTIME};
use crate::record::{self, Entry, Record};
use crate::search_path::{self, SearchPath, Unusable};
use crate::toml_text::Place;

/// k0s merges this folder's files into a file that k0s' containerd imports.
const K0S_FOLDER: &str = "/etc/k0s/containerd.d";
/// The line by which k0s recognizes a main file of its own.
const K0S_MANAGED: &str = "k0s_managed=true";

/// Plans the changes to containerd's files, from any state in which an earlier install left them.
pub fn plan(options: &InstallOptions, record: &Record) -> Result<TargetPlan> {
    let layout = ContainerdLayout::detect(options.containerd_config.as_deref())?;
    let inputs = inputs(&layout, options, record)?;
    if let Some(verified) = record
        .verified(Owner::Containerd)
        .filter(|verified| verified.inputs == inputs && verified.gone_program().is_none())
    {
        return Ok(TargetPlan {
            command: Some(layout.restart),
            notes: verified.notes.clone(),
            needs_runtime: verified.needs_runtime.clone(),
            needs_programs: verified.needs_programs.clone(),
            ..TargetPlan::default()
        });
    }
    let mut plan = TargetPlan {
        command: Some(layout.restart.clone()),
        ..TargetPlan::default()
    };
    if options.containerd_config.is_none() {
        refuse_foreign_files(&layout)?;
    }
    if let Some(read) = &layout.unread {
        let (named, read) = (layout.config.display(), read.display());
        plan.notes
            .push(format!("the running containerd reads {read}, not {named}"));
    }
    let containerd = Containerd::locate(options.containerd.as_deref(), layout.program.as_deref())?;
    let former = FormerTexts(record);
    let main = MainFile::read(&layout.config, &containerd, &former)?;
    let before = main.effective_with(&containerd, &main.text)?;
    let path = layout.search_path(containerd.program());
    let Wanted {
        base,
        guarded,
        handler,
        default,
        programs,
        note,
    } = wanted(&before, &containerd, &path, options)?;
    let meant = Meant {
        handler: handler.table.clone(),
        default,
    };
    let trial = Trial {
        containerd: &containerd,
        main: &main,
        place: &main.places[0],
        former: &former,
        before: &before,
        meant: &meant,
    };
    let has_former_name =
        |entry: &Entry| entry.owner == Owner::Containerd && entry.path.ends_with(FORMER_DROP_IN);
    let now = effective_now(&layout, &containerd, &main, &before)?;
    if record.files().iter().any(has_former_name) || !trial.is_done(&now) {
        if layout.distribution == Distribution::EksAl2023 && options.containerd_config.is_none() {
            refuse(
                Distribution::EksAl2023,
                &instruction_for_eks(&trial, options)?,
            )?;
        }
        plan.changes = changes(layout.distribution, &trial, record)?;
        plan.guards_already = HandlerKind::all_on(containerd.version())
            .iter()
            .any(|kind| {
                let handler = kind.handler(&guarded, &options.prefix);
                handler.is_ok_and(|Handler { table, .. }| {
                    let meant = Meant {
                        handler: table,
                        ..meant.clone()
                    };
                    before.surprises(&now, &meant).is_empty()
                })
            });
    }
    // Both are true of the wrapper alone.
    if handler.needs_runtime.is_some() && handler::is_guarded(&handler.table) {
        let program = options.prefix.join(WRAPPER);
        plan.notes.push(format!(
            "every create fails while {} is missing: `bindguard install --wrapper` puts it back",
            program.display()
        ));
    }
    plan.needs_runtime = handler.needs_runtime;
    plan.needs_programs = programs;
    plan.notes.extend(note);
    if !handler.lost.is_empty() {
        let lost = handler.lost.join(", ");
        plan.notes.push(format!(
            "containerd 1.6 does not hand these options of {base} to another shim: {lost}; with --wrapper they stay"
        ));
    }
    Ok(plan)
}

/// All inputs of a plan. If they equal the recorded inputs of the last finished plan, nothing is to
/// do, and containerd need not run.
pub fn inputs(
    layout: &ContainerdLayout,
    options: &InstallOptions,
    record: &Record,
) -> Result<String> {
    let program = options
        .containerd
        .as_deref()
        .or(layout.program.as_deref())
        .map(Path::to_owned);
    let program = program.or_else(|| search_path::find("containerd"));
    let identity = program
        .as_deref()
        .and_then(|program| fs::metadata(program).ok());
    let identity = identity.map(|found| {
        (
            found.dev(),
            found.ino(),
            found.size(),
            found.mtime(),
            found.mtime_nsec(),
        )
    });
    let main = change::read(&layout.config)?.unwrap_or_default();
    let imports = String::from_utf8(main).map_or(Ok(Vec::new()), |text| {
        MainFile::imports_of(&layout.config, &text)
    });
    let edited = record
        .files()
        .iter()
        .filter(|entry| entry.owner == Owner::Containerd)
        .map(|entry| entry.path.clone());
    let files = [layout.config.clone()]
        .into_iter()
        .chain(imports.unwrap_or_default())
        .chain(edited);
    let mut texts = vec![format!(
        "{} {options:?} {:?} {:?} {:?} {} {program:?} {identity:?}",
        env!("CARGO_PKG_VERSION"),
        layout.distribution,
        layout.config,
        layout.unread,
        layout.restart
    )];
    for file in files {
        texts.push(format!(
            "{} {:?}",
            file.display(),
            change::read(&file)?.as_deref().map(record::hash)
        ));
    }
    Ok(record::hash(texts.join("\n").as_bytes()))
}

/// The inputs of the next plan, if nothing changes until then.
pub fn inputs_now(options: &InstallOptions, record: &Record) -> Result<String> {
    inputs(
        &ContainerdLayout::detect(options.containerd_config.as_deref())?,
        options,
        record,
    )
}

/// The effect of the files as they are, bindguard in them included.
fn effective_now(
    layout: &ContainerdLayout,
    containerd: &Containerd,
    main: &MainFile,
    before: &Effective,
) -> Result<Effective> {
    let Some((text, imports)) = main_as_it_is(layout)? else {
        return Ok(before.clone());
    };
    let is_same = text == main.text
        && main
            .imports
            .iter()
            .map(|import| &import.read)
            .eq(imports.iter());
    if is_same {
        Ok(before.clone())
    } else {
        containerd.effective(&layout.config, &with_imports(&text, &imports)?)
    }
}

fn effective_of_files(layout: &ContainerdLayout, containerd: &Containerd) -> Result<Effective> {
    let (text, imports) = main_as_it_is(layout)?.unwrap_or_default();
    containerd.effective(&layout.config, &with_imports(&text, &imports)?)
}

/// The image of a pod's sandbox, by containerd's files. The status of containerd 2.x does not name
/// the image.
pub fn sandbox_image(options: &InstallOptions) -> Result<Option<String>> {
    let layout = ContainerdLayout::detect(options.containerd_config.as_deref())?;
    let containerd = Containerd::locate(options.containerd.as_deref(), layout.program.as_deref())?;
    let effective = effective_of_files(&layout, &containerd)?;
    Ok(effective.sandbox_image().map(str::to_owned))
}

/// The main file's text and imports; `None` if there is no text.
fn main_as_it_is(layout: &ContainerdLayout) -> Result<Option<(String, Vec<PathBuf>)>> {
    let Some(bytes) = change::read(&layout.config)?.filter(|bytes| !bytes.is_empty()) else {
        return Ok(None);
    };
    let text =
        String::from_utf8(bytes).with_context(|| format!("read {}", layout.config.display()))?;
    let imports = MainFile::imports_of(&layout.config, &text)?;
    Ok(Some((text, imports)))
}

/// The changes: the file to edit, and the files of earlier installs that become what they were.
fn changes(distribution: Distribution, trial: &Trial<'_>, record: &Record) -> Result<Vec<Change>> {
    let (path, text) = edited_at_any_place(distribution, trial)?;
    let mut changes = vec![Change::of(&path, Some(text.into_bytes()), 0o644)?];
    for entry in record
        .files()
        .iter()
        .filter(|entry| entry.owner == Owner::Containerd)
    {
        if entry.path != changes[0].path && change::content(&entry.path)?.is_some() {
            changes.push(Change::of(
                &entry.path,
                trial.former.of(&entry.path)?.map(String::into_bytes),
                0o644,
            )?);
        }
    }
    Ok(changes)
}

/// Every file in which an installation may have put an entry. `named`: the main file that the
/// operator named.
pub fn files(named: Option<&Path>) -> Vec<PathBuf> {
    let Ok(layout) = ContainerdLayout::detect(named) else {
        return Vec::new();
    };
    let text = change::read_text(&layout.config)
        .ok()
        .flatten()
        .unwrap_or_default();
    let imports = MainFile::imports_of(&layout.config, &text).unwrap_or_default();
    let edited = match layout.distribution {
        // the main file is generated from these
        Distribution::K3s | Distribution::Rke2 => template::k3s_templates(&layout.config).to_vec(),
        Distribution::Microk8s => vec![PathBuf::from(template::MICROK8S)],
        Distribution::K0s => [DROP_IN, FORMER_DROP_IN]
            .map(|name| Path::new(K0S_FOLDER).join(name))
            .to_vec(),
        _ => vec![layout.config],
    };
    let mut files: Vec<PathBuf> = edited.into_iter().chain(imports).collect();
    files.sort();
    files.dedup();
    files
}

/// True if containerd reads this file as its main file.
pub fn is_read(path: &Path) -> bool {
    ContainerdLayout::detect(None).is_ok_and(|layout| change::resolved(&layout.config) == path)
}

/// The command after which containerd reads its files again.
pub fn restart_command() -> Option<String> {
    ContainerdLayout::detect(None)
        .ok()
        .map(|layout| layout.restart)
}

/// The text without the handler; `original` has the earlier default.
pub fn cleaned(text: &str, original: &str) -> Result<String> {
    if let Some(text) = template::without_block(text) {
        return Ok(text);
    }
    let without = |text: String, place: &Place| place.without_runtime(&text, RUNTIME, original);
    Ok(places().iter().try_fold(text.to_owned(), without)?)
}

/// The tables of runtimes in the sections of [`PLUGINS`]. Cleaning a text uses both.
fn places() -> [Place; 2] {
    PLUGINS.map(|plugin| {
        let at = |key| ["plugins", plugin, "containerd", key];
        Place::new(&at("runtimes"), &at("default_runtime_name"))
    })
}

/// Prints the operator's own steps and fails if an edit would not last.
fn refuse_foreign_files(layout: &ContainerdLayout) -> Result<()> {
    layout
        .distribution
        .instruction()
        .map_or(Ok(()), |instruction| {
            refuse(layout.distribution, &instruction)
        })
}

fn refuse(distribution: Distribution, instruction: &Instruction) -> Result<()> {
    print_text(&instruction.advice)?;
    bail!(
        "edit containerd's files on {}: {}; see the lines above",
        distribution.name(),
        instruction.why
    )
}

fn instruction_for_eks(trial: &Trial<'_>, options: &InstallOptions) -> Result<Instruction> {
    let mut fragment = trial
        .place
        .with_runtime("", RUNTIME, &as_item(&trial.meant.handler))?;
    if let Some(default) = &trial.meant.default {
        fragment = trial.place.with_default(&fragment, default)?;
    }
    Ok(node_config(&fragment, &options.prefix, &trial.main.path))
}

/// The file to change and its new text, with the handler at the first place that containerd reads.
/// If containerd reads no place, the error of the first place.
fn edited_at_any_place(distribution: Distribution, trial: &Trial<'_>) -> Result<Edited> {
    let first = edited(distribution, trial);
    if first.is_ok() {
        return first;
    }
    for place in &trial.main.places[1..] {
        if let Ok(edited) = edited(distribution, &Trial { place, ..*trial }) {
            return Ok(edited);
        }
    }
    first
}

/// The first candidate with which containerd reads what is meant.
fn edited(distribution: Distribution, trial: &Trial<'_>) -> Result<Edited> {
    match distribution {
        Distribution::K3s | Distribution::Rke2 => match trial.drop_in()? {
            Some(edited) => Ok(edited),
            None => template::of_k3s(trial),
        },
        Distribution::Microk8s => template::of_microk8s(trial),
        Distribution::K0s if trial.main.text.contains(K0S_MANAGED) => of_k0s(trial),
        _ => match trial.drop_in()? {
            Some(edited) => Ok(edited),
            None => trial
                .main()?
                .or(trial.import()?)
                .map_or_else(|| trial.refused(), Ok),
        },
    }
}

/// k0s' drop-in. k0s 1.36.1 and newer import the drop-in folder. Older k0s merges the drop-ins into
/// a file, which the trial uses.
fn of_k0s(trial: &Trial<'_>) -> Result<Edited> {
    if let Some(edited) = trial.drop_in()? {
        return Ok(edited);
    }
    ensure!(
        trial.import()?.is_some(),
        "k0s' containerd would not read a runtime {RUNTIME:?}: nothing was changed"
    );
    let path = Path::new(K0S_FOLDER).join(DROP_IN);
    let text = trial.drop_in_text(&path)?;
    Ok((path, text))
}

/// A handler to install.
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
fn wanted(
    before: &Effective,
    containerd: &Containerd,
    path: &SearchPath,
    options: &InstallOptions,
) -> Result<Wanted> {
    let mut default = options.default.then(|| RUNTIME.to_owned());
    let mut base = base_of(before, options).to_owned();
    let of_default = match options.default {
        true => Ok(Vec::new()),
        false => before.usable_default(path),
    };
    let all = of_default.and_then(|mut found| {
        found.extend(before.oci_runtime(&base, path)?);
        Ok(found)
    });
    let (programs, note) = match all {
        Ok(programs) => (programs, None),
        Err(why) => {
            let (programs, note) = replaced(before, why, path)?;
            USUAL_RUNTIME.clone_into(&mut base);
            default.get_or_insert(base.clone());
            (programs, Some(note))
        }
    };
    let table = before.runtime(&base).with_context(|| {
        format!(
            "find the runtime {base:?} in containerd's effective configuration: {}",
            before.names().join(", ")
        )
    })?;
    let kind = HandlerKind::on(
        containerd.version(),
        options.wrapper,
        options.default,
        &table,
    );
    let handler = kind
        .handler(&table, &options.prefix)
        .with_context(|| format!("guard the runtime {base:?}"))?;
    Ok(Wanted {
        base,
        guarded: table,
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
    match effective.usable(USUAL_RUNTIME, path) {
        Ok(programs) => Ok((
            programs,
            format!(
                "containerd's default runtime starts no container: {why}; {USUAL_RUNTIME} takes its place"
            ),
        )),
        Err(runc) => bail!(
            "containerd would have no default runtime that starts containers: {why}, and {runc}; nothing was changed, configure a default runtime whose programs exist, then run this again"
        ),
    }
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
    let former = FormerTexts(record);
    let found = || {
        let layout = ContainerdLayout::detect(named)?;
        let containerd = Containerd::locate(program, layout.program.as_deref())?;
        let main = MainFile::read(&layout.config, &containerd, &former)?;
        anyhow::Ok((layout, containerd, main))
    };
    let unknown = |error: anyhow::Error| Healing {
        notes: vec![format!(
            "containerd's default runtime after the removal is not known: {error:#}"
        )],
        edits: Vec::new(),
    };
    let (layout, containerd, main) = match found() {
        Ok(found) => found,
        // a containerd that was removed, or serves no pods, needs no default
        Err(error) => return Ok(unknown(error)),
    };
    let after = match main.effective_with(&containerd, &main.text) {
        Ok(after) => after,
        Err(error) if effective_of_files(&layout, &containerd).is_ok() => {
            return Err(error.context(
                "containerd would not read its files after the removal: nothing was changed",
            ));
        }
        Err(error) => return Ok(unknown(error)),
    };
    let path = layout.search_path(containerd.program());
    let Err(why) = after.usable_default(&path) else {
        return Ok(Healing::default());
    };
    let gone = after.default();
    let (_, note) = replaced(&after, why, &path)?;
    let edit = main
        .with_default_instead_of(gone, USUAL_RUNTIME, &containerd, &former)?
        .filter(|(file, _)| !layout.is_generated(file));
    match edit {
        Some(edit) => Ok(Healing {
            notes: vec![note],
            edits: vec![edit],
        }),
        None => bail!(
            "containerd's default runtime {gone:?} would start no container, and no file that names this default can be edited: nothing was changed, make {USUAL_RUNTIME} the default, then run this again"
        ),
    }
}

/// The runtime to guard: the node's default, whatever its name, because pods need its options. If
/// the default calls no runc, as kata does, pods that request bindguard get runc.
fn base_of<'e>(before: &'e Effective, options: &InstallOptions) -> &'e str {
    let default = before.default();
    let is_guarded = |name: &str| {
        before
            .runtime(name)
            .is_some_and(|table| handler::is_guarded(&table))
    };
    if options.default || is_guarded(default) || !is_guarded("runc") {
        default
    } else {
        "runc"
    }
}
