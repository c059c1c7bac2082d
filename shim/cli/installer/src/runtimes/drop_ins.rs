//! Podman and CRI-O: a file of bindguard's own in a folder whose files are read in order.
//!
//! Existing files are not edited. The engine merges a drop-in with the existing files: all runtimes
//! count, and the last named default wins. Podman has no daemon, so nothing is restarted: see
//! containers.conf(5).
//!
//! CRI-O's runtime gets every setting of the current default runtime. CRI-O's own packages keep conmon
//! and the OCI runtimes in a folder of their own, which a drop-in names. CRI-O searches PATH for the
//! monitor of a runtime that names none, and does not start without it: see crio.conf(5).

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use bindguard_core::program_names::{RUNTIME, WRAPPER};
use toml::{Table, Value};

use crate::change::{Change, Doing, Plan, bytes_after};
use crate::options::{InstallOptions, Owner, USUAL_RUNTIME};
use crate::record::HEADING;
use crate::running::{self, Daemon};
use crate::search_path::{SearchPath, find, is_gone, not_configured};
use crate::toml_text::{Place, with_value, without_value};

/// An engine that reads drop-ins.
pub struct Engine {
    pub owner: Owner,
    name: &'static str,
    /// bindguard's file; the last default wins.
    pub drop_in: &'static str,
    main: &'static [&'static str],
    folder: &'static str,
    /// The extension of the folder's files; `None` for any.
    extension: Option<&'static str>,
    place: Place,
    /// The runtimes that the engine knows without a configuration.
    built_in: &'static [&'static str],
    /// The command after which the engine reads its files again.
    pub restart: Option<&'static str>,
}

pub const PODMAN: Engine = Engine {
    owner: Owner::Podman,
    name: "Podman",
    drop_in: "/etc/containers/containers.conf.d/zz-bindguard.conf",
    main: &[
        "/usr/share/containers/containers.conf",
        "/etc/containers/containers.conf",
    ],
    folder: "/etc/containers/containers.conf.d",
    extension: Some("conf"),
    place: Place {
        section: &["engine"],
        runtimes: "runtimes",
        default: "runtime",
    },
    built_in: &[
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
    ],
    restart: None,
};

pub const CRIO: Engine = Engine {
    owner: Owner::Crio,
    name: "CRI-O",
    drop_in: "/etc/crio/crio.conf.d/zz-bindguard.conf",
    main: &["/etc/crio/crio.conf"],
    folder: "/etc/crio/crio.conf.d",
    extension: None,
    place: Place {
        section: &["crio", "runtime"],
        runtimes: "runtimes",
        default: "default_runtime",
    },
    // the default runtime of CRI-O 1.31 and newer, and of older versions
    built_in: &["crun", "runc"],
    restart: Some("systemctl restart crio"),
};

/// A file and its text.
type FileText = (PathBuf, String);

impl Engine {
    /// The files in the order in which the engine reads them.
    pub fn files(&self) -> Vec<PathBuf> {
        let mut paths: Vec<PathBuf> = Vec::new();
        for entry in fs::read_dir(self.folder).into_iter().flatten().flatten() {
            let path = entry.path();
            let extension = path.extension().and_then(OsStr::to_str);
            let is_file = fs::metadata(&path).is_ok_and(|found| found.is_file());
            if is_file && (self.extension.is_none() || extension == self.extension) {
                paths.push(path);
            }
        }
        paths.sort();
        paths.splice(0..0, self.main.iter().map(PathBuf::from));
        paths
    }

    /// The files without bindguard's.
    fn other_files(&self) -> Vec<PathBuf> {
        let mut others = self.files();
        others.retain(|path| path != Path::new(self.drop_in));
        others
    }

