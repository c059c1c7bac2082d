//! containerd's effective configuration, from `containerd config dump`, and the handler's table, made from
//! the table of the runtime that it guards.
//!
//! A file alone does not show the effective configuration. containerd 1.6 and 1.7 use a file's
//! `runtimes` *instead of* the built-in runtimes: a file that adds only a new runtime loses `runc`.
//! Imports of 1.6 and 1.7 replace whole sections. The imports of 2.x merge or are ignored,
//! depending on the version. So an edit is accepted only if the dump after it equals the dump
//! before it plus the intended change.
//!
//! | kind | `runtime_type` | supervisor | on |
//! |---|---|---|---|
//! | shim | `io.containerd.runc.v2` and `runtime_path` | bindguard's shim, with every option of the runtime | 1.7 and newer |
//! | named shim | `io.containerd.bindguard.v2` | bindguard's shim; 1.6 ignores `runtime_path` and hands no options on | 1.6 |
//! | wrapper | `io.containerd.runc.v2` and `BinaryName` | containerd's own shim | any |

use std::path::{Path, PathBuf};

use bindguard_core::program_names::{RUNTIME, SHIM, SHIM_RUNTIME_TYPE, WRAPPER};
use toml::{Table, Value};

use crate::options::USUAL_RUNTIME;
use crate::search_path::{SearchPath, Unusable, is_searched};

/// Major and minor.
pub type Version = (u32, u32);

/// The CRI plugin's ids: the first up to containerd 1.7, in a file of version 2; the second since
/// containerd 2.0, in a file of version 3.
pub const PLUGINS: [&str; 2] = ["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"];

/// The effective configuration with certain files.
#[derive(Debug, Clone, PartialEq)]
pub struct Effective {
    runtimes: Table,
    default: String,
    /// Everything else.
    rest: Table,
}

/// The intended result of an edit.
#[derive(Debug, Clone, PartialEq)]
pub struct Meant {
    /// The table of the handler.
    pub handler: Table,
    /// The default runtime, if an edit changes it.
    pub default: Option<String>,
}

/// Why a dump was not read.
#[derive(Debug, thiserror::Error)]
pub enum NotRead {
    #[error("it is not TOML: {0}")]
    NotToml(String),
    /// Without the CRI plugin's runtimes.
    #[error("it has no CRI plugin")]
    NoPlugin,
}

impl Effective {
    /// Reads a dump.
    ///
    /// # Errors
    /// If the dump is not TOML or has no CRI plugin.
    pub fn from_dump(dump: &str) -> Result<Self, NotRead> {
        let mut rest: Table =
            toml::from_str(dump).map_err(|error| NotRead::NotToml(error.message().to_owned()))?;
        // 1.6 and 1.7 list the files that they read, in a changing order; 2.x lists the patterns
        rest.remove("imports");
        let plugins = rest
            .get_mut("plugins")
            .and_then(Value::as_table_mut)
            .ok_or(NotRead::NoPlugin)?;
        let mut ours = PLUGINS
            .iter()
            .filter_map(|id| plugins.get(*id)?.get("containerd").map(|_| *id));
        let id = ours.next().ok_or(NotRead::NoPlugin)?;
        let cri = plugins
            .get_mut(id)
            .and_then(|plugin| plugin.get_mut("containerd"))
            .and_then(Value::as_table_mut);
        let cri = cri.ok_or(NotRead::NoPlugin)?;
        let runtimes = cri
            .remove("runtimes")
            .and_then(|table| table.as_table().cloned())
            .unwrap_or_default();
        let default = cri
            .remove("default_runtime_name")
            .and_then(|name| name.as_str().map(str::to_owned));
        Ok(Self {
            runtimes,
            default: default.unwrap_or_default(),
            rest,
        })
    }

    /// The image of a pod's sandbox: since containerd 2.0 an image that is pinned.
    pub fn sandbox_image(&self) -> Option<&str> {
        let plugins = self.rest.get("plugins")?;
        let cri = |id: &str| plugins.get(id);
        let named = cri(PLUGINS[0]).and_then(|cri| cri.get("sandbox_image"));
        let pinned = cri("io.containerd.cri.v1.images")
            .and_then(|images| images.get("pinned_images")?.get("sandbox"));
        named.or(pinned)?.as_str().filter(|name| !name.is_empty())
    }

    /// A runtime's table, without the keys that equal an absent key.
    pub fn runtime(&self, name: &str) -> Option<Table> {
        self.runtimes
            .get(name)
            .and_then(Value::as_table)
            .map(telling)
    }

    pub fn default(&self) -> &str {
        &self.default
    }

