//! containerd's files, as they are and as an edit would leave them, and containerd's own reading of
//! them: `config dump`. Nothing is written before containerd has read a copy.
//!
//! A file alone does not show the effective configuration. containerd 1.7 uses a file's `runtimes`
//! *instead of* the built-in runtimes: a file that adds only a new runtime loses `runc`. Imports of 1.7
//! replace whole sections. The imports of 2.x merge or are ignored, depending on the version. So an edit
//! is accepted only if the dump after it equals the dump before it plus the intended change.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use bindguard_operator::root_program::{RootProgram, output_of};
use bindguard_sys::write_new_file;
use serde_json::{Map, Value};
use toml_edit::{Array, Item};

use crate::change::{self, Content, Doing, Owner, private_folder, read_text};
use crate::config_text::{Place, find, parse, with_value, without_value};
use crate::record::{Record, USUAL_RUNTIME};
use crate::running::{Daemon, SearchPath, not_configured};
use crate::runtimes::containerd::node::ContainerdLayout;
use crate::runtimes::containerd::{DROP_IN, V2, V3, without_bindguard};

/// The files whose texts differ from those on the disk; `None` for a missing file.
pub type Texts = BTreeMap<PathBuf, Option<String>>;

/// A node's containerd and its files.
pub struct Files {
    /// Where the files are.
    pub layout: ContainerdLayout,
    /// Major and minor.
    pub version: (u32, u32),
    /// The files as they are without bindguard.
    pub without: Texts,
    program: RootProgram,
}

impl Files {
    /// Finds containerd's program: the named program, else the running program, else the program on
    /// `PATH`.
    pub fn open(layout: ContainerdLayout, named: Option<&Path>, record: &Record) -> Result<Self> {
        let program = match named.or(layout.program.as_deref()) {
            Some(program) => RootProgram::open(program)?
                .with_context(|| format!("run {}: no such file", program.display()))?,
            None => RootProgram::find(Path::new("containerd"), None)?
                .context("find containerd: it is not on PATH, name it with --containerd PROGRAM")?,
        };
        let said = run(&program, &["--version"])?;
        let version = version_in(&said).with_context(|| {
            format!(
                "find a version in what {} says: {:?}: is it containerd?",
                program.path().display(),
                said.lines().next().unwrap_or_default()
            )
        })?;
        let mut read = vec![layout.config.clone()];
        read.extend(imports(&layout.config, &Texts::new()).unwrap_or_default());
        let mut without = Texts::new();
        for path in read {
            let file = change::resolved(&path);
            let Some(present) = change::content(&file)? else {
                continue;
            };
            let left = without_bindguard(&file, &present, record).doing("parse", &path)?;
            if left.as_ref() != Some(&present) {
                let bytes = left.as_ref().and_then(Content::bytes);
                let text = bytes.map(|bytes| String::from_utf8_lossy(bytes).into_owned());
                without.insert(path, text);
            }
        }
        Ok(Self {
            layout,
            version,
            without,
            program,
        })
    }

    /// The containerd of the recorded installation.
    pub fn of(record: &Record) -> Result<Self> {
        let installed = record.verified(Owner::Containerd);
        let config = installed.and_then(|it| it.options.containerd_config.as_deref());
        let layout = ContainerdLayout::detect(config)?;
        let program = installed.and_then(|it| it.options.containerd.as_deref());
        Self::open(layout, program, record)
    }

    /// The folders in which this containerd searches shims and runtimes.
    pub fn search_path(&self) -> SearchPath {
        let path = self.layout.daemon.as_ref().and_then(Daemon::search_path);
        SearchPath::of(path, Some(self.program.path()))
    }

    /// The text of a file without bindguard.
    pub fn text(&self, path: &Path) -> Result<Option<String>> {
        text_in(&self.without, path)
    }

    /// The main file's text. An empty or missing file gets the newest version that every containerd of
    /// its generation reads.
    pub fn main_text(&self, texts: &Texts) -> Result<String> {
        let path = &self.layout.config;
        let text = text_in(texts, path)?.unwrap_or_default();
        if !parse(&text).doing("parse", path)?.is_empty() {
            return Ok(text);
        }
        let newest = if self.version < (2, 0) { 2 } else { 3 };
        Ok(format!("{text}version = {newest}\n"))
    }

    /// The files without bindguard, in the order in which containerd reads them.
    pub fn read(&self) -> Result<Vec<PathBuf>> {
        let main = &self.layout.config;
        let mut files = vec![main.clone()];
        files.extend(imports(main, &self.without)?);
        Ok(files)
    }

