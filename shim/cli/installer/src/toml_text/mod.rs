//! Inserts a runtime into a daemon's TOML file, or removes the runtime; every other byte is
//! unchanged.
//!
//! containerd, CRI-O and Podman each keep their runtimes in a table by name. A [`Place`] has the
//! path of the table and of the default runtime's name. Comments, order, quotes, line ends and odd
//! formatting are the operator's and stay: an edit splices text at the places that the parser gives
//! ([`layout`]), and never prints the document.

mod layout;

use std::ops::Range;

use toml_edit::{Document, InlineTable, Item, Key, Table, Value};

use self::layout::{Section, TextLayout};

/// The place of runtimes in a program's TOML.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    runtimes: Vec<String>,
    default: Vec<String>,
}

/// Why a text was not edited.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum NotEdited {
    /// Not TOML.
    #[error("line {line} is not TOML: {what}")]
    Foreign {
        /// Counted from 1.
        line: usize,
        /// The parser's message.
        what: String,
    },
    /// A value that is not a table, where a table is required.
    #[error("{0} is not a table")]
    Occupied(String),
}

/// Bytes to replace by a text.
type Splice = (Range<usize>, String);

impl Place {
    /// A place by the names of its two keys: the table with the runtimes, and the key that names
    /// the default.
    pub fn new(runtimes: &[&str], default: &[&str]) -> Self {
        Self {
            runtimes: owned(runtimes),
            default: owned(default),
        }
    }

    /// The table that has the runtimes.
    pub fn section(&self) -> &[String] {
        &self.runtimes[..self.runtimes.len() - 1]
    }

    /// The text with the runtime `name`, which replaces an existing runtime `name`.
    ///
    /// # Errors
    /// If the text cannot be edited, or has a value that is no table on the path to the runtimes.
    pub fn with_runtime(
        &self,
        text: &str,
        name: &str,
        runtime: &Item,
    ) -> Result<String, NotEdited> {
        let document = parse(text)?;
        let layout = TextLayout::of(&document);
        if layout
            .find(&member(&self.runtimes, name))
            .is_some_and(|present| same(present, runtime))
        {
            return Ok(text.to_owned());
        }
        let path = member(&self.runtimes, name);
        let text = spliced(text, removal(&layout, &path));
        let document = parse(&text)?;
        let layout = TextLayout::of(&document);
        let is_inline = inline_on(&layout, &self.runtimes)?.is_some();
        let splice = match runtime.clone() {
            Item::Table(table) if is_inline => {
                assignment(&layout, &path, &table.into_inline_table().to_string())?
            }
            Item::Table(table) => insertion_of_table(&layout, &self.runtimes, name, &table),
            other => assignment(&layout, &path, other.to_string().trim())?,
        };
        Ok(spliced(&text, vec![splice]))
    }

    /// The text with `name` as the default runtime.
    ///
    /// # Errors
    /// As [`Place::with_runtime`].
    pub fn with_default(&self, text: &str, name: &str) -> Result<String, NotEdited> {
        let document = parse(text)?;
        let layout = TextLayout::of(&document);
        let present = layout.find(&self.default).and_then(Item::span);
        let is_literal = present.is_some_and(|place| text[place].starts_with('\''));
        let value = match is_literal && !name.contains(['\'', '\n']) {
            true => format!("'{name}'"),
            false => Value::from(name).to_string(),
        };
        Ok(spliced(
            text,
            vec![assignment(&layout, &self.default, &value)?],
        ))
    }

    /// The default runtime that the text names.
    ///
    /// # Errors
    /// If the text is not TOML.
    pub fn default_in(&self, text: &str) -> Result<Option<String>, NotEdited> {
        let document = parse(text)?;
        let layout = TextLayout::of(&document);
        let named = layout.find(&self.default).and_then(Item::as_str);
        Ok(named.map(str::to_owned))
    }

    /// The runtime `name` of the text, as an array or a table.
    ///
    /// # Errors
    /// If the text is not TOML.
    pub fn runtime_in(&self, text: &str, name: &str) -> Result<Option<toml::Value>, NotEdited> {
        let document = parse(text)?;
        let layout = TextLayout::of(&document);
        let item = layout.find(&member(&self.runtimes, name));
        Ok(item.and_then(content))
    }

    /// The text without a default runtime.
    ///
    /// # Errors
    /// As [`Place::with_runtime`].
    pub fn without_default(&self, text: &str) -> Result<String, NotEdited> {
        let document = parse(text)?;
        let layout = TextLayout::of(&document);
        Ok(spliced(text, removal(&layout, &self.default)))
    }

