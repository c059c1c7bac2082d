//! Docker's daemon.json: a runtime `bindguard`, on request as the default; every other byte is unchanged.
//!
//! JSON has no comments to lose, but a daemon.json has an order, an indentation and forms of
//! numbers to keep. So members are spliced into the text, as the guard does with specs
//! (docs/decisions/0002). The syntax tree of `jsonc-parser` 0.34 would not do: it rewrites an
//! object on one line over several lines.

use std::ops::Range;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use bindguard_core::program_names::{RUNTIME, WRAPPER};
use bindguard_core::spec::RawObject;
use serde_json::{Value, json};

use crate::change::{self, Change, Content, Plan, read_text};
use crate::options::{InstallOptions, Owner, USUAL_RUNTIME};
use crate::record::{Entry, Record};
use crate::running::{self, DOCKER_RELOAD, Daemon, option};
use crate::search_path::{SearchPath, not_configured};

/// The file that dockerd reads.
pub const CONFIG: &str = "/etc/docker/daemon.json";
const ENTRY: [&str; 2] = ["runtimes", RUNTIME];
const DEFAULT: [&str; 1] = ["default-runtime"];
const EDIT: &str = "edit /etc/docker/daemon.json";

/// Plans the change to it.
pub fn plan(options: &InstallOptions, record: &Record) -> Result<Plan> {
    let path = Path::new(CONFIG);
    let before = text(change::read(path)?)?;
    let entry = record.entry(&change::resolved(path));
    let original = entry.map(Entry::original).transpose()?.flatten();
    let original = text(
        original
            .as_ref()
            .and_then(Content::bytes)
            .map(<[u8]>::to_vec),
    )?;
    let mut plan = Plan {
        command: Some(DOCKER_RELOAD.to_owned()),
        ..Plan::default()
    };
    let mut former = before.clone();
    if is_default(&before).context(EDIT)? {
        former = with_former_default(&before, &original).context(EDIT)?;
        if !options.default {
            // a reload keeps a default runtime that the file no longer names
            plan.command = Some(RESTART.to_owned());
        }
    }
    if let Err(why) = usable_default(&former).context(EDIT)? {
        former = without_member(&former, &DEFAULT).context(EDIT)?;
        plan.notes.push(replaced(&why));
    }
    let after = if options.default { &before } else { &former };
    let guard = options.prefix.join(WRAPPER);
    let after = edited(after, &guard, options.default).context(EDIT)?;
    let mut needs_runtime = PathBuf::from(USUAL_RUNTIME);
    if options.default {
        let named = former_default(&former).with_context(|| format!("parse {CONFIG}"))?;
        needs_runtime = named.unwrap_or(needs_runtime);
    }
    plan.needs_runtime = Some(needs_runtime);
    let change = Change::text(Owner::Docker, path, after)?;
    plan.changes.push(change);
    Ok(plan)
}

fn text(bytes: Option<Vec<u8>>) -> Result<String> {
    String::from_utf8(bytes.unwrap_or_default()).map_err(|_| anyhow!("{CONFIG} is not text"))
}

/// The command after which dockerd forgets what is no longer in its file. A reload of a file
/// without `runtimes` keeps the former runtimes, and keeps a removed default runtime (seen with
/// Docker 20.10).
pub const RESTART: &str = "systemctl restart docker";

/// The edit after which Docker's default starts containers. dockerd refuses to start if its
/// `runtimes` lack the default.
pub fn default_after_removal(changes: &[Change]) -> Result<Plan> {
    let mut plan = Plan::default();
    let change = changes.iter().find(|change| change.owner == Owner::Docker);
    let Some(bytes) = change.and_then(|change| change.after.as_ref()?.bytes()) else {
        return Ok(plan);
    };
    let text = String::from_utf8(bytes.to_vec()).context(EDIT)?;
    if let Err(why) = usable_default(&text).context(EDIT)? {
        let text = without_member(&text, &DEFAULT).context(EDIT)?;
        plan.notes.push(replaced(&why));
        let path = Path::new(CONFIG);
        let change = Change::text(Owner::Docker, path, text)?;
        plan.changes.push(change);
    }
    Ok(plan)
}

fn replaced(why: &anyhow::Error) -> String {
    format!(
        "Docker's default runtime starts no container: {why}; Docker's own {USUAL_RUNTIME} takes its place"
    )
}