    /// Fails if one of these files names a default, and is read after the drop-in.
    fn refuse_later_default(&self, files: &[FileText]) -> Result<()> {
        let drop_in = Path::new(self.drop_in);
        for (path, text) in files {
            let named = self.place.default_in(text).doing("parse", path)?;
            let named = named.unwrap_or_default();
            let is_later = path.parent() == drop_in.parent() && path.as_path() > drop_in;
            if is_later && !named.is_empty() {
                let (engine, path) = (self.name, path.display());
                bail!(
                    "make bindguard {engine}'s default: {path} names the default {named:?}, and {engine} reads that file after {}; remove the default from the file, or run this without --default",
                    self.drop_in
                );
            }
        }
        Ok(())
    }

    /// The text of a drop-in with a runtime, on request as the default.
    fn text(&self, runtime: &Value, options: &InstallOptions) -> Result<String> {
        let mut text = HEADING.to_owned();
        if options.default {
            text = self.place.with_default(&text, RUNTIME)?;
        }
        self.place.with_runtime(&text, RUNTIME, runtime)
    }

    fn plan(&self, text: String, runtime: PathBuf, healing: Plan) -> Result<Plan> {
        let drop_in = Path::new(self.drop_in);
        let mut changes = vec![Change::text(self.owner, drop_in, text)?];
        changes.extend(healing.changes);
        Ok(Plan {
            changes,
            notes: healing.notes,
            needs_runtime: Some(runtime),
            command: self.restart.map(str::to_owned),
            ..Plan::default()
        })
    }

    /// The default runtime of these files, and the index of the file that names it: the last.
    fn default_of(&self, files: &[FileText]) -> Result<Option<(usize, String)>> {
        let mut found = None;
        for (at, (path, text)) in files.iter().enumerate() {
            let named = self.place.default_in(text).doing("parse", path)?;
            if let Some(name) = named.filter(|name| !name.is_empty()) {
                found = Some((at, name));
            }
        }
        Ok(found)
    }

    /// The entry of a runtime; the last file wins.
    fn runtime_of(&self, files: &[FileText], name: &str) -> Result<Option<Value>> {
        let mut found = None;
        for (path, text) in files {
            let entry = self.place.runtime_in(text, name).doing("parse", path)?;
            found = entry.or(found);
        }
        Ok(found)
    }

    /// Changes the files until their default starts containers. A default that is gone is replaced by
    /// `usual`, or removed: then an earlier file's default is effective, or one of the built-in ones.
    ///
    /// # Errors
    /// If there is no better default.
    fn heal(
        &self,
        files: &mut [FileText],
        usual: Option<&str>,
        check: impl Fn(&str, Option<Value>) -> Result<()>,
    ) -> Result<Plan> {
        let mut plan = Plan::default();
        while let Some((at, name)) = self.default_of(files)? {
            let Err(why) = check(&name, self.runtime_of(files, &name)?) else {
                break;
            };
            let mut has_better = usual.is_some();
            for name in self.built_in {
                has_better |= check(name, self.runtime_of(files, name)?).is_ok();
            }
            let (path, text) = &mut files[at];
            // a file of a package is written anew with its next update
            if path.starts_with("/usr") || !has_better {
                bail!(
                    "{} would have no default runtime that starts containers: {why}; nothing was changed, name another default than that of {}, then run this again",
                    self.name,
                    path.display()
                );
            }
            *text = match usual {
                Some(usual) => self.place.with_default(text, usual)?,
                None => self.place.without_default(text)?,
            };
            plan.notes.push(format!(
                "{}'s default runtime starts no container: {why}; {} takes its place",
                self.name,
                usual.unwrap_or("the default below it")
            ));
            let change = Change::text(self.owner, path, text.clone())?;
            plan.changes.retain(|edited| edited.path != change.path);
            plan.changes.push(change);
        }
        Ok(plan)
    }
}

/// The texts of these files, with the contents that they have after `changes`.
fn texts_after(paths: Vec<PathBuf>, changes: &[Change]) -> Result<Vec<FileText>> {
    let mut files = Vec::new();
    for path in paths {
        if let Some(bytes) = bytes_after(&path, changes)? {
            let text = String::from_utf8(bytes).doing("read", &path)?;
            files.push((path, text));
        }
    }
    Ok(files)
}