    /// The text without the runtime `name`. A default that names it is restored from `original`, or
    /// removed.
    ///
    /// # Errors
    /// If a text cannot be edited.
    pub fn without_runtime(
        &self,
        text: &str,
        name: &str,
        original: &str,
    ) -> Result<String, NotEdited> {
        let document = parse(text)?;
        let layout = TextLayout::of(&document);
        let names_it = layout.find(&self.default).and_then(Item::as_str) == Some(name);
        let text = spliced(text, removal(&layout, &member(&self.runtimes, name)));
        if !names_it {
            return Ok(text);
        }
        let original = parse(original)?;
        let original = TextLayout::of(&original);
        let former = original.find(&self.default).and_then(Item::as_str);
        if let Some(former) = former.filter(|former| *former != name) {
            return self.with_default(&text, former);
        }
        let document = parse(&text)?;
        let layout = TextLayout::of(&document);
        Ok(spliced(
            &text,
            removal_of_key(&layout, &self.default, &original),
        ))
    }
}

/// The text with `literal` as the value of the key at `path`.
///
/// # Errors
/// As [`Place::with_runtime`].
pub fn with_value(text: &str, path: &[&str], literal: &str) -> Result<String, NotEdited> {
    let document = parse(text)?;
    let splice = assignment(&TextLayout::of(&document), &owned(path), literal)?;
    Ok(spliced(text, vec![splice]))
}

/// The text without the key at `path`.
///
/// # Errors
/// If the text is not TOML.
pub fn without_value(text: &str, path: &[&str]) -> Result<String, NotEdited> {
    let document = parse(text)?;
    let layout = TextLayout::of(&document);
    Ok(spliced(text, removal(&layout, &owned(path))))
}

/// Reads a text as TOML that can be edited.
///
/// # Errors
/// If the text is not TOML, with the line.
pub fn parse(text: &str) -> Result<Document<&str>, NotEdited> {
    Document::parse(text).map_err(|error| NotEdited::Foreign {
        line: 1 + error.span().map_or(0, |span| {
            text.bytes()
                .take(span.start)
                .filter(|byte| *byte == b'\n')
                .count()
        }),
        what: error.message().replace('\n', ", "),
    })
}

fn owned(path: &[&str]) -> Vec<String> {
    path.iter().map(|part| (*part).to_owned()).collect()
}

fn member(path: &[String], name: &str) -> Vec<String> {
    path.iter().cloned().chain([name.to_owned()]).collect()
}

/// Applies splices that do not overlap, in any order.
fn spliced(text: &str, mut splices: Vec<Splice>) -> String {
    splices.sort_by_key(|(place, _)| std::cmp::Reverse(place.start));
    let mut text = text.to_owned();
    for (place, new) in splices {
        text.replace_range(place, &new);
    }
    text
}

/// True if a table of a text has this content, however it is formatted.
fn same(present: &Item, wanted: &Item) -> bool {
    content(present).is_some_and(|present| Some(present) == content(wanted))
}

/// The content of an item, without the comments and styles of its text.
fn content(item: &Item) -> Option<toml::Value> {
    match item.as_table_like() {
        Some(table) => {
            let members = table
                .iter()
                .map(|(name, item)| Some((name.to_owned(), content(item)?)));
            members
                .collect::<Option<toml::Table>>()
                .map(toml::Value::Table)
        }
        None => item
            .as_value()?
            .clone()
            .decorated("", "")
            .to_string()
            .parse()
            .ok(),
    }
}

/// The splice that adds a table to the table at `path`, which is not inline.
fn insertion_of_table(
    layout: &TextLayout<'_>,
    path: &[String],
    name: &str,
    table: &Table,
) -> Splice {
    let below: Vec<&Section> = sections_below(layout, path);
    let neighbour = below
        .iter()
        .rfind(|section| section.path.len() == path.len() + 1)
        .copied();
    let ancestor = ancestor_of(layout, path);
    let (header, keys) = match neighbour {
        Some(neighbour) => (
            layout.indent_at(neighbour.start),
            layout.indent_of_keys(neighbour),
        ),
        None => ("", ""),
    };
    let spelled = match below.last() {
        Some(section) => section.spelled[..path.len()].to_vec(),
        None => spelled_below(ancestor, path),
    };
    let mut block = String::new();
    let lines = Lines {
        header,
        keys,
        eol: layout.eol,
    };
    lines.write(
        &mut block,
        &[spelled, vec![spelled_name(name)]].concat(),
        table,
    );
    let end = match below.last() {
        Some(section) => section.end,
        None => end_of(layout, &ancestor.path),
    };
    insertion_of_lines(layout, end, &block)
}