/// An error in the result if no container starts under the default that the text names.
fn usable_default(text: &str) -> Result<Result<()>> {
    let default = member(text, &DEFAULT)?;
    let Some(name) = default.as_ref().and_then(Value::as_str) else {
        return Ok(Ok(()));
    };
    let daemon = running::daemon_of(Owner::Docker);
    let Some(runtime) = member(text, &["runtimes", name])? else {
        let adds_more = |daemon: Daemon| option(&daemon.arguments(), &["add-runtime"]).is_some();
        let is_built_in = name == USUAL_RUNTIME || name.starts_with("io.containerd.");
        if is_built_in || daemon.is_some_and(adds_more) {
            return Ok(Ok(()));
        }
        return Ok(not_configured(name));
    };
    let Some(program) = runtime["path"].as_str() else {
        return Ok(Ok(()));
    };
    let path = SearchPath::of(daemon.as_ref().and_then(Daemon::search_path), None);
    Ok(path.program_of(name, program).map(drop))
}

/// The text without install's additions; `original` has the earlier default.
pub fn cleaned(text: &str, original: &str) -> Result<String> {
    let has_entry = member(text, &ENTRY)?.is_some();
    let mut text = without_member(text, &ENTRY)?;
    if has_entry
        && member(&text, &ENTRY[..1])? == Some(json!({}))
        && member(original, &ENTRY[..1])?.is_none()
    {
        text = without_member(&text, &ENTRY[..1])?;
    }
    if is_default(&text)? {
        text = with_former_default(&text, original)?;
    }
    Ok(text)
}

/// The text in which only the name is left, as that of `runtime`; `original` has the earlier
/// default. `None` if the text has no entry of the name.
pub fn with_name_only(text: &str, original: &str, runtime: &Path) -> Result<Option<String>> {
    let Some(entry) = member(text, &ENTRY)? else {
        return Ok(None);
    };
    let mut text = text.to_owned();
    if calls_guard(&entry) {
        let path = [ENTRY[0], ENTRY[1], "path"];
        text = with_member(&text, &path, &json!(runtime))?;
    }
    if is_default(&text)? {
        text = with_former_default(&text, original)?;
    }
    Ok(Some(text))
}

/// The data root, unless dockerd's command line names another.
pub fn data_root() -> PathBuf {
    let text = read_text(Path::new(CONFIG)).ok().flatten();
    let named = member(&text.unwrap_or_default(), &["data-root"]);
    let named = named.ok().flatten().unwrap_or_default();
    named.as_str().unwrap_or("/var/lib/docker").into()
}

/// True if dockerd needs a restart to forget bindguard: a name of the real runtime does no harm.
pub fn needs_restart(text: &str) -> Result<bool> {
    let entry = member(text, &ENTRY)?;
    Ok(entry.is_some_and(|entry| calls_guard(&entry)) || is_default(text)?)
}

fn calls_guard(entry: &Value) -> bool {
    let path = entry["path"].as_str().map(Path::new);
    path.is_some_and(|path| path.ends_with(WRAPPER))
}

fn is_default(text: &str) -> Result<bool> {
    Ok(member(text, &DEFAULT)? == Some(json!(RUNTIME)))
}

fn with_former_default(text: &str, original: &str) -> Result<String> {
    match member(original, &DEFAULT)? {
        Some(former) if former != json!(RUNTIME) => with_member(text, &DEFAULT, &former),
        _ => without_member(text, &DEFAULT),
    }
}

fn edited(text: &str, guard: &Path, default: bool) -> Result<String> {
    let runtime = json!({ "path": guard });
    let mut text = text.to_owned();
    if member(&text, &ENTRY)?.as_ref() != Some(&runtime) {
        text = with_member(&text, &ENTRY, &runtime)?;
    }
    if default && !is_default(&text)? {
        text = with_member(&text, &DEFAULT, &json!(RUNTIME))?;
    }
    Ok(text)
}