/// The edits after which the engine's default starts containers, once these changes were made.
pub fn default_after_removal(engine: &Engine, changes: &[Change]) -> Result<Plan> {
    let mut files = texts_after(engine.files(), changes)?;
    match engine.owner {
        Owner::Crio => healed_crio(&mut files),
        _ => healed_podman(&mut files),
    }
}

/// runc, or crun on a node without runc.
fn usual_runtime() -> PathBuf {
    let crun = find("crun").filter(|_| find(USUAL_RUNTIME).is_none());
    crun.unwrap_or_else(|| USUAL_RUNTIME.into())
}

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

/// Plans the change for Podman.
pub fn plan_podman(options: &InstallOptions) -> Result<Plan> {
    let mut texts = texts_after(PODMAN.other_files(), &[])?;
    let guarded = guarded_by_podman(&texts, options)?;
    let path = options.prefix.join(WRAPPER).display().to_string();
    let mut text = PODMAN.text(&Value::from(vec![path]), options)?;
    for (key, built_in) in ABILITIES {
        let mut names = names_in(&texts, key, built_in)?;
        let name = guarded.file_name().and_then(OsStr::to_str);
        if name.is_some_and(|name| names.iter().any(|it| it == name)) {
            names.push(RUNTIME.to_owned());
            text = with_value(&text, &["engine", key], &Value::from(names).to_string())?;
        }
    }
    let healing = if options.default {
        PODMAN.refuse_later_default(&texts)?;
        Plan::default()
    } else {
        healed_podman(&mut texts)?
    };
    PODMAN.plan(text, guarded, healing)
}

/// The runtime that the guard becomes: with `--default` the default of Podman's other files, or the
/// first that Podman finds.
fn guarded_by_podman(others: &[FileText], options: &InstallOptions) -> Result<PathBuf> {
    if !options.default {
        return Ok(usual_runtime());
    }
    let named = PODMAN.default_of(others)?;
    let names = match &named {
        Some((_, name)) => vec![name.as_str()],
        None => SEARCHED.to_vec(),
    };
    for name in names {
        if name.starts_with('/') {
            return Ok(PathBuf::from(name));
        }
        let entry = PODMAN.runtime_of(others, name)?;
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

fn list_in<'t>(table: &'t Table, key: &str) -> Option<&'t Vec<Value>> {
    table.get("engine")?.get(key)?.as_array()
}