/// The lines of a new table.
struct Lines<'l> {
    header: &'l str,
    keys: &'l str,
    eol: &'static str,
}

impl Lines<'_> {
    /// Writes a table and those in it, with an empty line before each.
    fn write(&self, out: &mut String, spelled: &[String], table: &Table) {
        let Self { header, keys, eol } = self;
        out.push_str(&format!("{eol}{header}[{}]{eol}", spelled.join(".")));
        for (name, item) in table.iter().filter(|(_, item)| item.is_value()) {
            out.push_str(&format!(
                "{keys}{} = {}{eol}",
                spelled_name(name),
                item.to_string().trim()
            ));
        }
        for (name, item) in table {
            if let Item::Table(inner) = item {
                self.write(out, &[spelled, &[spelled_name(name)]].concat(), inner);
            }
        }
    }
}

/// Lines after `end`, which is the end of a line or of a text whose last line does not end.
fn insertion_of_lines(layout: &TextLayout<'_>, end: usize, block: &str) -> Splice {
    let before = &layout.text[..end];
    let is_empty = before.trim_start_matches('\u{feff}').is_empty();
    let block = if is_empty {
        block.strip_prefix(layout.eol).unwrap_or(block).to_owned()
    } else {
        block.to_owned()
    };
    if is_empty || before.ends_with('\n') {
        return (end..end, block);
    }
    let block = block.strip_suffix(layout.eol).unwrap_or(&block);
    (end..end, format!("{}{block}", layout.eol))
}

/// The splices that remove a table, in whatever form the text has it, or a key.
fn removal(layout: &TextLayout<'_>, path: &[String]) -> Vec<Splice> {
    let Some(item) = layout.find(path) else {
        return Vec::new();
    };
    if let Some((parent, name)) = path.split_last().map(|(name, parent)| (parent, name))
        && let Some(Item::Value(Value::InlineTable(inline))) = layout.find(parent)
    {
        return removal_from_inline(inline, name, item)
            .into_iter()
            .collect();
    }
    let sections = sections_below(layout, path);
    let in_section = |start: usize| {
        sections
            .iter()
            .any(|section| (section.start..section.end).contains(&start))
    };
    let lines = layout
        .entries
        .iter()
        .filter(|entry| entry.path.starts_with(path) && !in_section(entry.start));
    let mut splices: Vec<Splice> = lines
        .map(|entry| (entry.start..entry.end, String::new()))
        .collect();
    splices.extend(
        lines_of(layout, &sections)
            .into_iter()
            .map(|lines| (lines, String::new())),
    );
    splices
}

/// The lines of sections, each with the empty line before it.
fn lines_of(layout: &TextLayout<'_>, sections: &[&Section]) -> Vec<Range<usize>> {
    let empty_line = format!("{eol}{eol}", eol = layout.eol);
    let mut all: Vec<Range<usize>> = Vec::new();
    for section in sections {
        let has_empty_line = layout.text[..section.start].ends_with(&empty_line);
        let start = section.start - if has_empty_line { layout.eol.len() } else { 0 };
        match all.last_mut().filter(|last| last.end == start) {
            Some(last) => last.end = section.end,
            None => all.push(start..section.end),
        }
    }
    if let Some(last) = all
        .last_mut()
        .filter(|last| last.start > 0 && !layout.text[..last.end].ends_with('\n'))
    {
        // the line before was the last line, without a line end
        last.start -= layout.eol.len();
    }
    all
}