    /// The effective configuration with these texts.
    pub fn effective(&self, texts: &Texts) -> Result<Effective> {
        let path = &self.layout.config;
        // containerd's file may have the password of a registry
        let folder = private_folder().context("create a folder for files to try out")?;
        let copy = |name: &str, text: &str| {
            let copy = folder.path().join(format!("{name}.toml"));
            write_new_file(&copy, text.as_bytes(), 0o600).doing("write", &copy)?;
            anyhow::Ok(copy.display().to_string())
        };
        let mut text = self.main_text(texts)?;
        let mut read = Array::new();
        for import in imports(path, texts)? {
            read.push(match texts.get(&import) {
                Some(Some(text)) => copy(&read.len().to_string(), text)?,
                _ => import.display().to_string(),
            });
        }
        if !read.is_empty() || parse(&text)?.get("imports").is_some() {
            // absolute paths: the copy is in another folder
            text = with_value(&text, &["imports"], &read.to_string())?;
        }
        let main = copy("main", &text)?;
        let dump = run(&self.program, &["--config", &main, "config", "dump"])
            .map_err(|error| {
                anyhow!(format!("{error:#}").replace(&main, &path.display().to_string()))
            })
            .doing("run containerd config dump for", path)?;
        let program = self.program.path().display();
        Effective::from_dump(&dump).with_context(|| format!("read what {program} config dump says"))
    }

    /// The effective configuration with these edits of the files without bindguard.
    pub fn effective_with(&self, edits: &[(PathBuf, String)]) -> Result<Effective> {
        let mut texts = self.without.clone();
        for (path, text) in edits {
            texts.insert(path.clone(), Some(text.clone()));
        }
        self.effective(&texts)
    }

    /// The version of the main file, and the places where containerd may read runtimes, the likeliest
    /// first. containerd 2 reads the sections of version 3 from a file of version 2, too, as on AKS.
    pub fn places(&self) -> Result<(i64, [Place; 2])> {
        let path = &self.layout.config;
        let main = self.main_text(&self.without)?;
        let document = parse(&main)?;
        let disabled = names_in(document.get("disabled_plugins"));
        ensure!(
            !disabled.iter().any(|it| it == "cri" || it.contains(".cri")),
            "{} disables the CRI plugin: no pods run on this containerd",
            path.display()
        );
        let version = document.get("version").and_then(Item::as_integer);
        let version = version.unwrap_or_default();
        let mut places = match version {
            2 => [V2, V3],
            // version 4, of containerd 2.3 and newer, moves the sections of servers, and not those of
            // the CRI
            3 | 4 => [V3, V2],
            _ => bail!(
                "{} is not of version 2, 3 or 4: move it there first, containerd config migrate shows how",
                path.display()
            ),
        };
        // The sort is stable: a section of the main file comes before a section of an import.
        let mut files = self.read()?;
        files.rotate_left(1);
        for file in files {
            let text = self.text(&file)?.unwrap_or_default();
            let document = parse(&text).doing("parse", &file)?;
            places.sort_by_key(|place| find(&document, place.section).is_none());
        }
        Ok((version, places))
    }

    /// The default runtimes that the files name, the effective one first.
    pub fn defaults(&self) -> Result<Vec<(PathBuf, Place, String)>> {
        let mut found = Vec::new();
        // the last file wins
        for file in self.read()?.into_iter().rev() {
            let text = self.text(&file)?.unwrap_or_default();
            for place in [V2, V3] {
                if let Some(name) = place.default_in(&text)? {
                    found.push((file.clone(), place, name));
                }
            }
        }
        Ok(found)
    }

    /// The file that makes `gone` the default, and its text with runc as the default. `None` if no
    /// file does.
    pub fn with_runc_instead_of(&self, gone: &str) -> Result<Option<(PathBuf, String)>> {
        for (file, place, name) in self.defaults()? {
            if name == gone {
                let text = self.text(&file)?.unwrap_or_default();
                let edit = [(file, place.with_default(&text, USUAL_RUNTIME)?)];
                if self.effective_with(&edit)?.default == USUAL_RUNTIME {
                    return Ok(edit.into_iter().next());
                }
            }
        }
        Ok(None)
    }
}

fn text_in(texts: &Texts, path: &Path) -> Result<Option<String>> {
    match texts.get(path) {
        Some(text) => Ok(text.clone()),
        None => read_text(path),
    }
}

