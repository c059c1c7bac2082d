//! Docker, Podman and CRI-O: a runtime `bindguard`, on request as the default.
//!
//! Docker has one file, daemon.json: every byte but the runtime's is unchanged. Podman and CRI-O read a
//! folder in order, in which bindguard has a file of its own; existing files are not edited. The engine
//! merges a drop-in with the existing files: all runtimes count, and the last named default wins. Podman
//! has no daemon, so nothing is restarted: see containers.conf(5).
//!
//! CRI-O's runtime gets every setting of the current default runtime. CRI-O's own packages keep conmon
//! and the OCI runtimes in a folder of their own, which a drop-in names. CRI-O searches PATH for the
//! monitor of a runtime that names none, and does not start without it: see crio.conf(5).

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::{fs, slice};

use anyhow::{Context, Result, bail};
use bindguard_core::handover::{RUNTIME, WRAPPER};
use serde_json::{Value, json};

use crate::change::{Change, Doing, Owner, Plan, bytes_after, read_text, resolved};
use crate::config_text::Place;
use crate::record::{HEADING, InstallOptions, Record, USUAL_RUNTIME, text_of};
use crate::running::{
    DOCKER_RELOAD, Daemon, SearchPath, daemon_of, find, is_gone, not_configured, option,
};

/// An engine whose files name its runtimes.
pub struct Engine {
    pub owner: Owner,
    name: &'static str,
    /// The file with bindguard's runtime: a drop-in, or Docker's only file.
    pub file: &'static str,
    main: &'static [&'static str],
    folder: &'static str,
    /// The extension of the folder's files; `None` for any.
    extension: Option<&'static str>,
    place: Place,
    /// The runtimes that the engine knows without a configuration.
    built_in: &'static [&'static str],
    /// The default of an engine without a configured default.
    fallback: &'static str,
    /// The command after which the engine reads its files again.
    pub restart: Option<&'static str>,
}

pub const DOCKER: Engine = Engine {
    owner: Owner::Docker,
    name: "Docker",
    file: "/etc/docker/daemon.json",
    main: &["/etc/docker/daemon.json"],
    folder: "",
    extension: None,
    place: Place {
        is_json: true,
        section: &[],
        runtimes: "runtimes",
        default: "default-runtime",
    },
    built_in: &[USUAL_RUNTIME],
    fallback: "Docker's own runc",
    restart: Some(DOCKER_RELOAD),
};

/// The command after which dockerd forgets what is no longer in its file. A reload of a file
/// without `runtimes` keeps the former runtimes, and keeps a removed default runtime (seen with
/// Docker 20.10).
pub const DOCKER_RESTART: &str = "systemctl restart docker";

