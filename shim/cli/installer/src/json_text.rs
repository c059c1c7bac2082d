//! Inserts a runtime into Docker's daemon.json, or removes the runtime; every other byte is
//! unchanged.
//!
//! JSON has no comments to lose, but a daemon.json has an order, an indentation and forms of
//! numbers to keep. So members are spliced into the text, as the guard does with specs
//! (docs/decisions/0002). The syntax tree of `jsonc-parser` 0.34 would not do: it rewrites an
//! object on one line over several lines.

use std::ops::Range;

use bindguard_core::spec::RawObject;
use serde_json::Value;

/// Why a text was not edited.
#[derive(Debug, thiserror::Error)]
pub enum NotEdited {
    /// Not JSON, or not an object.
    #[error("it is not a JSON object: {0}")]
    Foreign(serde_json::Error),
    /// A value that is not an object, where an object is required.
    #[error("{0:?} in it is not an object")]
    Member(String),
}

/// The text with `value` as the member at `path`. Missing objects on the way are created.
///
/// # Errors
/// If the text, or a value on the way, is not an object.
pub fn with(text: &str, path: &[&str], value: &Value) -> Result<String, NotEdited> {
    let text = if text.trim().is_empty() { "{}\n" } else { text };
    let (object, rest) = deepest(text, path)?;
    let Some((name, missing)) = rest.split_first() else {
        return Ok(text.to_owned());
    };
    let value = missing.iter().rev().fold(
        value.clone(),
        |inner, name| serde_json::json!({ *name: inner }),
    );
    let depth = path.len() - rest.len();
    Ok(
        match object
            .members
            .iter()
            .rev()
            .find(|member| member.name == *name)
        {
            Some(member) if missing.is_empty() => {
                spliced(text, member.value.clone(), &value.to_string())
            }
            _ => object.with_member(text, name, &value, depth),
        },
    )
}

/// The text without the member at `path`, if it has one.
///
/// # Errors
/// If the text is not an object.
pub fn without(text: &str, path: &[&str]) -> Result<String, NotEdited> {
    let (object, rest) = deepest(text, path)?;
    let [name] = rest else {
        return Ok(text.to_owned());
    };
    let Some(at) = object
        .members
        .iter()
        .position(|member| member.name == *name)
    else {
        return Ok(text.to_owned());
    };
    let member = &object.members[at];
    // from the end of the member before or, for the first member, up to the beginning of the next
    let range = match (
        at.checked_sub(1).map(|before| &object.members[before]),
        object.members.get(at + 1),
    ) {
        (Some(before), _) => before.value.end..member.value.end,
        (None, Some(next)) => member.key..next.key,
        (None, None) => object.inside.clone(),
    };
    Ok(spliced(text, range, ""))
}

/// The value at `path`.
///
/// # Errors
/// If the text is not JSON.
pub fn at(text: &str, path: &[&str]) -> Result<Option<Value>, NotEdited> {
    if text.trim().is_empty() {
        return Ok(None);
    }
    let whole: Value = serde_json::from_str(text).map_err(NotEdited::Foreign)?;
    Ok(path
        .iter()
        .try_fold(&whole, |value, name| value.get(name))
        .cloned())
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

/// The deepest object along `path`, and the rest of the path, for which there is no object.
fn deepest<'p>(text: &str, path: &'p [&'p str]) -> Result<(Object, &'p [&'p str]), NotEdited> {
    let mut object = Object::read(
        text,
        text.len() - text.trim_start().len()..text.trim_end().len(),
    )
    .map_err(NotEdited::Foreign)?;
    for (depth, name) in path.iter().enumerate() {
        let inner = object
            .members
            .iter()
            .rev()
            .find(|member| member.name == *name)
            .map(|member| member.value.clone());
        match inner {
            Some(value) if depth + 1 < path.len() => {
                object =
                    Object::read(text, value).map_err(|_| NotEdited::Member((*name).to_owned()))?;
            }
            _ => return Ok((object, &path[depth..])),
        }
    }
    Ok((object, &[]))
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

    /// The text with an added member, formatted like its neighbours.
    fn with_member(&self, text: &str, name: &str, value: &Value, depth: usize) -> String {
        let key = Value::from(name);
        match (self.members.last(), self.indent(text)) {
            (Some(last), Some(indent)) => {
                let member = format!(",{indent}{key}: {}", pretty(value, &indent));
                spliced(text, last.value.end..last.value.end, &member)
            }
            (Some(last), None) => spliced(
                text,
                last.value.end..last.value.end,
                &format!(", {key}: {value}"),
            ),
            (None, _) => {
                let (outer, indent) = (
                    format!("\n{}", "  ".repeat(depth)),
                    format!("\n{}", "  ".repeat(depth + 1)),
                );
                spliced(
                    text,
                    self.inside.clone(),
                    &format!("{indent}{key}: {}{outer}", pretty(value, &indent)),
                )
            }
        }
    }

    /// The text between the end of a line and the last key, newline included.
    fn indent(&self, text: &str) -> Option<String> {
        let key = self.members.last()?.key;
        let line = text[..key].rfind('\n')?;
        text[line + 1..key]
            .chars()
            .all(char::is_whitespace)
            .then(|| text[line..key].to_owned())
    }
}

fn spliced(text: &str, range: Range<usize>, with: &str) -> String {
    format!("{}{with}{}", &text[..range.start], &text[range.end..])
}

/// A value over several lines, each behind `indent`, which begins with the newline.
fn pretty(value: &Value, indent: &str) -> String {
    serde_json::to_string_pretty(value)
        .unwrap_or_default()
        .replace('\n', indent)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    const RUNTIME: [&str; 2] = ["runtimes", "guard"];

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
            assert_eq!(with(before, &RUNTIME, &value).unwrap(), after);
        }
    }

    #[test]
    fn what_is_no_such_file_is_refused() {
        for text in ["[]", "{", "{\"runtimes\": 3}", "version = 2"] {
            assert!(with(text, &RUNTIME, &json!(1)).is_err(), "{text}");
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
            assert_eq!(without(before, &["k"]).unwrap(), after);
        }
    }

    proptest! {
        /// With any members: adding and removing the runtime keeps the file's meaning.
        #[test]
        fn nothing_else_changes(members in proptest::collection::btree_map("[a-z\"\\\\ ]{1,5}", 0..9_u32, 0..6), space in "[ \n\t]{0,3}", at_end in any::<bool>()) {
            let body: Vec<String> = members.iter().map(|(name, n)| format!("{space}{}{space}:{space}{{\"n\":{n}.0}}", Value::from(name.as_str()))).collect();
            let text = format!("{{{}{}}}", body.join(","), if at_end { "\n" } else { "" });
            let edited = with(&text, &RUNTIME, &json!({ "path": "/g" })).unwrap();
            let mut expected: Value = serde_json::from_str(&text).unwrap();
            prop_assert_eq!(at(&edited, &RUNTIME).unwrap(), Some(json!({ "path": "/g" })));
            let back = without(&edited, &["runtimes"]).unwrap();
            prop_assert_eq!(serde_json::from_str::<Value>(&back).unwrap(), expected.clone());
            expected["runtimes"] = json!({ "guard": { "path": "/g" } });
            prop_assert_eq!(serde_json::from_str::<Value>(&edited).unwrap(), expected);
        }
    }
}