/// The files that the main file imports with these texts, in order.
pub fn imports(main: &Path, texts: &Texts) -> Result<Vec<PathBuf>> {
    let text = text_in(texts, main)?.unwrap_or_default();
    let mut imports = Vec::new();
    for pattern in patterns(main, &text)? {
        let mut files = expanded(&pattern);
        files.extend(texts.keys().filter(|path| matches(&pattern, path)).cloned());
        files.sort();
        files.dedup();
        files.retain(|file| file != main && texts.get(file) != Some(&None));
        imports.extend(files);
    }
    Ok(imports)
}

/// The files with `*` or without that a main file's text imports.
pub fn patterns(main: &Path, text: &str) -> Result<Vec<PathBuf>> {
    let folder = main.parent().unwrap_or(Path::new("/"));
    let names = names_in(parse(text).doing("parse", main)?.get("imports"));
    Ok(names.iter().map(|name| folder.join(name)).collect())
}

fn names_in(item: Option<&Item>) -> Vec<String> {
    let mut names = Vec::new();
    for name in item.and_then(Item::as_array).into_iter().flatten() {
        names.extend(name.as_str().map(str::to_owned));
    }
    names
}

/// The text with one more pattern among its imports.
pub fn with_import(text: &str, pattern: &str) -> Result<String> {
    let quoted = toml::Value::from(pattern).to_string();
    let document = parse(text)?;
    let array = document.get("imports").and_then(Item::as_array);
    let last = array.and_then(|array| array.iter().last()?.span());
    match last {
        Some(last) => {
            let (before, after) = text.split_at(last.end);
            Ok(format!("{before}, {quoted}{after}"))
        }
        None => with_value(text, &["imports"], &format!("[{quoted}]")),
    }
}

/// Of a main file that was edited since the install, the text without the import of bindguard's folder.
pub fn without_import(text: &str, original: &str) -> Result<String> {
    let (document, former) = (parse(text)?, parse(original)?);
    let before = names_in(former.get("imports"));
    let mut added = names_in(document.get("imports"));
    let is_one_more = added.len() == before.len() + 1;
    added.retain(|name| !before.contains(name));
    let [name] = &added[..] else {
        return Ok(text.to_owned());
    };
    let pattern = Path::new(name);
    let is_own = pattern.is_absolute() && pattern.parent().is_some_and(|it| it.ends_with("conf.d"));
    match former.get("imports").and_then(Item::span) {
        _ if !is_own || !is_one_more => Ok(text.to_owned()),
        Some(span) => with_value(text, &["imports"], &original[span]),
        None => without_value(text, &["imports"]),
    }
}

/// The text with the imports of `present` whose folders have files of others: without the line these
/// files would no longer be read.
pub fn with_imports_of_others(text: &str, present: &str, main: &Path) -> Result<String> {
    let mut text = text.to_owned();
    let kept = patterns(main, &text)?;
    for pattern in patterns(main, present)? {
        let is_used = expanded(&pattern)
            .iter()
            .any(|file| !file.ends_with(DROP_IN));
        if is_used && !kept.contains(&pattern) {
            text = with_import(&text, &pattern.display().to_string())?;
        }
    }
    Ok(text)
}

/// A path, or the files that match the `*` in its last part.
fn expanded(pattern: &Path) -> Vec<PathBuf> {
    let name = pattern.file_name().unwrap_or_default();
    if !name.to_string_lossy().contains('*') {
        return vec![pattern.to_owned()];
    }
    let folder = pattern.parent().and_then(|folder| folder.read_dir().ok());
    let mut files = Vec::new();
    for entry in folder.into_iter().flatten().flatten() {
        files.push(entry.path());
    }
    files.retain(|path| matches(pattern, path));
    files.sort();
    files
}

/// True if the file is in the pattern's folder and matches the `*` in its last part.
pub fn matches(pattern: &Path, file: &Path) -> bool {
    let wanted = pattern.file_name().unwrap_or_default().to_string_lossy();
    let Some((start, end)) = wanted.split_once('*') else {
        return pattern == file;
    };
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    pattern.parent() == file.parent()
        && !name.starts_with('.')
        && name.starts_with(start)
        && name.ends_with(end)
}

/// k3s is a single program with many names.
fn run(program: &RootProgram, words: &[&str]) -> Result<String> {
    let mut command = program.command();
    if program.path().file_name().is_some_and(|name| name == "k3s") {
        command.arg0("containerd");
    }
    command.args(words);
    output_of(command).doing("run", program.path())
}