pub const PODMAN: Engine = Engine {
    owner: Owner::Podman,
    name: "Podman",
    file: "/etc/containers/containers.conf.d/zz-bindguard.conf",
    main: &[
        "/usr/share/containers/containers.conf",
        "/etc/containers/containers.conf",
    ],
    folder: "/etc/containers/containers.conf.d",
    extension: Some("conf"),
    place: Place {
        is_json: false,
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
    fallback: "the default below it",
    restart: None,
};

pub const CRIO: Engine = Engine {
    owner: Owner::Crio,
    name: "CRI-O",
    file: "/etc/crio/crio.conf.d/zz-bindguard.conf",
    main: &["/etc/crio/crio.conf"],
    folder: "/etc/crio/crio.conf.d",
    extension: None,
    place: Place {
        is_json: false,
        section: &["crio", "runtime"],
        runtimes: "runtimes",
        default: "default_runtime",
    },
    // the default runtime of CRI-O 1.31 and newer, and of older versions
    built_in: &["crun", USUAL_RUNTIME],
    fallback: "the default below it",
    restart: Some("systemctl restart crio"),
};

/// Each engine.
pub static ENGINES: [Engine; 3] = [DOCKER, PODMAN, CRIO];

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

    /// The files of these paths, with their contents after `changes`.
    fn texts_after(&self, paths: Vec<PathBuf>, changes: &[Change]) -> Result<Vec<FileText>> {
        let parsing = if self.place.is_json { "edit" } else { "parse" };
        let mut files = Vec::new();
        for path in paths {
            if let Some(bytes) = bytes_after(&resolved(&path), changes)? {
                let text = String::from_utf8(bytes).doing("read", &path)?;
                self.place.default_in(&text).doing(parsing, &path)?;
                files.push((path, text));
            }
        }
        Ok(files)
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
    fn runtime_of(&self, files: &[FileText], name: &str) -> Result<Value> {
        let mut found = Value::Null;
        for (path, text) in files {
            let entry = self.place.runtime_in(text, name).doing("parse", path)?;
            if !entry.is_null() {
                found = entry;
            }
        }
        Ok(found)
    }

    /// Plans the drop-in of Podman or CRI-O.
    pub fn plan_drop_in(&self, options: &InstallOptions) -> Result<Plan> {
        let guard = options.prefix.join(WRAPPER).display().to_string();
        let drop_in = Path::new(self.file);
        let mut others = self.files();
        others.retain(|path| path != drop_in);
        let mut files = self.texts_after(others, &[])?;
        for (path, text) in &files {
            let is_later = path.parent() == drop_in.parent() && path.as_path() > drop_in;
            if options.default
                && is_later
                && let Some(named) = self.place.default_in(text)?
                && !named.is_empty()
            {
                let (engine, path) = (self.name, path.display());
                bail!(
                    "make bindguard {engine}'s default: {path} names the default {named:?}, and {engine} reads that file after {}; remove the default from the file, or run this without --default",
                    self.file
                );
            }
        }
        let mut plan = Plan::default();
        let (text, runtime);
        if self.owner == Owner::Podman {
            runtime = guarded_by_podman(&files, options)?;
            let with_runtime = self.with_runtime(HEADING, &json!([guard]), options.default)?;
            text = with_abilities(with_runtime, &files, &runtime)?;
            if !options.default {
                plan = self.heal(&mut files)?;
            }
        } else {
            plan = self.heal(&mut files)?;
            if options.default {
                // bindguard's drop-in names the default
                plan.changes.clear();
            }
            let entry;
            (entry, runtime) = runtime_of_crio(&files, guard)?;
            text = self.with_runtime(HEADING, &entry, options.default)?;
        }
        let change = Change::text(self.owner, drop_in, text)?;
        plan.changes.insert(0, change);
        plan.needs_runtime = Some(runtime);
        plan.command = self.restart.map(str::to_owned);
        Ok(plan)
    }

    /// The text with bindguard's runtime, on request as the default.
    fn with_runtime(&self, text: &str, entry: &Value, is_default: bool) -> Result<String> {
        let mut text = text.to_owned();
        if is_default {
            text = self.place.with_default(&text, RUNTIME)?;
        }
        self.place.with_runtime(&text, RUNTIME, entry)
    }

    /// An error if no container starts under the runtime `name` with this entry.
    fn check(&self, path: &SearchPath, name: &str, entry: &Value) -> Result<()> {
        let is_built_in = self.built_in.contains(&name);
        let programs: Vec<&str> = match (self.owner, entry) {
            (Owner::Podman, Value::Array(paths)) => {
                paths.iter().filter_map(Value::as_str).collect()
            }
            (Owner::Podman, _) if name.starts_with('/') => vec![name],
            (Owner::Podman, _) if is_built_in => Vec::new(),
            (Owner::Docker, Value::Null) => {
                let arguments = daemon_of(self.owner).map(|daemon| daemon.arguments());
                let adds_more = option(&arguments.unwrap_or_default(), &["add-runtime"]);
                if !is_built_in && !name.starts_with("io.containerd.") && adds_more.is_none() {
                    return not_configured(name);
                }
                Vec::new()
            }
            (Owner::Docker, _) => Vec::from_iter(entry["path"].as_str()),
            (Owner::Crio, Value::Null) if is_built_in => vec![name],
            (_, Value::Null) => return not_configured(name),
            _ => match entry["runtime_path"].as_str() {
                None | Some("") => vec![name],
                Some(path) => vec![path],
            },
        };
        let mut last = Ok(());
        for program in programs {
            last = path.program_of(name, program).map(drop);
            if last.is_ok() {
                break;
            }
        }
        last
    }

    /// Changes the files until their default starts containers. A default that is gone is replaced by
    /// a usual one, or removed: then an earlier file's default is effective, or one of the built-in ones.
    ///
    /// # Errors
    /// If there is no better default.
    fn heal(&self, files: &mut [FileText]) -> Result<Plan> {
        let mut plan = Plan::default();
        let daemon = daemon_of(self.owner);
        let path = SearchPath::of(daemon.as_ref().and_then(Daemon::search_path), None);
        // CRI-O's built-in default depends on its version, so a configured runtime is better
        let mut usual = None;
        for name in [USUAL_RUNTIME, "crun"] {
            if self.owner == Owner::Crio
                && usual.is_none()
                && let entry = self.runtime_of(files, name)?
                && !entry.is_null()
                && self.check(&path, name, &entry).is_ok()
            {
                usual = Some(name);
            }
        }
        while let Some((at, name)) = self.default_of(files)? {
            let entry = self.runtime_of(files, &name)?;
            let Err(why) = self.check(&path, &name, &entry) else {
                break;
            };
            let mut has_better = usual.is_some();
            for name in self.built_in {
                let entry = self.runtime_of(files, name)?;
                has_better |= self.check(&path, name, &entry).is_ok();
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
                usual.unwrap_or(self.fallback)
            ));
            let change = Change::text(self.owner, path, text.clone())?;
            plan.changes.retain(|edited| edited.path != change.path);
            plan.changes.push(change);
        }
        Ok(plan)
    }

    /// The edits after which the engine's default starts containers, once these changes were made. dockerd
    /// and CRI-O refuse to start with a default that is missing from their runtimes.
    pub fn default_after_removal(&self, changes: &[Change]) -> Result<Plan> {
        self.heal(&mut self.texts_after(self.files(), changes)?)
    }

    /// The text without bindguard's runtime; `original` has the earlier default.
    pub fn cleaned(&self, text: &str, original: &str) -> Result<String> {
        let mut text = self.place.without_runtime(text, RUNTIME, original)?;
        for (key, _) in ABILITIES {
            let path = ["engine", key];
            if let Value::Array(list) = self.place.value_in(&text, &path)?
                && list.contains(&Value::from(RUNTIME))
            {
                text = self.place.without(&text, &path)?;
            }
        }
        Ok(text)
    }

    /// The text in which only the name is left, as that of `runtime`; `original` has the earlier
    /// default. `None` if the text has no entry of the name.
    pub fn with_name_only(
        &self,
        text: &str,
        original: &str,
        runtime: &Path,
    ) -> Result<Option<String>> {
        let mut text = text.to_owned();
        let runtime = json!(runtime.display().to_string());
        match self.place.runtime_in(&text, RUNTIME)? {
            Value::Null => return Ok(None),
            entry if !calls_guard(&entry) => {}
            Value::Array(_) => {
                text = self.place.with_runtime(&text, RUNTIME, &[runtime])?;
                text = text.replacen(HEADING, &format!("{HEADING}{NAME_ONLY}"), 1);
            }
            _ => {
                let path = [self.place.runtimes, RUNTIME, "path"];
                text = self.place.with(&text, &path, &runtime)?;
            }
        }
        let text = self.place.with_former_default(&text, RUNTIME, original)?;
        Ok(Some(text))
    }
}

