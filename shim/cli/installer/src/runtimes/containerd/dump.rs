//! containerd's effective configuration, and the handler that bindguard adds.
//!
//! A file alone does not show the effective configuration. containerd 1.7 uses a file's `runtimes`
//! *instead of* the built-in runtimes: a file that adds only a new runtime loses `runc`. Imports of 1.7
//! replace whole sections. The imports of 2.x merge or are ignored, depending on the version. So an edit
//! is accepted only if the dump after it equals the dump before it plus the intended change.

use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::{Result, anyhow, bail, ensure};
use bindguard_core::handover::{SHIM, WRAPPER};
use toml::{Table, Value};

use crate::record::{InstallOptions, USUAL_RUNTIME};
use crate::running::{SearchPath, not_configured};

/// The CRI plugin's ids: the first up to containerd 1.7, in a file of version 2; the second since
/// containerd 2.0, in a file of version 3.
pub const PLUGINS: [&str; 2] = ["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"];

/// The effective configuration with certain files.
#[derive(Debug, Clone, PartialEq)]
pub struct Effective {
    /// The runtimes, without the keys that equal an absent key.
    pub runtimes: Table,
    pub default: String,
    /// Everything else.
    rest: Table,
}

impl Effective {
    /// Reads a dump.
    ///
    /// # Errors
    /// If the dump is not TOML or has no CRI plugin.
    pub fn from_dump(dump: &str) -> Result<Self> {
        let mut rest: Table =
            toml::from_str(dump).map_err(|error| anyhow!("it is not TOML: {}", error.message()))?;
        // 1.7 lists the files that it reads, in a changing order; 2.x lists the patterns
        rest.remove("imports");
        for id in PLUGINS {
            let plugin = rest.get_mut("plugins").and_then(|it| it.get_mut(id));
            let cri = plugin.and_then(|it| it.get_mut("containerd"));
            let Some(cri) = cri.and_then(Value::as_table_mut) else {
                continue;
            };
            let runtimes = match cri.remove("runtimes") {
                Some(Value::Table(runtimes)) => telling(&runtimes),
                _ => Table::new(),
            };
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
        let named = plugins
            .get(PLUGINS[0])
            .and_then(|cri| cri.get("sandbox_image"));
        let images = plugins.get("io.containerd.cri.v1.images");
        let pinned = images.and_then(|images| images.get("pinned_images")?.get("sandbox"));
        named.or(pinned)?.as_str().filter(|name| !name.is_empty())
    }

    /// A runtime's table.
    ///
    /// # Errors
    /// If there is no such runtime.
    pub fn runtime(&self, name: &str) -> Result<&Table> {
        match self.runtimes.get(name).and_then(Value::as_table) {
            Some(table) => Ok(table),
            None => not_configured(name),
        }
    }

    /// The programs of a runtime that were found. containerd serves no CRI if its default is missing
    /// from its runtimes, and no pod starts without the runtime's programs.
    pub fn usable(&self, name: &str, path: &SearchPath) -> Result<Vec<PathBuf>> {
        let table = self.runtime(name)?;
        let kind = kind_of(table);
        let mut parts = kind.rsplit('.');
        let shim = match (word(table, "runtime_path"), parts.next(), parts.next()) {
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

/// A runtime's table without the keys that equal an absent key: Go's zero values, and the
/// sandboxer's default.
fn telling(table: &Table) -> Table {
    let mut kept = Table::new();
    for (key, value) in table {
        let says_something = match value {
            Value::String(text) => {
                !(text.is_empty() || key.starts_with("sandbox") && text == "podsandbox")
            }
            Value::Integer(number) => *number != 0,
            Value::Boolean(yes) => *yes,
            Value::Array(array) => !array.is_empty(),
            Value::Table(table) => {
                let inner = telling(table);
                if !inner.is_empty() || key != "options" {
                    kept.insert(key.clone(), Value::Table(inner));
                }
                continue;
            }
            Value::Float(_) | Value::Datetime(_) => true,
        };
        if says_something {
            kept.insert(key.clone(), value.clone());
        }
    }
    kept
}

fn compare(at: &str, before: &Table, after: &Table, found: &mut Vec<String>) {
    let keys: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    for key in keys {
        let name = match at {
            "" => key.clone(),
            at => format!("{at}.{key}"),
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

/// The kind of the runtimes whose shim calls an OCI runtime, before which the guard can run.
pub const RUNC: &str = "io.containerd.runc.v2";

fn word<'t>(table: &'t Table, key: &str) -> &'t str {
    table.get(key).and_then(Value::as_str).unwrap_or_default()
}

pub fn kind_of(base: &Table) -> &str {
    word(base, "runtime_type")
}

/// The OCI runtime that the options of a runtime name.
pub fn binary_name(table: &Table) -> &str {
    let options = table.get("options");
    let named = options.and_then(|options| options.get("BinaryName")?.as_str());
    named.unwrap_or(USUAL_RUNTIME)
}

/// The handler's table, made from the table of the runtime that it guards. bindguard's shim, by
/// `runtime_path`, keeps every option. With `--wrapper` containerd's own shim stays, and calls
/// bindguard-runtime by `BinaryName`.
///
/// # Errors
/// If the runtime is not of runc's kind.
pub fn handler(base: &Table, options: &InstallOptions) -> Result<Table> {
    ensure!(
        kind_of(base) == RUNC,
        "its runtime_type is {:?}, and bindguard guards {RUNC} only",
        kind_of(base)
    );
    let program = |name: &str| Value::from(options.prefix.join(name).display().to_string());
    let mut table = base.clone();
    table.retain(|key, _| {
        // with --wrapper, a foreign shim of the operator is kept
        !key.starts_with("runtime_") || key == "runtime_path" && options.wrapper
    });
    table.insert("runtime_type".to_owned(), Value::from(RUNC));
    if options.wrapper {
        let inner = table
            .entry("options")
            .or_insert_with(|| Table::new().into());
        if let Some(inner) = inner.as_table_mut() {
            inner.insert("BinaryName".to_owned(), program(WRAPPER));
        }
    } else {
        table.insert("runtime_path".to_owned(), program(SHIM));
    }
    Ok(table)
}

#[cfg(test)]
mod tests {
    use bindguard_core::handover::RUNTIME;

    use super::*;

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
            toml::from_str("runtime_type = 'runc.v2'\noptions.SystemdCgroup = true").unwrap()
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

    fn base() -> Table {
        toml::from_str(
            "runtime_type = 'io.containerd.runc.v2'\nruntime_path = '/old'\nsnapshotter = 's'\npod_annotations = ['a']\n\
             [options]\nSystemdCgroup = true\nBinaryName = '/usr/bin/crun'\nRoot = '/r'\n",
        )
        .unwrap()
    }

    fn made(base: &Table, wrapper: bool, prefix: &str) -> Result<Table> {
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
            toml::from_str(
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
        plain.remove("options");
        let table = made(&plain, true, "/usr/bin").unwrap();
        assert_eq!(binary_name(&table), "/usr/bin/bindguard-runtime");
        assert_eq!(binary_name(&plain), "runc");
    }

    #[test]
    fn another_kind_of_runtime_is_refused() {
        let kata: Table = toml::from_str("runtime_type = 'io.containerd.kata.v2'").unwrap();
        let error = made(&kata, false, "/b").unwrap_err().to_string();
        assert!(error.contains("kata"), "{error}");
    }
}