    /// The programs of the default runtime that were found. containerd serves no CRI if its default
    /// is missing from its runtimes, and no pod starts without the runtime's programs.
    pub fn usable_default(&self, path: &SearchPath) -> Result<Vec<PathBuf>, Unusable> {
        self.usable(&self.default, path)
    }

    /// The same for any runtime.
    pub fn usable(&self, name: &str, path: &SearchPath) -> Result<Vec<PathBuf>, Unusable> {
        let table = self.configured(name)?;
        let word = |key: &str| table.get(key).and_then(Value::as_str).unwrap_or_default();
        let kind = word("runtime_type");
        let mut parts = kind.rsplit('.');
        let shim = match (word("runtime_path"), parts.next(), parts.next()) {
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
    pub fn oci_runtime(&self, name: &str, path: &SearchPath) -> Result<Option<PathBuf>, Unusable> {
        let table = self.configured(name)?;
        if !is_guarded(&table) {
            return Ok(None);
        }
        let options = table.get("options");
        let named = options.and_then(|options| options.get("BinaryName")?.as_str());
        path.program_of(name, named.unwrap_or(USUAL_RUNTIME))
    }

    fn configured(&self, name: &str) -> Result<Table, Unusable> {
        self.runtime(name)
            .ok_or_else(|| Unusable::NotConfigured(name.to_owned()))
    }

    /// The names of all runtimes.
    pub fn names(&self) -> Vec<&str> {
        self.runtimes.keys().map(String::as_str).collect()
    }

    /// The runtimes that are in `self` and not in `after`.
    pub fn lost_in<'s>(&'s self, after: &Self) -> impl Iterator<Item = (&'s str, Table)> {
        let lost: Vec<&String> = self
            .runtimes
            .keys()
            .filter(|name| !after.runtimes.contains_key(*name))
            .collect();
        lost.into_iter()
            .filter_map(|name| Some((name.as_str(), self.runtime(name)?)))
    }

    /// The dotted names of all keys that differ in `after` and are not `meant`.
    pub fn surprises(&self, after: &Self, meant: &Meant) -> Vec<String> {
        let mut wanted = self.clone();
        wanted
            .runtimes
            .insert(RUNTIME.to_owned(), Value::Table(meant.handler.clone()));
        if let Some(default) = &meant.default {
            wanted.default.clone_from(default);
        }
        let mut found = Vec::new();
        compare("", &wanted.rest, &after.rest, &mut found);
        compare(
            "runtimes",
            &telling(&wanted.runtimes),
            &telling(&after.runtimes),
            &mut found,
        );
        if wanted.default != after.default {
            found.push("default_runtime_name".to_owned());
        }
        found
    }
}

/// A runtime's table without the keys that equal an absent key: Go's zero values, and the
/// sandboxer's default.
fn telling(table: &Table) -> Table {
    let says_something = |key: &String, value: &Value| match value {
        Value::String(text) => {
            !(text.is_empty() || key.starts_with("sandbox") && text == "podsandbox")
        }
        Value::Integer(number) => *number != 0,
        Value::Boolean(yes) => *yes,
        Value::Array(array) => !array.is_empty(),
        Value::Table(table) => !table.is_empty(),
        Value::Float(_) | Value::Datetime(_) => true,
    };
    let inner = |value: &Value| {
        value
            .as_table()
            .map_or_else(|| value.clone(), |table| Value::Table(telling(table)))
    };
    let members = table.iter().map(|(key, value)| (key.clone(), inner(value)));
    members
        .filter(|(key, value)| says_something(key, value) || value.is_table() && key != "options")
        .collect()
}

fn compare(at: &str, before: &Table, after: &Table, found: &mut Vec<String>) {
    let keys: std::collections::BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    for key in keys {
        let name = if at.is_empty() {
            key.clone()
        } else {
            format!("{at}.{key}")
        };
        match (before.get(key), after.get(key)) {
            (Some(Value::Table(before)), Some(Value::Table(after))) => {
                compare(&name, before, after, found)
            }
            (before, after) if before == after => {}
            _ => found.push(name),
        }
    }
}

const RUNC: &str = "io.containerd.runc.v2";

/// The way in which containerd calls the guard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HandlerKind {
    /// bindguard's shim by its path.
    Shim,
    /// bindguard's shim by its name.
    NamedShim,
    /// bindguard-runtime under containerd's own shim.
    Wrapper,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Handler {
    pub table: Table,
    /// The OCI runtime that bindguard-runtime must call, if a handler of this kind does not pass it
    /// on.
    pub needs_runtime: Option<PathBuf>,
    /// Options of the runtime that a handler of this kind loses.
    pub lost: Vec<String>,
}

/// True if a runtime's shim calls an OCI runtime, before which the guard can run.
pub fn is_guarded(base: &Table) -> bool {
    base.get("runtime_type").and_then(Value::as_str) == Some(RUNC)
}

/// A runtime of a kind that calls no OCI runtime.
#[derive(Debug, thiserror::Error)]
#[error("its runtime_type is {0:?}, and bindguard guards {RUNC} only")]
pub struct NotGuarded(String);

impl HandlerKind {
    /// The kind that supports most on this containerd, or the wrapper on request. A default runtime
    /// also creates containers of pods older than it. For those, 1.6 would take the options of
    /// `base` from their own shim.
    pub fn on(version: Version, wrapper: bool, default: bool, base: &Table) -> Self {
        let loses = version < (1, 7) && default && base.get("options").is_some();
        match version {
            _ if wrapper || loses => Self::Wrapper,
            (1, 0..7) => Self::NamedShim,
            _ => Self::Shim,
        }
    }