/// True if a runtime's entry has the wrapper's path.
fn calls_guard(entry: &Value) -> bool {
    let paths = match entry {
        Value::Array(paths) => paths.as_slice(),
        entry => slice::from_ref(&entry["path"]),
    };
    let mut paths = paths.iter().filter_map(Value::as_str);
    paths.any(|path| Path::new(path).ends_with(WRAPPER))
}

/// runc, or crun on a node without runc.
fn usual_runtime() -> PathBuf {
    let crun = find("crun").filter(|_| find(USUAL_RUNTIME).is_none());
    crun.unwrap_or_else(|| USUAL_RUNTIME.into())
}

pub fn plan_docker(options: &InstallOptions, record: &Record) -> Result<Plan> {
    let path = Path::new(DOCKER.file);
    let before = read_text(path)?.unwrap_or_default();
    let original = record.original(&resolved(path))?;
    let original = text_of(original.as_ref()).doing("edit", path)?;
    let former = DOCKER.place.with_former_default(&before, RUNTIME, original);
    let former = former.doing("edit", path)?;
    // a reload keeps a default runtime that the file no longer names
    let command = match former != before && !options.default {
        true => DOCKER_RESTART,
        false => DOCKER_RELOAD,
    };
    let mut files = [(path.to_owned(), former)];
    let notes = DOCKER.heal(&mut files)?.notes;
    let [(_, former)] = &files;
    let text = if options.default { &before } else { former };
    let guard = options.prefix.join(WRAPPER).display().to_string();
    let text = DOCKER.with_runtime(text, &json!({ "path": guard }), options.default);
    let runtime = match options.default {
        true => default_of_docker(former).doing("parse", path)?,
        false => USUAL_RUNTIME.into(),
    };
    Ok(Plan {
        changes: vec![Change::text(
            Owner::Docker,
            path,
            text.doing("edit", path)?,
        )?],
        notes,
        needs_runtime: Some(runtime),
        command: Some(command.to_owned()),
        ..Plan::default()
    })
}

