//! A runtime in the TOML file of another program: inserts it or removes it, and leaves every other byte unchanged.
//!
//! containerd, CRI-O and Podman each keep their runtimes in a table by name. They differ in the path of that table and of the
//! default's name: that is a [`Place`]. Comments, order and odd formatting are the operator's and stay. A file that the parser
//! cannot reproduce byte for byte is not edited.

use toml_edit::{DocumentMut, InlineTable, Item, Table, TableLike, Value};

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
    /// Bytes outside of the edit would change.
    #[error("its line ends or byte order mark would not survive an edit")]
    Lossy,
}

impl Place {
    /// A place by the names of its two keys: the table with the runtimes, and the key that names the default.
    pub fn new(runtimes: &[&str], default: &[&str]) -> Self {
        let owned = |path: &[&str]| path.iter().map(|part| (*part).to_owned()).collect();
        Self { runtimes: owned(runtimes), default: owned(default) }
    }

    /// The text with the runtime `name`, which replaces an existing one of that name.
    ///
    /// # Errors
    /// If the text cannot be edited, or has a value other than a table on the way to the runtimes.
    pub fn with_runtime(&self, text: &str, name: &str, runtime: Item) -> Result<String, NotEdited> {
        let mut document = parse(text)?;
        let runtimes = table_at(document.as_item_mut(), &self.runtimes)?;
        match runtimes {
            Item::Value(Value::InlineTable(inline)) => {
                inline.insert(name, runtime.into_value().unwrap_or_else(|_| InlineTable::new().into()));
            }
            other => {
                let indents = Indents::of_tables_in(other);
                if let Some(table) = other.as_table_like_mut() {
                    table.insert(name, indents.applied_to(runtime));
                }
            }
        }
        Ok(document.to_string())
    }

    /// The text with `name` as the default runtime.
    ///
    /// # Errors
    /// As [`Place::with_runtime`].
    pub fn with_default(&self, text: &str, name: &str) -> Result<String, NotEdited> {
        let mut document = parse(text)?;
        let Some((key, path)) = self.default.split_last() else { return Ok(text.to_owned()) };
        let item = table_at(document.as_item_mut(), path)?;
        let indent = Indents::of_keys_in(item);
        let Some(table) = item.as_table_like_mut() else { return Err(NotEdited::Occupied(path.join("."))) };
        if let Some(value) = table.get_mut(key).and_then(Item::as_value_mut) {
            let decor = value.decor().clone();
            *value = Value::from(name);
            *value.decor_mut() = decor;
        } else {
            table.insert(key, toml_edit::value(name));
            if let Some(mut key) = table.key_mut(key) {
                key.leaf_decor_mut().set_prefix(indent);
            }
        }
        Ok(document.to_string())
    }

    /// The text without the runtime `name`. A default that names it is restored from `original`, or removed.
    ///
    /// # Errors
    /// If one of the texts cannot be edited.
    pub fn without_runtime(&self, text: &str, name: &str, original: &str) -> Result<String, NotEdited> {
        let (mut document, mut original) = (parse(text)?, parse(original)?);
        if let Some(runtimes) = find_mut(document.as_item_mut(), &self.runtimes).and_then(Item::as_table_like_mut) {
            runtimes.remove(name);
        }
        let names_it = self.default_in(&document) == Some(name);
        if let (true, Some((key, path))) = (names_it, self.default.split_last()) {
            if let Some(former) = self.default_in(&original) {
                return self.with_default(&document.to_string(), former);
            }
            if let Some(table) = find_mut(document.as_item_mut(), path).and_then(Item::as_table_like_mut) {
                table.remove(key);
            }
            hide_new_header(document.as_item_mut(), original.as_item_mut(), path);
        }
        Ok(document.to_string())
    }

    fn default_in<'d>(&self, document: &'d DocumentMut) -> Option<&'d str> {
        self.default.iter().try_fold(document.as_item(), |item, part| item.get(part))?.as_str()
    }
}

/// Reads a text as TOML that can be edited.
///
/// # Errors
/// If the text is not TOML, with the line; and if the parser would not reproduce it.
pub fn parse(text: &str) -> Result<DocumentMut, NotEdited> {
    let document: DocumentMut = text.parse().map_err(|error: toml_edit::TomlError| NotEdited::Foreign {
        line: 1 + error.span().map_or(0, |span| text.bytes().take(span.start).filter(|byte| *byte == b'\n').count()),
        what: error.message().replace('\n', ", "),
    })?;
    // the parser ends the last line
    if document.to_string().trim_end_matches('\n') == text.trim_end_matches('\n') {
        Ok(document)
    } else {
        Err(NotEdited::Lossy)
    }
}