    /// Every kind by which this containerd calls the guard.
    pub fn all_on(version: Version) -> &'static [Self] {
        match version {
            (1, 0..7) => &[Self::NamedShim, Self::Wrapper],
            _ => &[Self::Shim, Self::NamedShim, Self::Wrapper],
        }
    }

    /// The handler of this kind, for a runtime with the table `base`.
    ///
    /// # Errors
    /// If the runtime is not of runc's kind.
    pub fn handler(self, base: &Table, prefix: &Path) -> Result<Handler, NotGuarded> {
        if !is_guarded(base) {
            let kind = base
                .get("runtime_type")
                .and_then(Value::as_str)
                .unwrap_or_default();
            return Err(NotGuarded(kind.to_owned()));
        }
        let mut table: Table = base
            .iter()
            .filter(|(key, _)| !key.starts_with("runtime_"))
            .map(owned)
            .collect();
        let mut options = table
            .remove("options")
            .and_then(|options| options.as_table().cloned())
            .unwrap_or_default();
        let named = options.get("BinaryName").and_then(Value::as_str);
        let runtime = PathBuf::from(named.unwrap_or(USUAL_RUNTIME));
        let mut handler = Handler {
            table: Table::new(),
            needs_runtime: None,
            lost: Vec::new(),
        };
        let mut kind = RUNC.to_owned();
        match self {
            Self::Shim => {
                table.insert("runtime_path".to_owned(), text(&prefix.join(SHIM)));
            }
            Self::NamedShim => {
                // the form of the cgroup's path shows SystemdCgroup
                handler.lost = options
                    .keys()
                    .filter(|key| !["SystemdCgroup", "BinaryName"].contains(&key.as_str()))
                    .cloned()
                    .collect();
                handler.needs_runtime = Some(runtime);
                options.clear();
                if !is_searched(prefix) {
                    kind = prefix.join(SHIM).display().to_string();
                } else {
                    SHIM_RUNTIME_TYPE.clone_into(&mut kind);
                }
            }
            Self::Wrapper => {
                // a foreign shim of the operator is kept
                if let Some(path) = base.get("runtime_path") {
                    table.insert("runtime_path".to_owned(), path.clone());
                }
                handler.needs_runtime = Some(runtime);
                options.insert("BinaryName".to_owned(), text(&prefix.join(WRAPPER)));
            }
        }
        table.insert("runtime_type".to_owned(), Value::String(kind));
        if !options.is_empty() {
            table.insert("options".to_owned(), Value::Table(options));
        }
        handler.table = table;
        Ok(handler)
    }
}

fn owned((key, value): (&String, &Value)) -> (String, Value) {
    (key.clone(), value.clone())
}

