//! Edits of a daemon's TOML or JSON file. Every other byte stays: comments, order, quotes, line ends and
//! odd formatting belong to the operator.
//!
//! containerd, CRI-O, Podman and Docker each keep their runtimes in a table by name. TOML permits tables
//! in any order, so a new table goes to the end of the text. An edited text that is no longer TOML, as
//! after a table that dotted keys define, is an error.
//!
//! JSON has no comments to lose, but a daemon.json has an order, an indentation and forms of numbers to
//! keep. So members are spliced into the text, as the guard does with specs (docs/decisions/0002). The
//! syntax tree of `jsonc-parser` 0.34 would not do: it rewrites an object on one line over several lines.

use std::ops::Range;

use anyhow::{Result, anyhow, bail};
use bindguard_core::spec::RawObject;
use serde::Serialize;
use serde_json::{Value, json};
use toml_edit::{Document, Item, Key, Table};

/// The place of runtimes in a program's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// True for JSON, false for TOML.
    pub is_json: bool,
    /// The table with the two keys.
    pub section: &'static [&'static str],
    /// The key of the table with the runtimes.
    pub runtimes: &'static str,
    /// The key of the default runtime's name.
    pub default: &'static str,
}

impl Place {
    fn runtime<'n>(&self, name: &'n str) -> Vec<&'n str> {
        [self.section, &[self.runtimes, name]].concat()
    }

    fn default(&self) -> Vec<&'static str> {
        [self.section, &[self.default]].concat()
    }

    /// The value at a path, in JSON's types: those of TOML have no `null` and no number above
    /// `i64::MAX`. An absent value is `null`.
    ///
    /// # Errors
    /// If the text cannot be parsed.
    pub fn value_in(&self, text: &str, path: &[&str]) -> Result<Value> {
        let mut value = Value::Null;
        if !self.is_json {
            parse(text)?;
            value = toml::from_str(text).unwrap_or_default();
        } else if !text.trim().is_empty() {
            value = serde_json::from_str(text).map_err(not_an_object)?;
        }
        for name in path {
            value = value.get_mut(name).map(Value::take).unwrap_or_default();
        }
        Ok(value)
    }

    /// The text with this value at a path.
    ///
    /// # Errors
    /// If the text cannot be edited, or has a value that is no table on the path.
    pub fn with(&self, text: &str, path: &[&str], value: &Value) -> Result<String> {
        match self.is_json {
            true => json_with(text, path, value),
            false => with_value(text, path, &toml::Value::try_from(value)?.to_string()),
        }
    }

    pub fn without(&self, text: &str, path: &[&str]) -> Result<String> {
        match self.is_json {
            true => json_without(text, path),
            false => without_value(text, path),
        }
    }

    /// The text with the runtime `name`, which replaces an existing runtime `name`.
    ///
    /// # Errors
    /// As [`Place::with`].
    pub fn with_runtime(&self, text: &str, name: &str, runtime: &impl Serialize) -> Result<String> {
        let mut runtime = json!(runtime);
        if self.runtime_in(text, name)? == runtime {
            return Ok(text.to_owned());
        }
        let path = self.runtime(name);
        if self.is_json {
            return json_with(text, &path, &runtime);
        }
        let text = without_value(text, &path)?;
        let document = parse(&text)?;
        let (_, above) = deepest(&document, &path)?;
        if !runtime.is_object() || above.is_value() {
            return self.with(&text, &path, &runtime);
        }
        for name in path.into_iter().rev() {
            runtime = json!({ name: runtime });
        }
        appended(&text, &toml::to_string(&toml::Value::try_from(runtime)?)?)
    }

    /// The text with `name` as the default runtime.
    pub fn with_default(&self, text: &str, name: &str) -> Result<String> {
        self.with(text, &self.default(), &Value::from(name))
    }

    /// The default runtime that the text names.
    pub fn default_in(&self, text: &str) -> Result<Option<String>> {
        let named = self.value_in(text, &self.default())?;
        Ok(named.as_str().map(str::to_owned))
    }

    /// The runtime `name` of the text, as an array or a table without its members that are `null`.
    pub fn runtime_in(&self, text: &str, name: &str) -> Result<Value> {
        let mut runtime = self.value_in(text, &self.runtime(name))?;
        if let Value::Object(members) = &mut runtime {
            members.retain(|_, member| !member.is_null());
        }
        Ok(runtime)
    }

    /// The text without a default runtime.
    pub fn without_default(&self, text: &str) -> Result<String> {
        self.without(text, &self.default())
    }

    /// The text without the runtime `name`. A default that names it is restored from `original`, or
    /// removed.
    pub fn without_runtime(&self, text: &str, name: &str, original: &str) -> Result<String> {
        let mut edited = self.without(text, &self.runtime(name))?;
        if self.is_json && edited != text {
            let runtimes = &[self.runtimes];
            let left = self.value_in(&edited, runtimes)?;
            if left == json!({}) && self.value_in(original, runtimes)?.is_null() {
                edited = json_without(&edited, runtimes)?;
            }
        }
        self.with_former_default(&edited, name, original)
    }

    /// The text without `name` as its default: the default of `original` is restored, or none.
    pub fn with_former_default(&self, text: &str, name: &str, original: &str) -> Result<String> {
        if self.default_in(text)?.as_deref() != Some(name) {
            return Ok(text.to_owned());
        }
        if let Some(former) = self.default_in(original)?.filter(|former| former != name) {
            return self.with_default(text, &former);
        }
        let mut text = self.without_default(text)?;
        if self.is_json {
            return Ok(text);
        }
        // the header came with the default, if nothing else is below it
        let header = header_of(&text, &parse(&text)?, self.section);
        if let Some(header) = header
            && header_of(original, &parse(original)?, self.section).is_none()
        {
            let after = text[header.end..].trim_start();
            if after.is_empty() || after.starts_with('[') {
                text.replace_range(header, "");
            }
        }
        Ok(text)
    }
}

