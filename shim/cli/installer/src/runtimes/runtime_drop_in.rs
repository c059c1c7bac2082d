//! A drop-in for Podman or CRI-O: a file of bindguard's own in a folder whose files are read in
//! order.
//!
//! Existing files are not edited. The daemon merges a drop-in with the existing files: all runtimes
//! count, and the last named default wins.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use bindguard_core::program_names::RUNTIME;
use toml::Value;

use crate::options::{Healing, InstallOptions, PlannedChange, USUAL_RUNTIME, bytes_after};
use crate::record::HEADING;
use crate::search_path::{Unusable, find};
use crate::toml_text::Place;

/// The text of a drop-in with a runtime, on request as the default.
pub fn drop_in_text(place: Place, runtime: &Value, options: &InstallOptions) -> Result<String> {
    let mut text = HEADING.to_owned();
    if options.default {
        text = place.with_default(&text, RUNTIME)?;
    }
    Ok(place.with_runtime(&text, RUNTIME, runtime)?)
}

/// Fails if one of these files names a default, and is read after the drop-in.
pub fn refuse_later_default(
    engine: &str,
    files: &[FileText],
    drop_in: &Path,
    place: Place,
) -> Result<()> {
    for (path, text) in files {
        let named = place.default_in(text);
        let named = named.with_context(|| format!("parse {}", path.display()))?;
        let is_later = path.parent() == drop_in.parent() && path.as_path() > drop_in;
        if let Some(name) = named.filter(|name| is_later && !name.is_empty()) {
            bail!(
                "make bindguard {engine}'s default: {} names the default {name:?}, and {engine} reads that file after {}; remove the default from the file, or run this without --default",
                path.display(),
                drop_in.display()
            );
        }
    }
    Ok(())
}

/// runc, or crun on a node without runc.
pub fn usual_runtime() -> PathBuf {
    let crun = find("crun").filter(|_| find(USUAL_RUNTIME).is_none());
    crun.unwrap_or_else(|| USUAL_RUNTIME.into())
}

/// A file and its text.
pub type FileText = (PathBuf, String);

/// The paths of a program's files in the order in which the program reads them: these, then those of
/// a folder.
pub fn paths_in_order(main: &[&str], folder: &str, extension: Option<&str>) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let found = path.extension().and_then(OsStr::to_str);
        let is_file = fs::metadata(&path).is_ok_and(|found| found.is_file());
        if is_file && (extension.is_none() || found == extension) {
            paths.push(path);
        }
    }
    paths.sort();
    main.iter().map(PathBuf::from).chain(paths).collect()
}

/// The texts of these files, with the contents that they have after `steps`.
pub fn texts_after(paths: Vec<PathBuf>, steps: &[PlannedChange]) -> Result<Vec<FileText>> {
    let mut files = Vec::new();
    for path in paths {
        if let Some(bytes) = bytes_after(&path, steps)? {
            let text =
                String::from_utf8(bytes).with_context(|| format!("read {}", path.display()))?;
            files.push((path, text));
        }
    }
    Ok(files)
}

/// The default runtime of these files, and the index of the file that names it: the last.
pub fn default_of(files: &[FileText], place: Place) -> Result<Option<(usize, String)>> {
    let mut found = None;
    for (at, (path, text)) in files.iter().enumerate() {
        let named = place.default_in(text);
        let named = named.with_context(|| format!("parse {}", path.display()))?;
        if let Some(name) = named.filter(|name| !name.is_empty()) {
            found = Some((at, name));
        }
    }
    Ok(found)
}

/// The entry of a runtime; the last file wins.
pub fn runtime_of(files: &[FileText], place: Place, name: &str) -> Result<Option<Value>> {
    let mut found = None;
    for (path, text) in files {
        let entry = place.runtime_in(text, name);
        found = entry
            .with_context(|| format!("parse {}", path.display()))?
            .or(found);
    }
    Ok(found)
}

/// Changes the files until their default starts containers. A default that is gone is replaced by
/// `usual`, or removed: then an earlier file's default is effective, or one of the built-in ones.
///
/// # Errors
/// If there is no better default.
pub fn heal(
    engine: &str,
    files: &mut [FileText],
    place: Place,
    usual: Option<&str>,
    built_in: &[&str],
    check: impl Fn(&str, Option<Value>) -> Result<(), Unusable>,
) -> Result<Healing> {
    let mut healing = Healing::default();
    while let Some((at, name)) = default_of(files, place)? {
        let Err(why) = check(&name, runtime_of(files, place, &name)?) else {
            break;
        };
        let mut has_better = usual.is_some();
        for name in built_in {
            has_better |= check(name, runtime_of(files, place, name)?).is_ok();
        }
        let (path, text) = &mut files[at];
        // a file of a package is written anew with its next update
        if path.starts_with("/usr") || !has_better {
            bail!(
                "{engine} would have no default runtime that starts containers: {why}; nothing was changed, name another default than that of {}, then run this again",
                path.display()
            );
        }
        *text = match usual {
            Some(usual) => place.with_default(text, usual)?,
            None => place.without_default(text)?,
        };
        healing.notes.push(format!(
            "{engine}'s default runtime starts no container: {why}; {} takes its place",
            usual.unwrap_or("the default below it")
        ));
        healing.edits.retain(|(edited, _)| edited != path);
        healing.edits.push((path.clone(), text.clone()));
    }
    Ok(healing)
}
