//! Docker's daemon.json: a runtime `bindguard`, on request as the default.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use bindguard_core::program_names::{RUNTIME, WRAPPER};
use serde_json::{Value, json};

use crate::change::{self, Change, Content};
use crate::json_text;
use crate::owner::Owner;
use crate::plan::{Healing, InstallOptions, PlannedChange, TargetPlan, USUAL_RUNTIME};
use crate::record::{Entry, Record};
use crate::running::{self, DOCKER_RELOAD, Daemon, option};
use crate::search_path::{SearchPath, Unusable};

/// The file that dockerd reads.
pub const CONFIG: &str = "/etc/docker/daemon.json";
const ENTRY: [&str; 2] = ["runtimes", RUNTIME];
const DEFAULT: [&str; 1] = ["default-runtime"];

/// Plans the change to it.
pub fn plan(options: &InstallOptions, record: &Record) -> Result<TargetPlan> {
    let text = |bytes: &[u8]| {
        String::from_utf8(bytes.to_vec()).map_err(|_| anyhow!("{CONFIG} is not text"))
    };
    let before = text(&change::read(Path::new(CONFIG))?.unwrap_or_default())?;
    let entry = record.entry(&change::resolved(Path::new(CONFIG)));
    let original = entry.map(Entry::original).transpose()?.flatten();
    let original = text(
        original
            .as_ref()
            .and_then(Content::bytes)
            .unwrap_or_default(),
    )?;
    let mut plan = TargetPlan {
        command: Some(DOCKER_RELOAD.to_owned()),
        ..TargetPlan::default()
    };
    let doing = || format!("edit {CONFIG}");
    let mut former = before.clone();
    if is_default(&before).with_context(doing)? {
        former = with_former_default(&before, &original).with_context(doing)?;
        if !options.default {
            // a reload keeps a default runtime that the file no longer names
            plan.command = Some(RESTART.to_owned());
        }
    }
    if let Err(why) = usable_default(&former).with_context(doing)? {
        former = json_text::without(&former, &DEFAULT).with_context(doing)?;
        plan.notes.push(replaced(&why));
    }
    let after = if options.default { &before } else { &former };
    let after =
        edited(after, &options.prefix.join(WRAPPER), options.default).with_context(doing)?;
    let former_default = if options.default {
        former_default(&former).with_context(|| format!("parse {CONFIG}"))?
    } else {
        None
    };
    plan.needs_runtime = former_default.or_else(|| Some(USUAL_RUNTIME.into()));
    plan.changes.push(Change::of(
        Path::new(CONFIG),
        Some(after.into_bytes()),
        0o644,
    )?);
    Ok(plan)
}

/// The command after which dockerd forgets what is no longer in its file. A reload of a file
/// without `runtimes` keeps the former runtimes, and keeps a removed default runtime (seen with
/// Docker 20.10).
pub const RESTART: &str = "systemctl restart docker";

/// The edit after which Docker's default starts containers. dockerd refuses to start if its
/// `runtimes` lack the default.
pub fn default_after_removal(steps: &[PlannedChange]) -> Result<Healing> {
    let step = steps.iter().find(|step| step.owner == Owner::Docker);
    let Some(bytes) = step.and_then(|step| step.change.after.as_ref()?.bytes()) else {
        return Ok(Healing::default());
    };
    let doing = || format!("edit {CONFIG}");
    let text = String::from_utf8(bytes.to_vec()).with_context(doing)?;
    let Err(why) = usable_default(&text).with_context(doing)? else {
        return Ok(Healing::default());
    };
    let text = json_text::without(&text, &DEFAULT).with_context(doing)?;
    Ok(Healing {
        notes: vec![replaced(&why)],
        edits: vec![(CONFIG.into(), text)],
    })
}

fn replaced(why: &Unusable) -> String {
    format!(
        "Docker's default runtime starts no container: {why}; Docker's own {USUAL_RUNTIME} takes its place"
    )
}

/// An error in the result if no container starts under the default that the text names.
fn usable_default(text: &str) -> Result<Result<(), Unusable>> {
    let default = json_text::at(text, &DEFAULT)?;
    let Some(name) = default.as_ref().and_then(Value::as_str) else {
        return Ok(Ok(()));
    };
    let Some(runtime) = json_text::at(text, &["runtimes", name])? else {
        let daemon = running::daemon_of(Owner::Docker);
        let adds_more = |daemon: Daemon| option(&daemon.arguments(), &["add-runtime"]).is_some();
        let is_built_in = name == USUAL_RUNTIME || name.starts_with("io.containerd.");
        if is_built_in || daemon.is_some_and(adds_more) {
            return Ok(Ok(()));
        }
        return Ok(Err(Unusable::NotConfigured(name.to_owned())));
    };
    let Some(program) = runtime.get("path").and_then(Value::as_str) else {
        return Ok(Ok(()));
    };
    let daemon = running::daemon_of(Owner::Docker);
    let path = SearchPath::of(daemon.as_ref().and_then(Daemon::search_path), None);
    Ok(path.program_of(name, program).map(drop))
}

/// The text without install's additions; `original` has the earlier default.
pub fn cleaned(text: &str, original: &str) -> Result<String> {
    let has_entry = json_text::at(text, &ENTRY)?.is_some();
    let mut text = json_text::without(text, &ENTRY)?;
    if has_entry
        && json_text::at(&text, &ENTRY[..1])? == Some(json!({}))
        && json_text::at(original, &ENTRY[..1])?.is_none()
    {
        text = json_text::without(&text, &ENTRY[..1])?;
    }
    if is_default(&text)? {
        with_former_default(&text, original)
    } else {
        Ok(text)
    }
}