/// Reads a text as TOML that can be edited.
///
/// # Errors
/// If the text is not TOML, with the line.
pub fn parse(text: &str) -> Result<Document<&str>> {
    Document::parse(text).map_err(|error| {
        let before = &text.as_bytes()[..error.span().map_or(0, |span| span.start)];
        let line = 1 + before.iter().filter(|byte| **byte == b'\n').count();
        let what = error.message().replace('\n', ", ");
        anyhow!("line {line} is not TOML: {what}")
    })
}

/// The item at a path.
pub fn find<'d>(document: &'d Document<&str>, path: &[&str]) -> Option<&'d Item> {
    let mut item = document.as_item();
    for name in path {
        item = item.as_table_like()?.get(name)?;
    }
    Some(item)
}

/// The number of the path's names that exist as tables, the last name aside, and the deepest table.
fn deepest<'d>(document: &'d Document<&str>, path: &[&str]) -> Result<(usize, &'d Item)> {
    let mut item = document.as_item();
    for (depth, name) in path[..path.len() - 1].iter().enumerate() {
        let Some(inner) = item.as_table_like().and_then(|table| table.get(name)) else {
            return Ok((depth, item));
        };
        if !inner.is_table_like() {
            bail!("{} is not a table", path[..=depth].join("."));
        }
        item = inner;
    }
    Ok((path.len() - 1, item))
}