/// The path of the runtime that was the default, unless it is Docker's own runc.
fn former_default(text: &str) -> Result<Option<PathBuf>> {
    let named = member(text, &DEFAULT)?.unwrap_or_default();
    let Some(name) = named.as_str() else {
        return Ok(None);
    };
    if name == RUNTIME || name == "runc" || name.starts_with("io.containerd.runc") {
        return Ok(None);
    }
    let path = member(text, &["runtimes", name, "path"])?.unwrap_or_default();
    let path = path
        .as_str()
        .with_context(|| format!("find the path of the default runtime {name:?}"))?;
    Ok(Some(path.into()))
}

/// The text with `value` as the member at `path`. Missing objects on the way are created.
///
/// # Errors
/// If the text, or a value on the way, is not an object.
fn with_member(text: &str, path: &[&str], value: &Value) -> Result<String> {
    let text = if text.trim().is_empty() { "{}\n" } else { text };
    let (object, depth) = deepest(text, path)?;
    let mut value = value.clone();
    for name in path[depth + 1..].iter().rev() {
        value = json!({ *name: value });
    }
    Ok(match object.member(path[depth]) {
        Some(member) => spliced(text, member.value.clone(), &value.to_string()),
        None => object.with_added(text, path[depth], &value, depth),
    })
}

/// The text without the member at `path`, if it has one.
///
/// # Errors
/// If the text is not an object.
fn without_member(text: &str, path: &[&str]) -> Result<String> {
    let (object, depth) = deepest(text, path)?;
    let members = &object.members;
    let at = members.iter().position(|member| member.name == path[depth]);
    let Some(at) = at.filter(|_| depth + 1 == path.len()) else {
        return Ok(text.to_owned());
    };
    // from the end of the member before or, for the first member, up to the beginning of the next
    let range = match (at, members.get(at + 1)) {
        (0, Some(next)) => members[0].key..next.key,
        (0, None) => object.inside.clone(),
        _ => members[at - 1].value.end..members[at].value.end,
    };
    Ok(spliced(text, range, ""))
}

/// The value at `path`.
///
/// # Errors
/// If the text is not JSON.
fn member(text: &str, path: &[&str]) -> Result<Option<Value>> {
    if text.trim().is_empty() {
        return Ok(None);
    }
    let mut value: Value = serde_json::from_str(text).map_err(not_an_object)?;
    for name in path {
        match value.get_mut(name) {
            Some(inner) => value = inner.take(),
            None => return Ok(None),
        }
    }
    Ok(Some(value))
}

fn not_an_object(error: serde_json::Error) -> anyhow::Error {
    anyhow!("it is not a JSON object: {error}")
}

struct Object {
    /// Between the braces.
    inside: Range<usize>,
    members: Vec<Member>,
}

struct Member {
    name: String,
    /// The offset of its key's opening quote.
    key: usize,
    value: Range<usize>,
}

/// The deepest object along `path`, and the number of names that lead to it: at least the last name
/// is left.
fn deepest(text: &str, path: &[&str]) -> Result<(Object, usize)> {
    let whole = text.len() - text.trim_start().len()..text.trim_end().len();
    let mut object = Object::read(text, whole).map_err(not_an_object)?;
    for (depth, name) in path[..path.len() - 1].iter().enumerate() {
        let Some(member) = object.member(name) else {
            return Ok((object, depth));
        };
        object = Object::read(text, member.value.clone())
            .map_err(|_| anyhow!("{name:?} in it is not an object"))?;
    }
    Ok((object, path.len() - 1))
}

impl Object {
    fn read(text: &str, range: Range<usize>) -> serde_json::Result<Self> {
        let object: RawObject<'_> = serde_json::from_str(&text[range.clone()])?;
        let base = text.as_ptr().addr();
        let mut read: Vec<Member> = Vec::new();
        for (name, raw) in object.entries() {
            let start = raw.get().as_ptr().addr() - base;
            let after = read.last().map_or(range.start + 1, |last| last.value.end);
            let key = after + text[after..start].find('"').unwrap_or(0);
            read.push(Member {
                name: name.to_owned(),
                key,
                value: start..start + raw.get().len(),
            });
        }
        Ok(Self {
            inside: range.start + 1..range.end - 1,
            members: read,
        })
    }

    /// The last member of a name is the effective one.
    fn member(&self, name: &str) -> Option<&Member> {
        self.members.iter().rfind(|member| member.name == name)
    }