/// The path of the runtime that is the default, or runc, which Docker has itself.
fn default_of_docker(text: &str) -> Result<PathBuf> {
    let named = DOCKER.place.default_in(text)?.unwrap_or_default();
    if ["", RUNTIME, USUAL_RUNTIME].contains(&&*named) || named.starts_with("io.containerd.runc") {
        return Ok(USUAL_RUNTIME.into());
    }
    let entry = DOCKER.place.runtime_in(text, &named)?;
    let path = entry["path"].as_str();
    let path = path.with_context(|| format!("find the path of the default runtime {named:?}"))?;
    Ok(path.into())
}

/// The data root, unless dockerd's command line names another.
pub fn docker_data_root() -> PathBuf {
    let text = read_text(Path::new(DOCKER.file)).ok().flatten();
    let named = DOCKER
        .place
        .value_in(&text.unwrap_or_default(), &["data-root"]);
    let named = named.unwrap_or_default();
    named.as_str().unwrap_or("/var/lib/docker").into()
}

/// True if dockerd needs a restart to forget bindguard: a name of the real runtime does no harm.
pub fn docker_needs_restart(text: &str) -> Result<bool> {
    Ok(calls_guard(&DOCKER.place.runtime_in(text, RUNTIME)?)
        || DOCKER.place.default_in(text)?.as_deref() == Some(RUNTIME))
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

/// Stands below the heading of a drop-in in which only the name is left.
const NAME_ONLY: &str = "# bindguard is removed. Podman finds its containers' runtime by this name: delete the file when no\n# container has it, or run `bindguard uninstall --forget-name`.\n";

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
        let paths = entry.as_array().into_iter().flatten();
        for path in paths.filter_map(Value::as_str) {
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

/// The drop-in's text with bindguard in each of Podman's lists that has the guarded runtime. The last
/// file with a list replaces the list, or adds to the list if it says `{append=true}`.
fn with_abilities(text: String, files: &[FileText], guarded: &Path) -> Result<String> {
    let guarded = guarded
        .file_name()
        .and_then(OsStr::to_str)
        .unwrap_or_default();
    let mut text = text;
    for (key, built_in) in ABILITIES {
        let path = ["engine", key];
        let mut names = built_in.iter().map(|name| Value::from(*name)).collect();
        for (_, text) in files {
            let Value::Array(list) = PODMAN.place.value_in(text, &path)? else {
                continue;
            };
            if !list.iter().any(|it| it["append"] == true) {
                names = Vec::new();
            }
            names.extend(list.into_iter().filter(Value::is_string));
        }
        if names.contains(&Value::from(guarded)) {
            names.push(Value::from(RUNTIME));
            text = PODMAN.place.with(&text, &path, &Value::Array(names))?;
        }
    }
    Ok(text)
}

/// CRI-O's runtime that is the default without bindguard: its settings with the guard's path, and its
/// program or a name that bindguard-runtime's own search finds. A built-in runtime has no settings to
/// copy.
fn runtime_of_crio(files: &[FileText], guard: String) -> Result<(Value, PathBuf)> {
    let mut name = CRIO.default_of(files)?.map(|(_, name)| name);
    for built_in in CRIO.built_in {
        if name.is_none() && !CRIO.runtime_of(files, built_in)?.is_null() {
            name = Some((*built_in).to_owned());
        }
    }
    let mut settings = json!({});
    if let Some(name) = &name
        && let entry @ Value::Object(_) = CRIO.runtime_of(files, name)?
    {
        settings = entry;
    }
    let word = |key: &str| settings[key].as_str().unwrap_or_default();
    let kind = word("runtime_type");
    if !matches!(kind, "" | "oci" | "pod") {
        let name = name.unwrap_or_default();
        bail!(
            "CRI-O's default runtime {name:?} is of the type {kind:?}, which calls no OCI runtime: name another as its default_runtime"
        );
    }
    let found = match word("runtime_path") {
        "" => name.and_then(find),
        path => Some(PathBuf::from(path)),
    };
    let runtime = match found {
        Some(runtime) if find(USUAL_RUNTIME).as_ref() == Some(&runtime) => USUAL_RUNTIME.into(),
        Some(runtime) => runtime,
        None => usual_runtime(),
    };
    if let Value::Object(settings) = &mut settings {
        settings.remove("platform_runtime_paths");
        settings.entry("runtime_type").or_insert("oci".into());
    }
    settings["runtime_path"] = guard.into();
    Ok((settings, runtime))
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
    fn a_removal_leaves_what_others_wrote_into_daemon_json() {
        let entry =
            r#"{"runtimes":{"bindguard":{"path":"/usr/local/bin/bindguard-runtime"}, "own":null}}"#;
        for (text, cleaned) in [
            (entry, r#"{"runtimes":{"own":null}}"#),
            ("", ""),
            (" \n", " \n"),
        ] {
            assert_eq!(DOCKER.cleaned(text, "").unwrap(), cleaned);
        }
    }

    /// JSON has values that TOML has not.
    #[test]
    fn a_runtime_of_docker_has_a_null_and_a_large_number() {
        let text = r#"{"runtimes":{"own":{"path":"/x","runtimeArgs":null,"options":{"Most":18446744073709551615}}}}"#;
        let files = [(PathBuf::from(DOCKER.file), text.to_owned())];
        let entry = DOCKER.runtime_of(&files, "own").unwrap();
        assert_eq!(entry.get("path").and_then(Value::as_str), Some("/x"));
        assert!(entry.get("runtimeArgs").is_none());
    }

    #[test]
    fn a_file_that_does_not_parse_is_named() {
        let error = CRIO.runtime_of(&[file("[")], "runc").unwrap_err();
        assert!(format!("{error:#}").contains(CRIO.main[0]), "{error:#}");
    }

    #[test]
    fn the_monitor_and_the_rest_are_those_of_the_default() {
        let guard = "/x/bindguard-runtime".to_owned();
        let (entry, former) = runtime_of_crio(&[file(PACKAGED)], guard).unwrap();
        let text = CRIO.with_runtime("", &entry, false).unwrap();
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
        assert_eq!(former, Path::new("/usr/libexec/crio/crun"));
    }

    #[test]
    fn the_last_file_counts_and_a_machine_is_no_runtime() {
        let later = |text: &str| runtime_of_crio(&[file(PACKAGED), file(text)], "/x".to_owned());
        let (_, former) = later("[crio.runtime]\ndefault_runtime = \"runc\"\n").unwrap();
        assert_eq!(former, Path::new("/usr/libexec/crio/runc"));
        let kata = "[crio.runtime]\ndefault_runtime = \"kata\"\n[crio.runtime.runtimes.kata]\nruntime_type = \"vm\"\n";
        assert!(
            later(kata)
                .unwrap_err()
                .to_string()
                .contains("calls no OCI runtime")
        );
        let (entry, _) = runtime_of_crio(&[], "/x".to_owned()).unwrap();
        let expected = json!({ "runtime_path": "/x", "runtime_type": "oci" });
        assert_eq!(entry, expected);
    }

    const MINE: &str = "{\n    \"default-runtime\": \"nvidia\",\n    \"runtimes\": { \"nvidia\": { \"path\": \"/usr/bin/nv\" } },\n    \"mtu\": 1450.0\n}\n";

    fn edited(text: &str, path: &str, is_default: bool) -> String {
        let entry = json!({ "path": path });
        DOCKER.with_runtime(text, &entry, is_default).unwrap()
    }

    #[test]
    fn the_runtime_and_the_default_come_and_go() {
        let text = edited(MINE, "/b/bindguard-runtime", true);
        let added =
            "{ \"path\": \"/usr/bin/nv\" }, \"bindguard\": {\"path\":\"/b/bindguard-runtime\"} }";
        assert!(
            text.contains("\"default-runtime\": \"bindguard\"") && text.contains(added),
            "{text}"
        );
        assert_eq!(edited(&text, "/b/bindguard-runtime", true), text);
        assert_eq!(default_of_docker(MINE).unwrap(), Path::new("/usr/bin/nv"));
        let back = DOCKER.cleaned(&text.replace("1450", "9000"), MINE).unwrap();
        assert_eq!(back, MINE.replace("1450", "9000"));
    }

    #[test]
    fn the_name_stays_as_that_of_the_real_runtime() {
        let guarded = edited(MINE, "/b/bindguard-runtime", true);
        let with_name_only = |text: &str, runtime: &str| {
            DOCKER
                .with_name_only(text, MINE, Path::new(runtime))
                .unwrap()
        };
        let kept = with_name_only(&guarded, "/usr/bin/runc").unwrap();
        assert_eq!(kept, edited(MINE, "/usr/bin/runc", false));
        let again = with_name_only(&kept, "/usr/bin/crun").unwrap();
        assert_eq!(again, kept, "state lies with the first runtime");
        assert!(docker_needs_restart(&guarded).unwrap() && !docker_needs_restart(&kept).unwrap());
        assert_eq!(with_name_only(MINE, "/usr/bin/runc"), None);
    }

    #[test]
    fn a_file_that_was_empty_is_empty_again() {
        let text = edited("", "/b", true);
        assert_eq!(DOCKER.cleaned(&text, "").unwrap().trim(), "{}");
    }
}