/// The text with `literal` as the value of the key at `path`.
///
/// # Errors
/// As [`Place::with_runtime`].
pub fn with_value(text: &str, path: &[&str], literal: &str) -> Result<String> {
    let document = parse(text)?;
    if let Some(place) = find(&document, path).and_then(Item::span) {
        return Ok(spliced(text, place, literal));
    }
    let (depth, above) = deepest(&document, path)?;
    if let Some(inline) = above.as_inline_table() {
        let mut value = literal.to_owned();
        for name in path[depth + 1..].iter().rev() {
            value = format!("{{ {} = {value} }}", spelled(&[name]));
        }
        let member = format!("{} = {value}", spelled(&path[depth..=depth]));
        let ends = inline.iter().filter_map(|(_, value)| value.span());
        return Ok(match ends.map(|span| span.end).max() {
            Some(end) => spliced(text, end..end, &format!(", {member}")),
            None => {
                let start = inline.span().unwrap_or_default().start + 1;
                spliced(text, start..start, &format!(" {member} "))
            }
        });
    }
    // behind the last key before the first header
    let mut root = line_start(text, 0);
    for (_, item) in document.iter() {
        if let Some(span) = item.span().filter(|_| item.is_value()) {
            root = root.max(line_end(text, span.end));
        }
    }
    let (parent, name) = path.split_at(path.len() - 1);
    let line = format!("{} = {literal}\n", spelled(name));
    if parent.is_empty() {
        return Ok(with_line(text, root, &line));
    }
    if let Some(header) = header_of(text, &document, parent) {
        return Ok(with_line(text, header.end, &line));
    }
    let added = appended(text, &format!("[{}]\n{line}", spelled(parent)));
    if added.is_err() {
        // dotted keys before the first header define the table
        let dotted = with_line(text, root, &format!("{} = {literal}\n", spelled(path)));
        if parse(&dotted).is_ok() {
            return Ok(dotted);
        }
    }
    added
}

fn with_line(text: &str, at: usize, line: &str) -> String {
    let is_cut = at > line_start(text, 0) && !text[..at].ends_with('\n');
    let cut = if is_cut { "\n" } else { "" };
    spliced(text, at..at, &with_eol(text, &format!("{cut}{line}")))
}

/// The text without the key or table at `path`, in whatever form the text has it.
///
/// # Errors
/// If the text is not TOML.
pub fn without_value(text: &str, path: &[&str]) -> Result<String> {
    let document = parse(text)?;
    let (Some(item), Some((name, parent))) = (find(&document, path), path.split_last()) else {
        return Ok(text.to_owned());
    };
    let above = find(&document, parent);
    if let Some(inline) = above.and_then(Item::as_inline_table) {
        let mut places: Vec<Range<usize>> = Vec::new();
        let mut own = 0;
        for (other, value) in inline {
            let key = inline.key(other).and_then(Key::span).unwrap_or_default();
            if other == *name {
                own = key.start;
            }
            places.push(key.start..value.span().unwrap_or_default().end);
        }
        places.sort_by_key(|place| place.start);
        let at = places.iter().position(|place| place.start == own);
        let whole = inline.span().unwrap_or_default();
        let inside = whole.start + 1..whole.end - 1;
        let place = with_comma(&places, at.unwrap_or_default(), inside);
        return Ok(spliced(text, place, ""));
    }
    let above = above.and_then(Item::as_table);
    let mut lines = Vec::new();
    add_lines(text, above.and_then(|it| it.key(name)), item, &mut lines);
    lines.sort_by_key(|line| line.start);
    let mut text = text.to_owned();
    for line in lines.into_iter().rev() {
        text.replace_range(line, "");
    }
    Ok(text)
}

/// The lines of a key, or those of a table's headers and keys.
fn add_lines(text: &str, key: Option<&Key>, item: &Item, lines: &mut Vec<Range<usize>>) {
    match item {
        Item::Table(table) => {
            lines.extend(header_lines(text, table));
            for (name, inner) in table {
                add_lines(text, table.key(name), inner, lines);
            }
        }
        Item::ArrayOfTables(tables) => {
            for table in tables {
                add_lines(text, None, &Item::Table(table.clone()), lines);
            }
        }
        Item::Value(_) | Item::None => {
            if let (Some(key), Some(value)) = (key.and_then(Key::span), item.span()) {
                lines.push(line_start(text, key.start)..line_end(text, value.end));
            }
        }
    }
}

/// The line of a table's header with the empty line above it; `None` without a header: the parser
/// gives the span of a key then.
fn header_lines(text: &str, table: &Table) -> Option<Range<usize>> {
    let span = table
        .span()
        .filter(|span| text[span.start..].starts_with('['))?;
    let mut start = line_start(text, span.start);
    let empty = with_eol(text, "\n\n");
    if text[..start].ends_with(&empty) {
        start -= empty.len() / 2;
    }
    Some(start..line_end(text, span.end))
}

fn header_of(text: &str, document: &Document<&str>, path: &[&str]) -> Option<Range<usize>> {
    header_lines(text, find(document, path)?.as_table()?)
}