    /// The text with an added member, formatted like its neighbours.
    fn with_added(&self, text: &str, name: &str, value: &Value, depth: usize) -> String {
        let key = Value::from(name);
        let Some(last) = self.members.last() else {
            let outer = format!("\n{}", "  ".repeat(depth));
            let indent = format!("{outer}  ");
            let member = format!("{indent}{key}: {}{outer}", pretty(value, &indent));
            return spliced(text, self.inside.clone(), &member);
        };
        let mut member = format!(", {key}: {value}");
        // the text between the end of a line and the last key
        if let Some(line) = text[..last.key].rfind('\n') {
            let indent = &text[line..last.key];
            if indent.trim().is_empty() {
                member = format!(",{indent}{key}: {}", pretty(value, indent));
            }
        }
        spliced(text, last.value.end..last.value.end, &member)
    }
}

fn spliced(text: &str, range: Range<usize>, with: &str) -> String {
    format!("{}{with}{}", &text[..range.start], &text[range.end..])
}

/// A value over several lines, each behind `indent`, which begins with the newline.
fn pretty(value: &Value, indent: &str) -> String {
    format!("{value:#}").replace('\n', indent)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

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

    const PATH: [&str; 2] = ["runtimes", "guard"];

    #[test]
    fn members_are_added_where_and_how_people_write_them() {
        let value = json!({ "path": "/g" });
        for (before, after) in [
            (
                "",
                "{\n  \"runtimes\": {\n    \"guard\": {\n      \"path\": \"/g\"\n    }\n  }\n}\n",
            ),
            (
                "{ \"a\": 1.50 }",
                "{ \"a\": 1.50, \"runtimes\": {\"guard\":{\"path\":\"/g\"}} }",
            ),
            (
                "{\n\t\"runtimes\": {\n\t\t\"x\": {}\n\t}\n}",
                "{\n\t\"runtimes\": {\n\t\t\"x\": {},\n\t\t\"guard\": {\n\t\t  \"path\": \"/g\"\n\t\t}\n\t}\n}",
            ),
            (
                "{\"runtimes\":{\"guard\":{\"path\":\"/old\"}},\"b\":2}",
                "{\"runtimes\":{\"guard\":{\"path\":\"/g\"}},\"b\":2}",
            ),
        ] {
            assert_eq!(with_member(before, &PATH, &value).unwrap(), after);
        }
    }

    #[test]
    fn what_is_no_such_file_is_refused() {
        for text in ["[]", "{", "{\"runtimes\": 3}", "version = 2"] {
            assert!(with_member(text, &PATH, &json!(1)).is_err(), "{text}");
        }
    }

    #[test]
    fn the_first_the_last_and_the_only_member_can_go() {
        for (before, after) in [
            ("{ \"k\": {\"a\": 1}, \"b\": [1 ,2] }", "{ \"b\": [1 ,2] }"),
            ("{ \"b\" : 2 , \"k\": 1 }", "{ \"b\" : 2 }"),
            ("{ \"k\": 1 }", "{}"),
            ("{ \"b\": 2 }", "{ \"b\": 2 }"),
        ] {
            assert_eq!(without_member(before, &["k"]).unwrap(), after);
        }
    }

    proptest! {
        /// With any members: adding and removing the runtime keeps the file's meaning.
        #[test]
        fn nothing_else_changes(members in proptest::collection::btree_map("[a-z\"\\\\ ]{1,5}", 0..9_u32, 0..6), space in "[ \n\t]{0,3}", at_end in any::<bool>()) {
            let body: Vec<String> = members.iter().map(|(name, n)| format!("{space}{}{space}:{space}{{\"n\":{n}.0}}", Value::from(name.as_str()))).collect();
            let text = format!("{{{}{}}}", body.join(","), if at_end { "\n" } else { "" });
            let edited = with_member(&text, &PATH, &json!({ "path": "/g" })).unwrap();
            let mut expected: Value = serde_json::from_str(&text).unwrap();
            prop_assert_eq!(member(&edited, &PATH).unwrap(), Some(json!({ "path": "/g" })));
            let back = without_member(&edited, &["runtimes"]).unwrap();
            prop_assert_eq!(serde_json::from_str::<Value>(&back).unwrap(), expected.clone());
            expected["runtimes"] = json!({ "guard": { "path": "/g" } });
            prop_assert_eq!(serde_json::from_str::<Value>(&edited).unwrap(), expected);
        }
    }
}