/// The splice that gives a key a value.
fn assignment(
    layout: &TextLayout<'_>,
    path: &[String],
    literal: &str,
) -> Result<Splice, NotEdited> {
    let Some((key, parent)) = path.split_last() else {
        return Ok((0..0, String::new()));
    };
    if let Some(place) = layout.find(path).and_then(Item::span) {
        return Ok((place, literal.to_owned()));
    }
    if let Some((inline, missing)) = inline_on(layout, parent)? {
        return Ok(match missing.split_first() {
            None => insertion_into_inline(layout, inline, key, literal),
            Some((first, rest)) => {
                let names = rest
                    .iter()
                    .map(|name| spelled_name(name))
                    .chain([spelled_name(key)]);
                let names: Vec<String> = names.collect();
                let value = names.iter().rev().fold(literal.to_owned(), |inner, name| {
                    format!("{{ {name} = {inner} }}")
                });
                insertion_into_inline(layout, inline, first, &value)
            }
        });
    }
    let key = spelled_name(key);
    if let Some(section) = layout
        .sections
        .iter()
        .find(|section| section.path == *parent)
    {
        let line = format!(
            "{}{key} = {literal}{}",
            layout.indent_of_keys(section),
            layout.eol
        );
        return Ok(insertion_of_lines(layout, section.end, &line));
    }
    let dotted = layout
        .entries
        .iter()
        .rfind(|entry| entry.path.starts_with(parent) && !is_in(layout, entry, parent));
    if let Some(entry) = dotted {
        let section = layout
            .sections
            .iter()
            .rfind(|section| section.start <= entry.start);
        let depth = section.map_or(0, |section| section.path.len());
        let names: Vec<String> = parent[depth..]
            .iter()
            .map(|name| spelled_name(name))
            .chain([key])
            .collect();
        let line = format!(
            "{}{} = {literal}{}",
            layout.indent_at(entry.start),
            names.join("."),
            layout.eol
        );
        return Ok(insertion_of_lines(layout, entry.end, &line));
    }
    let below = sections_below(layout, parent);
    let spelled = match below.first() {
        Some(section) => section.spelled[..parent.len()].to_vec(),
        None => spelled_below(ancestor_of(layout, parent), parent),
    };
    let indents = below.first().map_or(("", ""), |section| {
        (
            layout.indent_at(section.start),
            layout.indent_of_keys(section),
        )
    });
    let eol = layout.eol;
    let block = format!(
        "{eol}{}[{}]{eol}{}{key} = {literal}{eol}",
        indents.0,
        spelled.join("."),
        indents.1
    );
    let before_them = below.first().and_then(|first| {
        layout
            .sections
            .iter()
            .rfind(|section| section.start < first.start)
    });
    let end = match before_them {
        Some(section) => section.end,
        None => end_of(layout, &ancestor_of(layout, parent).path),
    };
    Ok(insertion_of_lines(layout, end, &block))
}

/// True if a key is in a section at or below `path`, and not a dotted key of a section above.
fn is_in(layout: &TextLayout<'_>, entry: &layout::EntryText, path: &[String]) -> bool {
    let section = layout
        .sections
        .iter()
        .rfind(|section| section.start <= entry.start);
    section.is_some_and(|section| section.path.starts_with(path))
}

/// The splices that remove a key. They also remove the header above the key if it would be empty
/// and the original lacks it.
fn removal_of_key(
    layout: &TextLayout<'_>,
    path: &[String],
    original: &TextLayout<'_>,
) -> Vec<Splice> {
    let entry = layout.entries.iter().find(|entry| entry.path == path);
    let (Some((_, parent)), Some(entry)) = (path.split_last(), entry) else {
        return removal(layout, path);
    };
    let has_header =
        |layout: &TextLayout<'_>| layout.sections.iter().any(|section| section.path == parent);
    let section = layout
        .sections
        .iter()
        .find(|section| section.path == parent && !parent.is_empty());
    let alone = section.filter(|section| {
        let comment_above = layout.text[..section.start].trim_end_matches(['\n', '\r', ' ', '\t']);
        let last = comment_above
            .rsplit('\n')
            .next()
            .unwrap_or_default()
            .trim_start();
        let has_comment = last.starts_with('#')
            && !layout.text[comment_above.len()..section.start].contains("\n\n");
        !has_header(original)
            && !has_comment
            && section.header_end == entry.start
            && section.end == entry.end
            && !layout.text[section.start..section.header_end].contains('#')
    });
    match alone {
        Some(section) => lines_of(layout, &[section])
            .into_iter()
            .map(|lines| (lines, String::new()))
            .collect(),
        None => removal(layout, path),
    }
}

/// The inline table at `path` or above it, and the names that are missing below that table.
fn inline_on<'l, 't>(
    layout: &'l TextLayout<'t>,
    path: &'l [String],
) -> Result<Option<(&'t InlineTable, &'l [String])>, NotEdited> {
    let mut found = None;
    for depth in 1..=path.len() {
        match layout.find(&path[..depth]) {
            None => break,
            Some(Item::Value(Value::InlineTable(inline))) => found = Some((inline, &path[depth..])),
            Some(item) if !item.is_table_like() => {
                return Err(NotEdited::Occupied(path[..depth].join(".")));
            }
            Some(_) => {}
        }
    }
    Ok(found)
}