/// The text in which only the name is left, as that of `runtime`; `original` has the earlier
/// default. `None` if the text has no entry of the name.
pub fn with_name_only(text: &str, original: &str, runtime: &Path) -> Result<Option<String>> {
    let Some(entry) = json_text::at(text, &ENTRY)? else {
        return Ok(None);
    };
    let mut text = text.to_owned();
    if calls_guard(&entry) {
        let path = [ENTRY[0], ENTRY[1], "path"];
        text = json_text::with(&text, &path, &json!(runtime))?;
    }
    if is_default(&text)? {
        text = with_former_default(&text, original)?;
    }
    Ok(Some(text))
}

/// The data root, unless dockerd's command line names another.
pub fn data_root() -> PathBuf {
    let text = change::read(Path::new(CONFIG)).ok().flatten();
    let text = String::from_utf8_lossy(&text.unwrap_or_default()).into_owned();
    let named = json_text::at(&text, &["data-root"]).ok().flatten();
    let root = named.as_ref().and_then(Value::as_str);
    root.unwrap_or("/var/lib/docker").into()
}

/// True if dockerd needs a restart to forget bindguard: a name of the real runtime does no harm.
pub fn needs_restart(text: &str) -> Result<bool> {
    let entry = json_text::at(text, &ENTRY)?;
    Ok(entry.is_some_and(|entry| calls_guard(&entry)) || is_default(text)?)
}

fn calls_guard(entry: &Value) -> bool {
    let path = entry["path"].as_str().map(Path::new);
    path.is_some_and(|path| path.ends_with(WRAPPER))
}

fn is_default(text: &str) -> Result<bool> {
    Ok(!text.trim().is_empty() && json_text::at(text, &DEFAULT)? == Some(json!(RUNTIME)))
}

fn with_former_default(text: &str, original: &str) -> Result<String> {
    let former = if original.trim().is_empty() {
        None
    } else {
        json_text::at(original, &DEFAULT)?
    };
    Ok(match former.filter(|former| *former != json!(RUNTIME)) {
        Some(former) => json_text::with(text, &DEFAULT, &former)?,
        None => json_text::without(text, &DEFAULT)?,
    })
}

fn edited(text: &str, guard: &Path, default: bool) -> Result<String> {
    let runtime = json!({ "path": guard });
    let mut text = text.to_owned();
    if json_text::at(&text, &ENTRY)?.as_ref() != Some(&runtime) {
        text = json_text::with(&text, &ENTRY, &runtime)?;
    }
    if default && json_text::at(&text, &DEFAULT)? != Some(json!(RUNTIME)) {
        text = json_text::with(&text, &DEFAULT, &json!(RUNTIME))?;
    }
    Ok(text)
}

/// The path of the runtime that was the default, unless it is Docker's own runc.
fn former_default(text: &str) -> Result<Option<PathBuf>> {
    let Some(name) = json_text::at(text, &DEFAULT)?
        .as_ref()
        .and_then(Value::as_str)
        .map(str::to_owned)
    else {
        return Ok(None);
    };
    if name == RUNTIME || name == "runc" || name.starts_with("io.containerd.runc") {
        return Ok(None);
    }
    let path = json_text::at(text, &["runtimes", &name, "path"])?;
    let path = path
        .as_ref()
        .and_then(Value::as_str)
        .with_context(|| format!("find the path of the default runtime {name:?}"))?;
    Ok(Some(path.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINE: &str = "{\n    \"default-runtime\": \"nvidia\",\n    \"runtimes\": { \"nvidia\": { \"path\": \"/usr/bin/nv\" } },\n    \"mtu\": 1450.0\n}\n";

    #[test]
    fn the_runtime_and_the_default_come_and_go() {
        let text = edited(MINE, Path::new("/b/bindguard-runtime"), true).unwrap();
        let added =
            "{ \"path\": \"/usr/bin/nv\" }, \"bindguard\": {\"path\":\"/b/bindguard-runtime\"} }";
        assert!(
            text.contains("\"default-runtime\": \"bindguard\"") && text.contains(added),
            "{text}"
        );
        assert_eq!(
            edited(&text, Path::new("/b/bindguard-runtime"), true).unwrap(),
            text
        );
        assert_eq!(former_default(MINE).unwrap(), Some("/usr/bin/nv".into()));
        let back = cleaned(&text.replace("1450", "9000"), MINE).unwrap();
        assert_eq!(back, MINE.replace("1450", "9000"));
    }

    #[test]
    fn the_name_stays_as_that_of_the_real_runtime() {
        let guarded = edited(MINE, Path::new("/b/bindguard-runtime"), true).unwrap();
        let runc = Path::new("/usr/bin/runc");
        let kept = with_name_only(&guarded, MINE, runc).unwrap().unwrap();
        let fresh = edited(MINE, runc, false).unwrap();
        assert_eq!(kept, fresh);
        let crun = Path::new("/usr/bin/crun");
        let again = with_name_only(&kept, MINE, crun).unwrap().unwrap();
        assert_eq!(again, kept, "state lies with the first runtime");
        assert!(needs_restart(&guarded).unwrap() && !needs_restart(&kept).unwrap());
        assert_eq!(with_name_only(MINE, MINE, runc).unwrap(), None);
    }

    #[test]
    fn a_file_that_was_empty_is_empty_again() {
        let text = edited("", Path::new("/b"), true).unwrap();
        assert_eq!(cleaned(&text, "").unwrap().trim(), "{}");
    }
}