/// The first word that looks like a version: `v1.7.24`, `2.1.9+unknown`.
fn version_in(said: &str) -> Option<(u32, u32)> {
    let words = said.split_whitespace();
    for word in words.skip_while(|word| *word != "containerd") {
        let mut parts = word.strip_prefix('v').unwrap_or(word).split('.');
        let (major, minor) = (parts.next(), parts.next());
        if let (Some(Ok(major)), Some(Ok(minor))) = (major.map(str::parse), minor.map(str::parse)) {
            return Some((major, minor));
        }
    }
    None
}

/// The CRI plugin's ids: the first up to containerd 1.7, in a file of version 2; the second since
/// containerd 2.0, in a file of version 3.
pub const PLUGINS: [&str; 2] = ["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"];

/// The effective configuration with certain files.
#[derive(Debug, Clone, PartialEq)]
pub struct Effective {
    /// The runtimes, without the keys that equal an absent key.
    pub runtimes: Map<String, Value>,
    pub default: String,
    /// Everything else.
    rest: Map<String, Value>,
}

impl Effective {
    /// Reads a dump.
    ///
    /// # Errors
    /// If the dump is not TOML or has no CRI plugin.
    pub fn from_dump(dump: &str) -> Result<Self> {
        let mut rest: Map<String, Value> =
            toml::from_str(dump).map_err(|error| anyhow!("it is not TOML: {}", error.message()))?;
        // 1.7 lists the files that it reads, in a changing order; 2.x lists the patterns
        rest.remove("imports");
        for id in PLUGINS {
            let plugin = rest.get_mut("plugins").and_then(|it| it.get_mut(id));
            let cri = plugin.and_then(|it| it.get_mut("containerd"));
            let Some(cri) = cri.and_then(Value::as_object_mut) else {
                continue;
            };
            let mut runtimes = match cri.remove("runtimes") {
                Some(Value::Object(runtimes)) => runtimes,
                _ => Map::new(),
            };
            remove_silent(&mut runtimes);
            let default = match cri.remove("default_runtime_name") {
                Some(Value::String(name)) => name,
                _ => String::new(),
            };
            return Ok(Self {
                runtimes,
                default,
                rest,
            });
        }
        bail!("it has no CRI plugin")
    }

    /// The image of a pod's sandbox: since containerd 2.0 an image that is pinned.
    pub fn sandbox_image(&self) -> Option<&str> {
        let plugins = self.rest.get("plugins")?;
        let named = plugins[PLUGINS[0]]["sandbox_image"].as_str();
        let pinned = plugins["io.containerd.cri.v1.images"]["pinned_images"]["sandbox"].as_str();
        named.or(pinned).filter(|name| !name.is_empty())
    }

    /// A runtime's table.
    ///
    /// # Errors
    /// If there is no such runtime.
    pub fn runtime(&self, name: &str) -> Result<&Value> {
        match self.runtimes.get(name) {
            Some(table) if table.is_object() => Ok(table),
            _ => not_configured(name),
        }
    }

    /// The programs of a runtime that were found. containerd serves no CRI if its default is missing
    /// from its runtimes, and no pod starts without the runtime's programs.
    pub fn usable(&self, name: &str, path: &SearchPath) -> Result<Vec<PathBuf>> {
        let table = self.runtime(name)?;
        let kind = kind_of(table);
        let mut parts = kind.rsplit('.');
        let path_of_shim = table["runtime_path"].as_str().unwrap_or_default();
        let shim = match (path_of_shim, parts.next(), parts.next()) {
            ("", _, _) if kind.starts_with('/') => Some(kind.to_owned()),
            ("", Some(version), Some(shim)) => Some(format!("containerd-shim-{shim}-{version}")),
            ("", _, _) => None,
            (path, _, _) => Some(path.to_owned()),
        };
        let mut found = Vec::new();
        if let Some(shim) = shim {
            found.extend(path.program_of(name, &shim)?);
        }
        found.extend(self.oci_runtime(name, path)?);
        Ok(found)
    }

    /// The OCI runtime behind a runtime of runc's kind, if it was found: what a handler of
    /// bindguard's calls in turn.
    pub fn oci_runtime(&self, name: &str, path: &SearchPath) -> Result<Option<PathBuf>> {
        let table = self.runtime(name)?;
        if kind_of(table) != RUNC {
            return Ok(None);
        }
        path.program_of(name, binary_name(table))
    }