/// Appends a member to an inline table.
fn insertion_into_inline(
    layout: &TextLayout<'_>,
    inline: &InlineTable,
    name: &str,
    value: &str,
) -> Splice {
    let member = format!("{} = {value}", spelled_name(name));
    let span = inline.span().unwrap_or_default();
    let last = inline
        .iter()
        .filter_map(|(_, value)| value.span())
        .map(|span| span.end)
        .max();
    match last {
        Some(end) => (end..end, format!(", {member}")),
        None => {
            let empty = &layout.text[span.start + 1..span.end - 1];
            let place = span.start + 1..span.end - 1;
            (
                place,
                if empty.trim().is_empty() {
                    format!(" {member} ")
                } else {
                    format!("{empty}{member} ")
                },
            )
        }
    }
}

/// The removal of a member, with the comma that is no longer needed.
fn removal_from_inline(inline: &InlineTable, name: &str, item: &Item) -> Option<Splice> {
    let (key, value) = (inline.key(name)?.span()?, item.span()?);
    let spans =
        |other: &str| Some(inline.key(other)?.span()?.start..inline.get(other)?.span()?.end);
    let others: Vec<Range<usize>> = inline
        .iter()
        .filter(|(other, _)| *other != name)
        .filter_map(|(other, _)| spans(other))
        .collect();
    let before = others
        .iter()
        .map(|other| other.end)
        .filter(|end| *end <= key.start)
        .max();
    let after = others
        .iter()
        .map(|other| other.start)
        .filter(|start| *start >= value.end)
        .min();
    let whole = inline.span()?;
    Some(match (before, after) {
        (Some(end), _) => (end..value.end, String::new()),
        (None, Some(start)) => (key.start..start, String::new()),
        (None, None) => (whole.start + 1..whole.end - 1, String::new()),
    })
}

fn sections_below<'l>(layout: &'l TextLayout<'_>, path: &[String]) -> Vec<&'l Section> {
    layout
        .sections
        .iter()
        .filter(|section| !section.path.is_empty() && section.path.starts_with(path))
        .collect()
}

/// The deepest section at or above `path`.
fn ancestor_of<'l>(layout: &'l TextLayout<'_>, path: &[String]) -> &'l Section {
    let above = layout
        .sections
        .iter()
        .filter(|section| path.starts_with(&section.path));
    above
        .max_by_key(|section| section.path.len())
        .unwrap_or(&layout.sections[0])
}

/// The end of the last section at or below `path`.
fn end_of(layout: &TextLayout<'_>, path: &[String]) -> usize {
    let last = layout
        .sections
        .iter()
        .rfind(|section| section.path.starts_with(path));
    match last {
        // what follows the last line of a text belongs to no later table
        Some(last)
            if layout
                .sections
                .last()
                .is_some_and(|end| end.start == last.start) =>
        {
            layout.text.len()
        }
        Some(last) => last.end,
        None => layout.text.len(),
    }
}

fn spelled_below(ancestor: &Section, path: &[String]) -> Vec<String> {
    let rest = path[ancestor.path.len()..]
        .iter()
        .map(|name| spelled_name(name));
    ancestor.spelled.iter().cloned().chain(rest).collect()
}