/// The text with a block at its end, an empty line before it.
fn appended(text: &str, block: &str) -> Result<String> {
    let is_empty = text.trim_start_matches('\u{feff}').is_empty();
    let block_below = format!("{}{block}", if is_empty { "" } else { "\n" });
    let edited = with_line(text, text.len(), &block_below);
    if let Err(error) = parse(&edited) {
        let header = block.lines().next().unwrap_or_default();
        bail!("nothing can be added to {header}: {error}");
    }
    Ok(edited)
}

/// A dotted key, with quotes where they are necessary.
fn spelled(path: &[&str]) -> String {
    let mut names = Vec::new();
    for name in path {
        names.push(Key::new(*name).display_repr().into_owned());
    }
    names.join(".")
}

fn spliced(text: &str, place: Range<usize>, new: &str) -> String {
    format!("{}{new}{}", &text[..place.start], &text[place.end..])
}

/// Lines with the line end of a text's first line.
fn with_eol(text: &str, lines: &str) -> String {
    match text.split_once('\n') {
        Some((first, _)) if first.ends_with('\r') => lines.replace('\n', "\r\n"),
        _ => lines.to_owned(),
    }
}

/// The begin of the line of a place, without a byte order mark.
fn line_start(text: &str, at: usize) -> usize {
    let start = text[..at].rfind('\n').map_or(0, |newline| newline + 1);
    let is_marked = text[start..].starts_with('\u{feff}');
    start + if is_marked { '\u{feff}'.len_utf8() } else { 0 }
}

/// The end of the line of a place, after its line end.
fn line_end(text: &str, at: usize) -> usize {
    let newline = text[at..].find('\n');
    newline.map_or(text.len(), |newline| at + newline + 1)
}

fn not_an_object(error: serde_json::Error) -> anyhow::Error {
    anyhow!("it is not a JSON object: {error}")
}

struct Member {
    name: String,
    /// From the opening quote of its key to the end of its value.
    place: Range<usize>,
    value: Range<usize>,
}

/// The deepest object along `path`: the number of names that lead to the object, the place between its
/// braces, and its members. At least the last name is left.
fn deepest_object(text: &str, path: &[&str]) -> Result<(usize, Range<usize>, Vec<Member>)> {
    let mut depth = 0;
    let mut range = text.len() - text.trim_start().len()..text.trim_end().len();
    loop {
        let object: RawObject<'_> =
            serde_json::from_str(&text[range.clone()]).map_err(|error| match depth {
                0 => not_an_object(error),
                _ => anyhow!("{:?} in it is not an object", path[depth - 1]),
            })?;
        let mut members: Vec<Member> = Vec::new();
        let mut end = range.start + 1;
        for (name, raw) in object.entries() {
            let start = raw.get().as_ptr().addr() - text.as_ptr().addr();
            let key = end + text[end..start].find('"').unwrap_or(0);
            end = start + raw.get().len();
            members.push(Member {
                name: name.to_owned(),
                place: key..end,
                value: start..end,
            });
        }
        let inside = range.start + 1..range.end - 1;
        // the last member of a name is the effective one
        match members.iter().rfind(|member| member.name == path[depth]) {
            Some(member) if depth + 1 < path.len() => range = member.value.clone(),
            _ => return Ok((depth, inside, members)),
        }
        depth += 1;
    }
}

/// The JSON text with `value` as the member at `path`. Missing objects on the way are created.
fn json_with(text: &str, path: &[&str], value: &Value) -> Result<String> {
    let text = if text.trim().is_empty() { "{}\n" } else { text };
    let (depth, inside, members) = deepest_object(text, path)?;
    if let Some(member) = members.iter().rfind(|member| member.name == path[depth]) {
        return Ok(spliced(text, member.value.clone(), &value.to_string()));
    }
    let mut value = value.clone();
    for name in path[depth + 1..].iter().rev() {
        value = json!({ *name: value });
    }
    // formatted like the neighbours, each line behind an indentation that begins with the newline
    let key = Value::from(path[depth]);
    let pretty = |indent: &str| format!("{value:#}").replace('\n', indent);
    let Some(last) = members.last() else {
        let outer = format!("\n{}", "  ".repeat(depth));
        let indent = format!("{outer}  ");
        let member = format!("{indent}{key}: {}{outer}", pretty(&indent));
        return Ok(spliced(text, inside, &member));
    };
    let mut member = format!(", {key}: {value}");
    // the text between the end of a line and the last key
    if let Some(line) = text[..last.place.start].rfind('\n') {
        let indent = &text[line..last.place.start];
        if indent.trim().is_empty() {
            member = format!(",{indent}{key}: {}", pretty(indent));
        }
    }
    let end = last.place.end;
    Ok(spliced(text, end..end, &member))
}

