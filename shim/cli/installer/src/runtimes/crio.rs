//! CRI-O's drop-in: a runtime with every setting of the current default runtime.
//!
//! CRI-O's own packages keep conmon and the OCI runtimes in a folder of their own, which a drop-in
//! names. CRI-O searches PATH for the monitor of a runtime that names none, and does not start
//! without it: see crio.conf(5).

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use bindguard_core::program_names::{RUNTIME, WRAPPER};
use toml::{Table, Value};

use crate::change::Change;
use crate::options::{Healing, InstallOptions, Owner, PlannedChange, TargetPlan, USUAL_RUNTIME};
use crate::running::{self, Daemon};
use crate::runtimes::runtime_drop_in::{
    FileText, default_of, drop_in_text, heal, paths_in_order, refuse_later_default, runtime_of,
    texts_after, usual_runtime,
};
use crate::search_path::{SearchPath, Unusable, find};
use crate::toml_text::Place;

/// Its drop-in; the last default wins.
pub const DROP_IN: &str = "/etc/crio/crio.conf.d/zz-bindguard.conf";

const MAIN: &str = "/etc/crio/crio.conf";
const FOLDER: &str = "/etc/crio/crio.conf.d";
/// The default runtime of CRI-O 1.31 and newer, and of older versions.
const BUILT_IN: [&str; 2] = ["crun", "runc"];

/// The command after which CRI-O reads its files again.
pub const RESTART: &str = "systemctl restart crio";

const PLACE: Place = Place {
    section: &["crio", "runtime"],
    runtimes: "runtimes",
    default: "default_runtime",
};

/// Plans the changes for CRI-O.
pub fn plan(options: &InstallOptions) -> Result<TargetPlan> {
    let mut others = files();
    others.retain(|path| path != Path::new(DROP_IN));
    let mut files = texts_after(others, &[])?;
    if options.default {
        refuse_later_default("CRI-O", &files, Path::new(DROP_IN), PLACE)?;
    }
    let mut healing = healed(&mut files)?;
    if options.default {
        // bindguard's drop-in names the default
        healing.edits.clear();
    }
    let former = Former::of(&files)?;
    let wrapper = options.prefix.join(WRAPPER).display().to_string();
    let text = drop_in_text(PLACE, &former.with_path(&wrapper), options)?;
    let change = Change::of(Path::new(DROP_IN), Some(text.into_bytes()), 0o644)?;
    let mut plan = TargetPlan {
        changes: vec![change],
        needs_runtime: Some(former.runtime()),
        command: Some(RESTART.to_owned()),
        ..TargetPlan::default()
    };
    plan.take(healing)?;
    Ok(plan)
}

/// CRI-O's files, in the order in which it reads them.
pub fn files() -> Vec<PathBuf> {
    paths_in_order(&[MAIN], FOLDER, None)
}

/// The edits after which CRI-O's default starts containers. CRI-O does not start with a default that
/// is missing from its runtimes.
pub fn default_after_removal(steps: &[PlannedChange]) -> Result<Healing> {
    healed(&mut texts_after(files(), steps)?)
}

fn healed(files: &mut [FileText]) -> Result<Healing> {
    let daemon = running::daemon_of(Owner::Crio);
    let path = SearchPath::of(daemon.as_ref().and_then(Daemon::search_path), None);
    let check = |name: &str, entry: Option<Value>| {
        let Some(entry) = entry else {
            return if BUILT_IN.contains(&name) {
                path.program_of(name, name).map(drop)
            } else {
                Err(Unusable::NotConfigured(name.to_owned()))
            };
        };
        let named = entry.get("runtime_path").and_then(Value::as_str);
        let program = named.filter(|path| !path.is_empty()).unwrap_or(name);
        path.program_of(name, program).map(drop)
    };
    // CRI-O's built-in default depends on its version, so a configured runtime is better
    let mut usual = None;
    for name in [USUAL_RUNTIME, "crun"] {
        let entry = runtime_of(files, PLACE, name)?;
        if usual.is_none() && entry.is_some() && check(name, entry).is_ok() {
            usual = Some(name);
        }
    }
    heal("CRI-O", files, PLACE, usual, &BUILT_IN, check)
}

/// The text without bindguard's runtime; `original` has the earlier default.
pub fn cleaned(text: &str, original: &str) -> Result<String> {
    Ok(PLACE.without_runtime(text, RUNTIME, original)?)
}

/// The runtime that is the default without bindguard.
#[derive(Debug, Default)]
struct Former {
    name: Option<String>,
    settings: Table,
}

impl Former {
    /// The default runtime of CRI-O's files; the last file wins. A built-in runtime has no settings
    /// to copy.
    fn of(files: &[FileText]) -> Result<Self> {
        let mut name = default_of(files, PLACE)?.map(|(_, name)| name);
        for built_in in BUILT_IN {
            if name.is_none() && runtime_of(files, PLACE, built_in)?.is_some() {
                name = Some(built_in.to_owned());
            }
        }
        let entry = match &name {
            Some(name) => runtime_of(files, PLACE, name)?,
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
        (PathBuf::from(MAIN), text.to_owned())
    }

    #[test]
    fn the_monitor_and_the_rest_are_those_of_the_default() {
        let former = Former::of(&[file(PACKAGED)]).unwrap();
        let text = PLACE
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