/// Quoted if it has to be.
fn spelled_name(name: &str) -> String {
    Key::new(name).display_repr().into_owned()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use toml_edit::value;

    use super::*;

    const MINE: &str = "# my node\nversion = 2 # two\n\n[plugins]\n  [plugins.\"cri\".containerd]\n    default = \"runc\"   # the usual\n\n    [plugins.\"cri\".containerd.runtimes.runc]\n      type = \"runc.v2\" # keep\n      [plugins.\"cri\".containerd.runtimes.runc.options]\n        SystemdCgroup = true\n\n  # an end\n  [plugins.\"other\"]\n    x = [ 1,2 ]\n# the last word\n";

    fn place() -> Place {
        Place::new(
            &["plugins", "cri", "containerd", "runtimes"],
            &["plugins", "cri", "containerd", "default"],
        )
    }

    fn runtime() -> Item {
        let mut table = Table::new();
        table["type"] = value("runc.v2");
        let mut options = Table::new();
        options["SystemdCgroup"] = value(true);
        table.insert("options", Item::Table(options));
        Item::Table(table)
    }

    #[test]
    fn a_runtime_stands_behind_its_neighbours_and_is_indented_like_them() {
        let edited = place().with_runtime(MINE, "guard", &runtime()).unwrap();
        let added = "\n    [plugins.\"cri\".containerd.runtimes.guard]\n      type = \"runc.v2\"\n\n    [plugins.\"cri\".containerd.runtimes.guard.options]\n      SystemdCgroup = true\n";
        let at = MINE.find("\n  # an end").unwrap();
        assert_eq!(edited, format!("{}{added}{}", &MINE[..at], &MINE[at..]));
        assert_eq!(
            place().with_runtime(&edited, "guard", &runtime()).unwrap(),
            edited,
            "a second time nothing changes"
        );
    }

    /// Files of nodes, of which hooks/fuzz/seeds/README.md has the origin.
    #[test]
    fn a_runtime_is_added_to_files_that_people_have() {
        let [aks, stargz] = [
            include_str!("../../../../../hooks/fuzz/seeds/containerd/v2-with-v3-sections.toml"),
            include_str!("../../../../../hooks/fuzz/seeds/containerd/v2-snapshotter-only.toml"),
        ];
        let place = |plugin: &str| {
            let containerd = |key| ["plugins", plugin, "containerd", key];
            Place::new(&containerd("runtimes"), &containerd("default_runtime_name"))
        };
        let (v2, v3) = ("io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime");
        for (text, plugin, indent) in [(aks, v3, "  "), (stargz, v2, "")] {
            let place = place(plugin);
            let edited = place.with_runtime(text, "guard", &runtime()).unwrap();
            let table = format!("plugins.\"{plugin}\".containerd.runtimes.guard");
            let added = [
                format!("\n{indent}[{table}]\n{indent}{indent}type = \"runc.v2\"\n"),
                format!("\n{indent}[{table}.options]\n{indent}{indent}SystemdCgroup = true\n"),
            ];
            assert_eq!(edited, format!("{text}{}", added.concat()));
            let undone = place.without_runtime(&edited, "guard", text).unwrap();
            assert_eq!(undone, text);
        }
    }

    #[test]
    fn the_default_keeps_its_comment() {
        let edited = place().with_default(MINE, "guard").unwrap();
        assert_eq!(
            edited,
            MINE.replace("\"runc\"   # the usual", "\"guard\"   # the usual")
        );
        assert_eq!(
            place().without_runtime(&edited, "guard", MINE).unwrap(),
            MINE
        );
    }

    /// Issue 16: removing from a file that has no such table added empty tables.
    #[test]
    fn removing_a_runtime_that_is_absent_changes_nothing() {
        for text in [
            "version = 2\n",
            "version = 2\n\n[debug]\n  level = \"warn\"\n",
            MINE,
        ] {
            assert_eq!(place().without_runtime(text, "guard", text).unwrap(), text);
        }
    }

    #[test]
    fn the_header_of_a_default_goes_with_it() {
        let runc = "version = 2\n[plugins.cri.containerd.runtimes.runc]\n  type = \"x\"\n";
        let edited = place().with_default(runc, "guard").unwrap();
        assert!(edited.contains("[plugins.cri.containerd]\n"), "{edited}");
        assert_eq!(
            place().without_runtime(&edited, "guard", runc).unwrap(),
            runc
        );
        let commented = edited.replace(
            "[plugins.cri.containerd]\n",
            "# mine\n[plugins.cri.containerd]\n",
        );
        assert!(
            place()
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
            let place = place();
            let edited = place
                .with_default(
                    &place.with_runtime(text, "guard", &runtime()).unwrap(),
                    "guard",
                )
                .unwrap();
            let document = parse(&edited).unwrap();
            assert!(
                TextLayout::of(&document)
                    .find(&member(&place.runtimes, "guard"))
                    .is_some(),
                "{edited}"
            );
            assert_eq!(
                place.with_runtime(&edited, "guard", &runtime()).unwrap(),
                edited
            );
            let back = place.without_runtime(&edited, "guard", text).unwrap();
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
            place()
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
            let place = place();
            let edited = place
                .with_default(
                    &place.with_runtime(text, "guard", &runtime()).unwrap(),
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
                place.without_runtime(&edited, "guard", text).unwrap(),
                text,
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
            let edited = place().with_runtime(&text, "guard", &runtime()).unwrap();
            let mut rest = edited.lines();
            for line in text.lines() {
                prop_assert!(rest.any(|other| other == line), "{line:?} is gone from {edited}");
            }
        }
    }
}
