//! The part of JSON Schema 2020-12 that docs/journal.schema.json is written in. A library for all
//! of it brings some forty crates into the lock file. A keyword that is not known here fails: it is
//! never passed over.

use serde_json::{Map, Value};

/// A schema with references to its own definitions.
pub struct Schema(pub Value);

impl Schema {
    /// The places in which the value does not match the schema.
    pub fn faults_of(&self, value: &Value) -> Vec<String> {
        self.faults("line", value, &self.0)
    }

    fn faults(&self, at: &str, value: &Value, rule: &Value) -> Vec<String> {
        let rules = rule.as_object().unwrap();
        rules
            .iter()
            .flat_map(|(keyword, wanted)| self.against(at, value, keyword, wanted, rules))
            .collect()
    }

    fn against(
        &self,
        at: &str,
        value: &Value,
        keyword: &str,
        wanted: &Value,
        rules: &Map<String, Value>,
    ) -> Vec<String> {
        let obeyed = match keyword {
            "$schema" | "$defs" | "title" | "description" | "format" => true,
            "$ref" => return self.faults(at, value, self.named(wanted)),
            "properties" => return self.each_property(at, value, wanted),
            "items" => return self.each_item(at, value, wanted),
            "type" => names(wanted).any(|name| is_a(value, name)),
            "enum" => wanted.as_array().unwrap().contains(value),
            "const" => value == wanted,
            "minimum" => value
                .as_f64()
                .is_none_or(|number| number >= wanted.as_f64().unwrap()),
            "minItems" => value
                .as_array()
                .is_none_or(|items| items.len() as u64 >= wanted.as_u64().unwrap()),
            "minProperties" => value
                .as_object()
                .is_none_or(|keys| keys.len() as u64 >= wanted.as_u64().unwrap()),
            "required" => value
                .as_object()
                .is_none_or(|keys| names(wanted).all(|name| keys.contains_key(name))),
            "additionalProperties" => {
                assert_eq!(wanted, &Value::Bool(false));
                value.as_object().is_none_or(|keys| {
                    keys.keys()
                        .all(|key| rules["properties"].get(key).is_some())
                })
            }
            "oneOf" => {
                let ways = wanted.as_array().unwrap();
                ways.iter()
                    .filter(|way| self.faults(at, value, way).is_empty())
                    .count()
                    == 1
            }
            other => panic!("{other} at {at}: not a keyword that this file knows"),
        };
        if obeyed {
            Vec::new()
        } else {
            vec![format!("{at} breaks {keyword} {wanted}: {value}")]
        }
    }

    fn named(&self, reference: &Value) -> &Value {
        let pointer = reference
            .as_str()
            .unwrap()
            .strip_prefix('#')
            .expect("a reference into the schema itself");
        self.0.pointer(pointer).unwrap()
    }

    fn each_property(&self, at: &str, value: &Value, rules: &Value) -> Vec<String> {
        let keys = value.as_object().into_iter().flatten();
        let ruled = keys.filter_map(|(key, value)| Some((key, value, rules.get(key)?)));
        ruled
            .flat_map(|(key, value, rule)| self.faults(&format!("{at}.{key}"), value, rule))
            .collect()
    }

    fn each_item(&self, at: &str, value: &Value, rule: &Value) -> Vec<String> {
        let items = value.as_array().into_iter().flatten().enumerate();
        items
            .flat_map(|(n, item)| self.faults(&format!("{at}[{n}]"), item, rule))
            .collect()
    }
}

/// A name or several names.
fn names(wanted: &Value) -> impl Iterator<Item = &str> {
    let one = wanted.as_str().into_iter();
    one.chain(
        wanted
            .as_array()
            .into_iter()
            .flatten()
            .map(|name| name.as_str().unwrap()),
    )
}

fn is_a(value: &Value, name: &str) -> bool {
    match name {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "integer" => value.is_u64() || value.is_i64(),
        "null" => value.is_null(),
        other => panic!("{other} is not a type that this file knows"),
    }
}