    /// The dotted names of all keys that differ in `after`.
    pub fn differences(&self, after: &Self) -> Vec<String> {
        let mut found = Vec::new();
        compare("", &self.rest, &after.rest, &mut found);
        compare("runtimes", &self.runtimes, &after.runtimes, &mut found);
        if after.default != self.default {
            found.push("default_runtime_name".to_owned());
        }
        found
    }
}

/// Removes the keys of a runtime's table that equal an absent key: Go's zero values, and the
/// sandboxer's default.
fn remove_silent(table: &mut Map<String, Value>) {
    table.retain(|key, value| match value {
        Value::String(text) => {
            !(text.is_empty() || key.starts_with("sandbox") && text == "podsandbox")
        }
        Value::Number(number) => number.as_i64() != Some(0),
        Value::Bool(yes) => *yes,
        Value::Array(array) => !array.is_empty(),
        Value::Object(inner) => {
            remove_silent(inner);
            !inner.is_empty() || key != "options"
        }
        Value::Null => true,
    });
}

fn compare(
    at: &str,
    before: &Map<String, Value>,
    after: &Map<String, Value>,
    found: &mut Vec<String>,
) {
    let keys: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    for key in keys {
        let name = match at {
            "" => key.clone(),
            at => format!("{at}.{key}"),
        };
        match (before.get(key), after.get(key)) {
            (Some(Value::Object(before)), Some(Value::Object(after))) => {
                compare(&name, before, after, found)
            }
            (before, after) if before == after => {}
            _ => found.push(name),
        }
    }
}

/// The kind of the runtimes whose shim calls an OCI runtime, before which the guard can run.
pub const RUNC: &str = "io.containerd.runc.v2";

pub fn kind_of(runtime: &Value) -> &str {
    runtime["runtime_type"].as_str().unwrap_or_default()
}

/// The OCI runtime that the options of a runtime name.
pub fn binary_name(runtime: &Value) -> &str {
    runtime["options"]["BinaryName"]
        .as_str()
        .unwrap_or(USUAL_RUNTIME)
}

#[cfg(test)]
mod tests {
    use bindguard_core::handover::RUNTIME;

    use super::*;

    #[test]
    fn an_import_comes_and_goes_in_every_form() {
        let own = "/etc/containerd/conf.d/*.toml";
        for text in [
            "# a node\nversion = 3 # three\n[debug]\n",
            "\u{feff}version = 3\r\n[debug]\r\n",
            "version = 3",
            "imports = []\nversion = 3\n",
            "version = 3\nimports = [\n  \"a.toml\", # one\n  'b/*.toml',\n]\n[debug]\n",
            "debug = { level = \"info\" }\nversion = 3\nimports = ['a.toml']",
        ] {
            let with = with_import(text, own).unwrap();
            let main = Path::new("/x/config.toml");
            let before = patterns(main, text).unwrap();
            let wanted: Vec<PathBuf> = before.into_iter().chain([own.into()]).collect();
            assert_eq!(patterns(main, &with).unwrap(), wanted, "{with}");
            assert_eq!(
                without_import(&with, text).unwrap().trim_end(),
                text.trim_end()
            );
            let edited = format!("{with}\n# mine\n");
            assert!(
                !without_import(&edited, text).unwrap().contains(own),
                "{edited}"
            );
            // the operator has removed an import since, or has this import already
            assert_eq!(without_import(text, &with).unwrap(), text);
            assert_eq!(without_import(&with, &with).unwrap(), with);
        }
    }

    #[test]
    fn versions_of_packagers_and_upstream() {
        for (said, version) in [
            (
                "containerd github.com/containerd/containerd 1.6.20~ds1 1.6.20~ds1-1+deb12u3\n",
                (1, 6),
            ),
            (
                "containerd github.com/containerd/containerd v1.7.24 88bf19b2105c8b17560993bee28a01ddc2f97182",
                (1, 7),
            ),
            (
                "containerd github.com/containerd/containerd/v2 2.1.9+unknown \n",
                (2, 1),
            ),
        ] {
            assert_eq!(version_in(said), Some(version));
        }
        assert_eq!(version_in("containerd, of no version"), None);
    }