/// The item at `path`. `Item::get_mut` would not do: it inserts the tables that it does not find.
fn find_mut<'d>(item: &'d mut Item, path: &[String]) -> Option<&'d mut Item> {
    path.iter().try_fold(item, |item, part| item.as_table_like_mut()?.get_mut(part))
}

/// Hides the header of a table that has no key of its own any more, unless the original has the header or a comment is on it.
fn hide_new_header(item: &mut Item, original: &mut Item, path: &[String]) {
    let has_header =
        |item: &mut Item| find_mut(item, path).and_then(|item| item.as_table()).is_some_and(|it| !it.is_implicit());
    if has_header(original) {
        return;
    }
    let Some(table) = find_mut(item, path).and_then(Item::as_table_mut) else { return };
    let has_comment =
        table.decor().prefix().and_then(|prefix| prefix.as_str()).is_none_or(|prefix| prefix.contains('#'));
    if !has_comment && table.iter().all(|(_, item)| item.is_table()) {
        table.set_implicit(true);
    }
}

/// The table at `path`. Missing tables on the way are created, without a header of their own.
fn table_at<'d>(mut item: &'d mut Item, path: &[String]) -> Result<&'d mut Item, NotEdited> {
    for (depth, part) in path.iter().enumerate() {
        let missing = if item.is_value() { Item::Value(InlineTable::new().into()) } else { Item::Table(implicit()) };
        let refused = || NotEdited::Occupied(path[..=depth].join("."));
        item = item.as_table_like_mut().ok_or_else(refused)?.entry(part).or_insert(missing);
        if !item.is_table_like() {
            return Err(refused());
        }
    }
    Ok(item)
}

fn implicit() -> Table {
    let mut table = Table::new();
    table.set_implicit(true);
    table
}

/// The indentation of the neighbours of a new table: files indent by depth, or not at all.
#[derive(Debug, Default)]
struct Indents {
    header: String,
    key: String,
}

impl Indents {
    fn of_tables_in(item: &Item) -> Self {
        let tables = item.as_table_like().into_iter().flat_map(TableLike::iter).filter_map(|(_, item)| item.as_table());
        let with_header = tables.filter(|table| !table.is_implicit() && !table.is_dotted()).last();
        let Some(neighbour) = with_header else { return Self::default() };
        let before_header = neighbour.decor().prefix().and_then(|prefix| prefix.as_str()).unwrap_or_default();
        Self { header: last_line(before_header), key: keys_of(neighbour) }
    }

    fn of_keys_in(item: &Item) -> String {
        item.as_table().map(keys_of).unwrap_or_default()
    }

    fn applied_to(&self, mut item: Item) -> Item {
        if let Item::Table(table) = &mut item {
            self.apply(table);
        }
        item
    }

    fn apply(&self, table: &mut Table) {
        table.decor_mut().set_prefix(format!("\n{}", self.header));
        for (mut key, item) in table.iter_mut() {
            match item {
                Item::Table(inner) => self.apply(inner),
                _ => key.leaf_decor_mut().set_prefix(self.key.clone()),
            }
        }
    }
}

fn keys_of(table: &Table) -> String {
    let first = table.iter().find(|(_, item)| item.is_value()).and_then(|(name, _)| table.key(name));
    let prefix = first.and_then(|key| key.leaf_decor().prefix()).and_then(|prefix| prefix.as_str());
    last_line(prefix.unwrap_or_default())
}