/// The JSON text without the member at `path`, if it has one.
fn json_without(text: &str, path: &[&str]) -> Result<String> {
    // dockerd starts with an empty file
    if text.trim().is_empty() {
        return Ok(text.to_owned());
    }
    let (depth, inside, members) = deepest_object(text, path)?;
    let at = members.iter().position(|member| member.name == path[depth]);
    let Some(at) = at.filter(|_| depth + 1 == path.len()) else {
        return Ok(text.to_owned());
    };
    let places: Vec<_> = members.into_iter().map(|member| member.place).collect();
    Ok(spliced(text, with_comma(&places, at, inside), ""))
}

/// The place of one of some members, with the comma that is no longer needed: from the end of the member
/// before or, for the first member, up to the beginning of the next.
fn with_comma(members: &[Range<usize>], at: usize, inside: Range<usize>) -> Range<usize> {
    match (at, members.get(at + 1)) {
        (0, None) => inside,
        (0, Some(next)) => members[0].start..next.start,
        _ => members[at - 1].end..members[at].end,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MINE: &str = "# my node\nversion = 2 # two\n\n[plugins]\n  [plugins.\"cri\".containerd]\n    default = \"runc\"   # the usual\n\n    [plugins.\"cri\".containerd.runtimes.runc]\n      type = \"runc.v2\" # keep\n      [plugins.\"cri\".containerd.runtimes.runc.options]\n        SystemdCgroup = true\n\n  # an end\n  [plugins.\"other\"]\n    x = [ 1,2 ]\n# the last word\n";

    const PLACE: Place = Place {
        is_json: false,
        section: &["plugins", "cri", "containerd"],
        runtimes: "runtimes",
        default: "default",
    };

    fn runtime() -> Value {
        let text = "type = \"runc.v2\"\noptions = { SystemdCgroup = true }\n";
        toml::from_str(text).unwrap()
    }

    #[test]
    fn a_runtime_goes_to_the_end() {
        let edited = PLACE.with_runtime(MINE, "guard", &runtime()).unwrap();
        let added = "\n[plugins.cri.containerd.runtimes.guard]\ntype = \"runc.v2\"\n\n[plugins.cri.containerd.runtimes.guard.options]\nSystemdCgroup = true\n";
        assert_eq!(edited, format!("{MINE}{added}"));
        assert_eq!(
            PLACE.with_runtime(&edited, "guard", &runtime()).unwrap(),
            edited,
            "a second time nothing changes"
        );
    }

    /// Files of nodes, of which hooks/fuzz/seeds/README.md has the origin.
    #[test]
    fn a_runtime_is_added_to_files_that_people_have() {
        let [aks, stargz] = [
            include_str!("../../../../hooks/fuzz/seeds/containerd/v2-with-v3-sections.toml"),
            include_str!("../../../../hooks/fuzz/seeds/containerd/v2-snapshotter-only.toml"),
        ];
        const V2: &str = "io.containerd.grpc.v1.cri";
        const V3: &str = "io.containerd.cri.v1.runtime";
        const SECTIONS: [&[&str]; 2] = [
            &["plugins", V3, "containerd"],
            &["plugins", V2, "containerd"],
        ];
        for (text, section) in [aks, stargz].into_iter().zip(SECTIONS) {
            let place = Place {
                section,
                default: "default_runtime_name",
                ..PLACE
            };
            let edited = place.with_runtime(text, "guard", &runtime()).unwrap();
            let table = format!("plugins.\"{}\".containerd.runtimes.guard", section[1]);
            let added = [
                format!("\n[{table}]\ntype = \"runc.v2\"\n"),
                format!("\n[{table}.options]\nSystemdCgroup = true\n"),
            ];
            assert_eq!(edited, format!("{text}{}", added.concat()));
            let undone = place.without_runtime(&edited, "guard", text).unwrap();
            assert_eq!(undone, text);
        }
    }

    #[test]
    fn the_default_keeps_its_comment() {
        let edited = PLACE.with_default(MINE, "guard").unwrap();
        assert_eq!(
            edited,
            MINE.replace("\"runc\"   # the usual", "\"guard\"   # the usual")
        );
        assert_eq!(PLACE.without_runtime(&edited, "guard", MINE).unwrap(), MINE);
    }

    /// Issue 16: removing from a file that has no such table added empty tables.
    #[test]
    fn removing_a_runtime_that_is_absent_changes_nothing() {
        for text in [
            "version = 2\n",
            "version = 2\n\n[debug]\n  level = \"warn\"\n",
            MINE,
        ] {
            assert_eq!(PLACE.without_runtime(text, "guard", text).unwrap(), text);
        }
    }

    #[test]
    fn the_header_of_a_default_goes_with_it() {
        let runc = "version = 2\n[plugins.cri.containerd.runtimes.runc]\n  type = \"x\"\n";
        let edited = PLACE.with_default(runc, "guard").unwrap();
        assert!(edited.contains("[plugins.cri.containerd]\n"), "{edited}");
        assert_eq!(PLACE.without_runtime(&edited, "guard", runc).unwrap(), runc);
        let commented = edited.replace(
            "[plugins.cri.containerd]\n",
            "# mine\n[plugins.cri.containerd]\n",
        );
        assert!(
            PLACE
                .without_runtime(&commented, "guard", runc)
                .unwrap()
                .contains("# mine\n")
        );
    }

    #[test]
    fn what_was_put_in_is_taken_out_again() {
        for text in [
            MINE,
            "",
            "version = 2\n",
            "plugins = { cri = { containerd = { runtimes = { runc = {} } } } }\n",
            "plugins.cri.containerd.runtimes.runc.type = \"x\"\n",
            "[plugins.cri.containerd]\n",
            "a = 1",
        ] {
            let edited = PLACE
                .with_default(
                    &PLACE.with_runtime(text, "guard", &runtime()).unwrap(),
                    "guard",
                )
                .unwrap();
            assert!(
                !PLACE.runtime_in(&edited, "guard").unwrap().is_null(),
                "{edited}"
            );
            assert_eq!(
                PLACE.with_runtime(&edited, "guard", &runtime()).unwrap(),
                edited
            );
            let back = PLACE.without_runtime(&edited, "guard", text).unwrap();
            let (back, before): (toml::Table, toml::Table) = (
                toml::from_str(&back).unwrap(),
                toml::from_str(text).unwrap(),
            );
            assert_eq!(without_empty(back), without_empty(before), "{edited}");
        }
    }

    #[test]
    fn what_is_no_such_file_is_told_with_its_line() {
        let told = |text| {
            PLACE
                .with_runtime(text, "guard", &runtime())
                .unwrap_err()
                .to_string()
        };
        assert!(
            told("a = 1\n{{ template . }}\n").starts_with("line 2 is not TOML"),
            "{}",
            told("a = 1\n{{ template . }}\n")
        );
        assert_eq!(told("[plugins]\ncri = 7\n"), "plugins.cri is not a table");
    }

    /// These files were refused. The Amazon AMI for containerd 2 mixes the quotes.
    #[test]
    fn every_other_byte_stays_whatever_its_style() {
        let mixed = "\u{feff}version = 2\r\n[plugins.'cri'.containerd ]\r\n\tx = 'a'\r\n[ plugins.\"cri\".containerd.runtimes . runc ]\r\n\ttype=\"x\"\r\n[plugins.\"cri\".cni]\r\nbin = 'b' # end";
        for text in [
            mixed,
            &mixed.replace('\r', ""),
            &format!("{mixed}\r\n"),
            &mixed.replace("[plugins.\"cri\".cni]", "#"),
        ] {
            let edited = PLACE
                .with_default(
                    &PLACE.with_runtime(text, "guard", &runtime()).unwrap(),
                    "guard",
                )
                .unwrap();
            let mut rest = edited.as_str();
            for line in text.split_inclusive('\n') {
                let at = rest
                    .find(line)
                    .unwrap_or_else(|| panic!("{line:?} is gone from {edited:?}"));
                rest = &rest[at + line.len()..];
            }
            let bare = edited.replace("\r\n", "");
            assert!(
                !text.contains('\r') || !bare.contains('\n'),
                "mixed line ends: {edited:?}"
            );
            assert_eq!(
                PLACE
                    .without_runtime(&edited, "guard", text)
                    .unwrap()
                    .trim_end(),
                text.trim_end(),
                "from {edited:?}"
            );
        }
    }

    /// Tables that were created on the way may stay, empty.
    fn without_empty(table: toml::Table) -> toml::Table {
        let kept = table.into_iter().map(|(key, value)| match value {
            toml::Value::Table(inner) => (key, toml::Value::Table(without_empty(inner))),
            other => (key, other),
        });
        kept.filter(|(_, value)| value.as_table().is_none_or(|table| !table.is_empty()))
            .collect()
    }

    proptest! {
        /// Every other line of the file is still there afterwards, in order.
        #[test]
        fn every_other_line_stays(lines in proptest::collection::vec("[a-z]{1,4}(-[a-z]{1,3})? = [1-9][0-9]{0,2}( # [ -~]{0,12})?|# [ -~]{0,20}|", 0..12)) {
            let mut seen = std::collections::BTreeSet::new();
            let fresh = |line: &&String| line.is_empty() || line.starts_with('#') || seen.insert(line.split(' ').next().map(str::to_owned));
            let text: String = lines.iter().filter(fresh).map(|line| format!("{line}\n")).collect();
            let edited = PLACE.with_runtime(&text, "guard", &runtime()).unwrap();
            let mut rest = edited.lines();
            for line in text.lines() {
                prop_assert!(rest.any(|other| other == line), "{line:?} is gone from {edited}");
            }
        }
    }

    const PATH: [&str; 2] = ["runtimes", "guard"];
    const OF_JSON: Place = Place {
        is_json: true,
        section: &[],
        ..PLACE
    };

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
            assert_eq!(json_with(before, &PATH, &value).unwrap(), after);
        }
    }

    #[test]
    fn what_is_no_such_file_is_refused() {
        for text in ["[]", "{", "{\"runtimes\": 3}", "version = 2"] {
            assert!(json_with(text, &PATH, &json!(1)).is_err(), "{text}");
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
            assert_eq!(json_without(before, &["k"]).unwrap(), after);
        }
    }

    proptest! {
        /// With any members: adding and removing the runtime keeps the file's meaning.
        #[test]
        fn nothing_else_changes(members in proptest::collection::btree_map("[a-z\"\\\\ ]{1,5}", 0..9_u32, 0..6), space in "[ \n\t]{0,3}", at_end in any::<bool>()) {
            let body: Vec<String> = members.iter().map(|(name, n)| format!("{space}{}{space}:{space}{{\"n\":{n}.0}}", Value::from(name.as_str()))).collect();
            let text = format!("{{{}{}}}", body.join(","), if at_end { "\n" } else { "" });
            let edited = json_with(&text, &PATH, &json!({ "path": "/g" })).unwrap();
            let mut expected: Value = serde_json::from_str(&text).unwrap();
            prop_assert_eq!(OF_JSON.value_in(&edited, &PATH).unwrap(), json!({ "path": "/g" }));
            let back = json_without(&edited, &["runtimes"]).unwrap();
            prop_assert_eq!(serde_json::from_str::<Value>(&back).unwrap(), expected.clone());
            expected["runtimes"] = json!({ "guard": { "path": "/g" } });
            prop_assert_eq!(serde_json::from_str::<Value>(&edited).unwrap(), expected);
        }
    }
}