    const DUMP: &str = "imports = [\"b\", \"a\"]\n[plugins.'io.containerd.grpc.v1.cri']\nsandbox_image = 'p'\n[plugins.'io.containerd.grpc.v1.cri'.containerd]\n\
        default_runtime_name = 'runc'\n[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.runc]\nruntime_type = 'runc.v2'\nruntime_path = ''\n\
        sandbox_mode = 'podsandbox'\n[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.runc.options]\nBinaryName = ''\nSystemdCgroup = true\n";
    const ADDED: &str = "[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.bindguard]\nruntime_type = 'x'\nsnapshotter = ''\n";

    fn effective(dump: &str) -> Effective {
        Effective::from_dump(dump).unwrap()
    }

    fn surprises(before: &Effective, after: &Effective, is_default: bool) -> Vec<String> {
        let mut wanted = before.clone();
        let handler = toml::from_str("runtime_type = 'x'").unwrap();
        wanted.runtimes.insert(RUNTIME.to_owned(), handler);
        if is_default {
            RUNTIME.clone_into(&mut wanted.default);
        }
        wanted.differences(after)
    }

    #[test]
    fn a_runtime_says_only_what_is_set() {
        assert_eq!(
            *effective(DUMP).runtime("runc").unwrap(),
            serde_json::json!({ "runtime_type": "runc.v2", "options": { "SystemdCgroup": true } })
        );
    }

    #[test]
    fn a_default_needs_its_shim_and_its_oci_runtime() {
        let folder = tempfile::tempdir().unwrap();
        let path = || SearchPath::of(Some(folder.path().into()), None);
        let missing = |dump: &str| {
            effective(dump)
                .usable(&effective(dump).default, &path())
                .map_err(|why| why.to_string())
        };
        let dump = DUMP.replace("'runc.v2'", "'io.containerd.runc.v2'");
        let mut found = Vec::new();
        for program in ["containerd-shim-runc-v2", "runc"] {
            let why = missing(&dump).unwrap_err();
            assert!(why.contains(&format!("the program {program} ")), "{why}");
            let file = folder.path().join(program);
            std::fs::copy("/bin/sh", &file).unwrap();
            found.push(file);
        }
        assert_eq!(missing(&dump).unwrap(), found);
        for (from, to) in [
            ("runtime_path = ''", "runtime_path = '/no/shim'"),
            ("BinaryName = ''", "BinaryName = '/no/runtime'"),
            ("_name = 'runc'", "_name = 'nvidia'"),
            ("io.containerd.runc.v2", "io.containerd.kata.v2"),
            ("io.containerd.runc.v2", "/no/shim"),
        ] {
            assert!(missing(&dump.replace(from, to)).is_err(), "{to}");
        }
    }

    #[test]
    fn only_what_was_meant_is_no_surprise() {
        let before = effective(DUMP);
        let with = |from: &str, to: &str| effective(&format!("{}{ADDED}", DUMP.replace(from, to)));
        assert_eq!(
            surprises(&before, &with("[\"b\", \"a\"]", "[\"a\", \"b\"]"), false),
            Vec::<String>::new()
        );
        assert_eq!(
            surprises(&before, &with("= 'runc'", "= 'bindguard'"), true),
            Vec::<String>::new()
        );
        for (from, to, name) in [
            ("= 'runc'", "= 'bindguard'", "default_runtime_name"),
            (
                "'p'",
                "'q'",
                "plugins.io.containerd.grpc.v1.cri.sandbox_image",
            ),
            (
                "SystemdCgroup = true",
                "SystemdCgroup = false",
                "runtimes.runc.options",
            ),
            ("runtimes.runc", "runtimes.other", "runtimes.other"),
        ] {
            let surprises = surprises(&before, &with(from, to), false);
            assert!(
                surprises.iter().any(|found| found.starts_with(name)),
                "{name}: {surprises:?}"
            );
        }
        assert_eq!(surprises(&before, &before, false), ["runtimes.bindguard"]);
        let lost = effective(&format!(
            "{}{ADDED}",
            DUMP.split("[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes")
                .next()
                .unwrap()
        ));
        assert!(before.runtime("runc").is_ok() && lost.runtime("runc").is_err());
        assert!(lost.runtime(RUNTIME).is_ok());
    }

    #[test]
    fn a_dump_without_the_cri_plugin_is_told() {
        assert!(
            Effective::from_dump("[plugins]\n")
                .unwrap_err()
                .to_string()
                .contains("CRI")
        );
        assert!(
            Effective::from_dump("{{")
                .unwrap_err()
                .to_string()
                .contains("not TOML")
        );
    }
}