fn last_line(decor: &str) -> String {
    let line = decor.rsplit('\n').next().unwrap_or_default();
    if line.chars().all(|c| c == ' ' || c == '\t') { line.to_owned() } else { String::new() }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use toml_edit::value;

    use super::*;

    const MINE: &str = "# my node\nversion = 2 # two\n\n[plugins]\n  [plugins.\"cri\".containerd]\n    default = \"runc\"   # the usual\n\n    [plugins.\"cri\".containerd.runtimes.runc]\n      type = \"runc.v2\" # keep\n      [plugins.\"cri\".containerd.runtimes.runc.options]\n        SystemdCgroup = true\n\n  # an end\n  [plugins.\"other\"]\n    x = [ 1,2 ]\n# the last word\n";

    fn place() -> Place {
        Place::new(&["plugins", "cri", "containerd", "runtimes"], &["plugins", "cri", "containerd", "default"])
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
        let edited = place().with_runtime(MINE, "guard", runtime()).unwrap();
        let added = "\n    [plugins.\"cri\".containerd.runtimes.guard]\n      type = \"runc.v2\"\n\n    [plugins.\"cri\".containerd.runtimes.guard.options]\n      SystemdCgroup = true\n";
        let at = MINE.find("\n  # an end").unwrap();
        assert_eq!(edited, format!("{}{added}{}", &MINE[..at], &MINE[at..]));
        assert_eq!(place().with_runtime(&edited, "guard", runtime()).unwrap(), edited, "a second time nothing changes");
    }

    #[test]
    fn the_default_keeps_its_comment() {
        let edited = place().with_default(MINE, "guard").unwrap();
        assert_eq!(edited, MINE.replace("\"runc\"   # the usual", "\"guard\"   # the usual"));
        assert_eq!(place().without_runtime(&edited, "guard", MINE).unwrap(), MINE);
    }

    /// Issue 16: removing from a file that has no such table added empty tables.
    #[test]
    fn removing_a_runtime_that_is_absent_changes_nothing() {
        for text in ["version = 2\n", "version = 2\n\n[debug]\n  level = \"warn\"\n", MINE] {
            assert_eq!(place().without_runtime(text, "guard", text).unwrap(), text);
        }
    }

    #[test]
    fn the_header_of_a_default_goes_with_it() {
        let runc = "version = 2\n[plugins.cri.containerd.runtimes.runc]\n  type = \"x\"\n";
        let edited = place().with_default(runc, "guard").unwrap();
        assert!(edited.contains("[plugins.cri.containerd]\n"), "{edited}");
        assert_eq!(place().without_runtime(&edited, "guard", runc).unwrap(), runc);
        let commented = edited.replace("[plugins.cri.containerd]\n", "# mine\n[plugins.cri.containerd]\n");
        assert!(place().without_runtime(&commented, "guard", runc).unwrap().contains("# mine\n"));
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
            let edited = place.with_default(&place.with_runtime(text, "guard", runtime()).unwrap(), "guard").unwrap();
            assert!(
                find_mut(parse(&edited).unwrap().as_item_mut(), &place.runtimes)
                    .is_some_and(|table| table.get("guard").is_some()),
                "{edited}"
            );
            let back = place.without_runtime(&edited, "guard", text).unwrap();
            let (back, before): (toml::Table, toml::Table) =
                (toml::from_str(&back).unwrap(), toml::from_str(text).unwrap());
            assert_eq!(without_empty(back), without_empty(before), "{edited}");
        }
    }

    #[test]
    fn what_is_no_such_file_is_told_with_its_line() {
        let told = |text| place().with_runtime(text, "guard", runtime()).unwrap_err().to_string();
        assert!(
            told("a = 1\n{{ template . }}\n").starts_with("line 2 is not TOML"),
            "{}",
            told("a = 1\n{{ template . }}\n")
        );
        assert_eq!(told("[plugins]\ncri = 7\n"), "plugins.cri is not a table");
        assert_eq!(told("a = 1\r\nb = 2\r\n"), NotEdited::Lossy.to_string());
    }

    /// Tables that were created on the way may stay, empty.
    fn without_empty(table: toml::Table) -> toml::Table {
        let kept = table.into_iter().map(|(key, value)| match value {
            toml::Value::Table(inner) => (key, toml::Value::Table(without_empty(inner))),
            other => (key, other),
        });
        kept.filter(|(_, value)| value.as_table().is_none_or(|table| !table.is_empty())).collect()
    }

    proptest! {
        /// Every other line of the file is still there afterwards, in order.
        #[test]
        fn every_other_line_stays(lines in proptest::collection::vec("[a-z]{1,4}(-[a-z]{1,3})? = [1-9][0-9]{0,2}( # [ -~]{0,12})?|# [ -~]{0,20}|", 0..12)) {
            let mut seen = std::collections::BTreeSet::new();
            let fresh = |line: &&String| line.is_empty() || line.starts_with('#') || seen.insert(line.split(' ').next().map(str::to_owned));
            let text: String = lines.iter().filter(fresh).map(|line| format!("{line}\n")).collect();
            let edited = place().with_runtime(&text, "guard", runtime()).unwrap();
            let mut rest = edited.lines();
            for line in text.lines() {
                prop_assert!(rest.any(|other| other == line), "{line:?} is gone from {edited}");
            }
        }
    }
}