/// The names in one of Podman's lists. The last file with the list replaces the list, or adds to the
/// list if it says `{append=true}`.
fn names_in(files: &[FileText], key: &str, built_in: &[&str]) -> Result<Vec<String>> {
    let mut names: Vec<String> = built_in.iter().map(|name| (*name).to_owned()).collect();
    for (path, text) in files {
        let table: Table = toml::from_str(text).doing("parse", path)?;
        let Some(list) = list_in(&table, key) else {
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

/// The edits after which Podman's default starts containers.
fn healed_podman(files: &mut [FileText]) -> Result<Plan> {
    let path = SearchPath::of(None, None);
    PODMAN.heal(files, None, |name, entry| {
        let paths = match entry {
            Some(Value::Array(paths)) => paths,
            _ if name.starts_with('/') => vec![Value::from(name)],
            _ if PODMAN.built_in.contains(&name) => return Ok(()),
            _ => return not_configured(name),
        };
        let mut last = Ok(());
        for program in paths.iter().filter_map(Value::as_str) {
            last = path.program_of(name, program).map(drop);
            if last.is_ok() {
                break;
            }
        }
        last
    })
}

/// The text without bindguard's runtime; `original` has the earlier default.
pub fn cleaned_podman(text: &str, original: &str) -> Result<String> {
    let mut text = PODMAN.place.without_runtime(text, RUNTIME, original)?;
    for (key, _) in ABILITIES {
        let table: Table = toml::from_str(&text)?;
        let list = list_in(&table, key);
        if list.is_some_and(|list| list.contains(&Value::from(RUNTIME))) {
            text = without_value(&text, &["engine", key])?;
        }
    }
    Ok(text)
}

/// Stands below the heading of a drop-in in which only the name is left.
const NAME_ONLY: &str = "# bindguard is removed. Podman finds its containers' runtime by this name: delete the file when no\n# container has it, or run `bindguard uninstall --forget-name`.\n";

/// Podman's text in which only the name is left, as that of `runtime`. `None` if the text has no entry
/// of the name.
pub fn with_name_only(text: &str, original: &str, runtime: &Path) -> Result<Option<String>> {
    let entry = PODMAN.place.runtime_in(text, RUNTIME)?;
    let Some(Value::Array(paths)) = entry else {
        return Ok(None);
    };
    let calls_guard = |path: &Value| path.as_str().is_some_and(|it| it.ends_with(WRAPPER));
    if !paths.iter().any(calls_guard) {
        return Ok(Some(text.to_owned()));
    }
    let text = PODMAN.place.without_runtime(text, RUNTIME, original)?;
    let paths = Value::from(vec![runtime.display().to_string()]);
    let text = PODMAN.place.with_runtime(&text, RUNTIME, &paths)?;
    let heading = format!("{HEADING}{NAME_ONLY}");
    Ok(Some(text.replacen(HEADING, &heading, 1)))
}

/// Plans the changes for CRI-O.
pub fn plan_crio(options: &InstallOptions) -> Result<Plan> {
    let mut texts = texts_after(CRIO.other_files(), &[])?;
    if options.default {
        CRIO.refuse_later_default(&texts)?;
    }
    let mut healing = healed_crio(&mut texts)?;
    if options.default {
        // bindguard's drop-in names the default
        healing.changes.clear();
    }
    let former = Former::of(&texts)?;
    let wrapper = options.prefix.join(WRAPPER).display().to_string();
    let text = CRIO.text(&former.with_path(&wrapper), options)?;
    CRIO.plan(text, former.runtime(), healing)
}

/// The edits after which CRI-O's default starts containers. CRI-O does not start with a default that
/// is missing from its runtimes.
fn healed_crio(files: &mut [FileText]) -> Result<Plan> {
    let daemon = running::daemon_of(Owner::Crio);
    let path = SearchPath::of(daemon.as_ref().and_then(Daemon::search_path), None);
    let check = |name: &str, entry: Option<Value>| {
        let named = match &entry {
            Some(entry) => entry.get("runtime_path").and_then(Value::as_str),
            None if CRIO.built_in.contains(&name) => None,
            None => return not_configured(name),
        };
        let program = named.filter(|path| !path.is_empty()).unwrap_or(name);
        path.program_of(name, program).map(drop)
    };
    // CRI-O's built-in default depends on its version, so a configured runtime is better
    let mut usual = None;
    for name in [USUAL_RUNTIME, "crun"] {
        let entry = CRIO.runtime_of(files, name)?;
        if usual.is_none() && entry.is_some() && check(name, entry).is_ok() {
            usual = Some(name);
        }
    }
    CRIO.heal(files, usual, check)
}

/// The text without bindguard's runtime; `original` has the earlier default.
pub fn cleaned_crio(text: &str, original: &str) -> Result<String> {
    CRIO.place.without_runtime(text, RUNTIME, original)
}

/// CRI-O's runtime that is the default without bindguard.
#[derive(Debug, Default)]
struct Former {
    name: Option<String>,
    settings: Table,
}

impl Former {
    /// The default runtime of CRI-O's files; the last file wins. A built-in runtime has no settings
    /// to copy.
    fn of(files: &[FileText]) -> Result<Self> {
        let mut name = CRIO.default_of(files)?.map(|(_, name)| name);
        for built_in in CRIO.built_in {
            if name.is_none() && CRIO.runtime_of(files, built_in)?.is_some() {
                name = Some((*built_in).to_owned());
            }
        }
        let entry = match &name {
            Some(name) => CRIO.runtime_of(files, name)?,
            None => None,
        };
        let settings = match entry {
            Some(Value::Table(settings)) => settings,
            _ => Table::new(),
        };
        let kind = settings.get("runtime_type").and_then(Value::as_str);
        let kind = kind.unwrap_or_default();
        if !matches!(kind, "" | "oci" | "pod") {
            let name = name.unwrap_or_default();
            bail!(
                "CRI-O's default runtime {name:?} is of the type {kind:?}, which calls no OCI runtime: name another as its default_runtime"
            );
        }
        Ok(Self { name, settings })
    }

    /// The runtime's settings, with this path.
    fn with_path(&self, path: &str) -> Value {
        let mut table = self.settings.clone();
        table.remove("platform_runtime_paths");
        table.insert("runtime_path".to_owned(), path.into());
        table.entry("runtime_type").or_insert("oci".into());
        Value::Table(table)
    }

    /// The program of the runtime, or a name if bindguard-runtime's own search finds the program.
    fn runtime(&self) -> PathBuf {
        let named = self.settings.get("runtime_path").and_then(Value::as_str);
        let found = match named.filter(|path| !path.is_empty()) {
            Some(path) => Some(PathBuf::from(path)),
            None => self.name.as_deref().and_then(find),
        };
        match found {
            Some(runtime) if find(USUAL_RUNTIME).as_ref() == Some(&runtime) => USUAL_RUNTIME.into(),
            Some(runtime) => runtime,
            None => usual_runtime(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `10-crio.conf` of the packages of CRI-O's own repository.
    const PACKAGED: &str = r#"
[crio.image]
signature_policy = "/etc/crio/policy.json"

[crio.runtime]
default_runtime = "crun"

[crio.runtime.runtimes.crun]
runtime_path = "/usr/libexec/crio/crun" # its own
runtime_root = "/run/crun"
monitor_path = "/usr/libexec/crio/conmon"
allowed_annotations = [
    "io.containers.trace-syscall",
]

[crio.runtime.runtimes.runc]
runtime_path = "/usr/libexec/crio/runc"
runtime_root = "/run/runc"
monitor_path = "/usr/libexec/crio/conmon"
"#;

    fn file(text: &str) -> FileText {
        (PathBuf::from(CRIO.main[0]), text.to_owned())
    }

    #[test]
    fn the_monitor_and_the_rest_are_those_of_the_default() {
        let former = Former::of(&[file(PACKAGED)]).unwrap();
        let text = CRIO
            .place
            .with_runtime("", RUNTIME, &former.with_path("/x/bindguard-runtime"))
            .unwrap();
        for line in [
            "[crio.runtime.runtimes.bindguard]",
            "runtime_path = \"/x/bindguard-runtime\"",
            "runtime_type = \"oci\"",
            "runtime_root = \"/run/crun\"",
            "monitor_path = \"/usr/libexec/crio/conmon\"",
        ] {
            assert!(text.lines().any(|it| it == line), "no {line} in {text}");
        }
        assert!(
            text.contains("io.containers.trace-syscall") && !text.contains("libexec/crio/crun"),
            "{text}"
        );
        assert_eq!(former.runtime(), Path::new("/usr/libexec/crio/crun"));
    }

    #[test]
    fn the_last_file_counts_and_a_machine_is_no_runtime() {
        let later = |text: &str| Former::of(&[file(PACKAGED), file(text)]);
        let former = later("[crio.runtime]\ndefault_runtime = \"runc\"\n").unwrap();
        assert_eq!(former.runtime(), Path::new("/usr/libexec/crio/runc"));
        let kata = "[crio.runtime]\ndefault_runtime = \"kata\"\n[crio.runtime.runtimes.kata]\nruntime_type = \"vm\"\n";
        assert!(
            later(kata)
                .unwrap_err()
                .to_string()
                .contains("calls no OCI runtime")
        );
        assert!(Former::of(&[]).unwrap().settings.is_empty());
    }
}