fn text(path: &Path) -> Value {
    Value::String(path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    const DUMP: &str = "imports = [\"b\", \"a\"]\n[plugins.'io.containerd.grpc.v1.cri']\nsandbox_image = 'p'\n[plugins.'io.containerd.grpc.v1.cri'.containerd]\n\
        default_runtime_name = 'runc'\n[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.runc]\nruntime_type = 'runc.v2'\nruntime_path = ''\n\
        sandbox_mode = 'podsandbox'\n[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.runc.options]\nBinaryName = ''\nSystemdCgroup = true\n";
    const ADDED: &str = "[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.bindguard]\nruntime_type = 'x'\nsnapshotter = ''\n";

    fn effective(dump: &str) -> Effective {
        Effective::from_dump(dump).unwrap()
    }

    fn meant(is_default: bool) -> Meant {
        Meant {
            handler: toml::from_str("runtime_type = 'x'").unwrap(),
            default: is_default.then(|| RUNTIME.to_owned()),
        }
    }

    #[test]
    fn a_runtime_says_only_what_is_set() {
        let runc = effective(DUMP).runtime("runc").unwrap();
        assert_eq!(
            runc,
            toml::from_str("runtime_type = 'runc.v2'\noptions.SystemdCgroup = true").unwrap()
        );
    }

    #[test]
    fn a_default_needs_its_shim_and_its_oci_runtime() {
        let folder = tempfile::tempdir().unwrap();
        let path = || SearchPath::of(Some(folder.path().into()), None);
        let missing = |dump: &str| {
            effective(dump)
                .usable_default(&path())
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
            before.surprises(&with("[\"b\", \"a\"]", "[\"a\", \"b\"]"), &meant(false)),
            Vec::<String>::new()
        );
        assert_eq!(
            before.surprises(&with("= 'runc'", "= 'bindguard'"), &meant(true)),
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
            let surprises = before.surprises(&with(from, to), &meant(false));
            assert!(
                surprises.iter().any(|found| found.starts_with(name)),
                "{name}: {surprises:?}"
            );
        }
        assert_eq!(
            before.surprises(&before, &meant(false)),
            ["runtimes.bindguard"]
        );
        let lost = effective(&format!(
            "{}{ADDED}",
            DUMP.split("[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes")
                .next()
                .unwrap()
        ));
        assert_eq!(
            before
                .lost_in(&lost)
                .map(|(name, _)| name)
                .collect::<Vec<_>>(),
            ["runc"]
        );
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

    fn base() -> Table {
        toml::from_str(
            "runtime_type = 'io.containerd.runc.v2'\nruntime_path = '/old'\nsnapshotter = 's'\npod_annotations = ['a']\n\
             [options]\nSystemdCgroup = true\nBinaryName = '/usr/bin/crun'\nRoot = '/r'\n",
        )
        .unwrap()
    }

    fn handler(version: Version, wrapper: bool, prefix: &str) -> Handler {
        HandlerKind::on(version, wrapper, false, &base())
            .handler(&base(), Path::new(prefix))
            .unwrap()
    }

    #[test]
    fn newer_containerds_keep_every_option() {
        let handler = handler((2, 1), false, "/opt/b");
        assert_eq!(
            handler.table,
            toml::from_str(
                "runtime_type = 'io.containerd.runc.v2'\nruntime_path = '/opt/b/containerd-shim-bindguard-v2'\n\
                 pod_annotations = ['a']\nsnapshotter = 's'\n\
                 [options]\nBinaryName = '/usr/bin/crun'\nRoot = '/r'\nSystemdCgroup = true\n"
            )
            .unwrap()
        );
        assert_eq!((handler.needs_runtime, handler.lost.len()), (None, 0));
    }

    #[test]
    fn containerd_1_6_finds_the_shim_by_name_and_lost_options_are_reported() {
        let made = handler((1, 6), false, "/usr/local/bin");
        assert_eq!(
            made.table.get("runtime_type").unwrap().as_str(),
            Some(SHIM_RUNTIME_TYPE)
        );
        assert!(!made.table.contains_key("options") && !made.table.contains_key("runtime_path"));
        assert_eq!(
            (made.needs_runtime, made.lost),
            (Some("/usr/bin/crun".into()), vec!["Root".to_owned()])
        );
        let elsewhere = handler((1, 6), false, "/opt/b");
        assert_eq!(
            elsewhere.table.get("runtime_type").unwrap().as_str(),
            Some("/opt/b/containerd-shim-bindguard-v2")
        );
    }

    #[test]
    fn the_wrapper_stands_before_the_runtime_that_was_named() {
        let handler = handler((1, 6), true, "/usr/bin");
        assert_eq!(
            handler.table["options"]["BinaryName"].as_str(),
            Some("/usr/bin/bindguard-runtime")
        );
        assert_eq!(
            (handler.needs_runtime, handler.lost.len()),
            (Some("/usr/bin/crun".into()), 0)
        );
    }

    #[test]
    fn pods_that_are_older_than_the_default_keep_their_options() {
        let (plain, base) = (Table::new(), base());
        assert_eq!(
            HandlerKind::on((1, 6), false, true, &base),
            HandlerKind::Wrapper
        );
        assert_eq!(
            HandlerKind::on((1, 6), false, true, &plain),
            HandlerKind::NamedShim
        );
        assert_eq!(
            HandlerKind::on((1, 7), false, true, &base),
            HandlerKind::Shim
        );
    }

    #[test]
    fn another_kind_of_runtime_is_refused() {
        let kata: Table = toml::from_str("runtime_type = 'io.containerd.kata.v2'").unwrap();
        assert!(
            HandlerKind::Shim
                .handler(&kata, Path::new("/b"))
                .unwrap_err()
                .to_string()
                .contains("kata")
        );
    }
}
