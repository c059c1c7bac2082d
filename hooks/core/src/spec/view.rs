//! A read-only view of the few values that the guard needs.

use std::borrow::Cow;

use serde::de::Error;

use super::bind::Bind;
use super::propagation::RootfsPropagation;
use super::read::{MAX_BINDS, Values};

/// The parts of a spec that concern binds.
#[derive(Debug)]
pub struct SpecView<'a> {
    bytes: &'a [u8],
    values: Values<'a>,
    rootfs_propagation: RootfsPropagation,
}

/// The reason for which bytes are not a spec.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// The text is not a single JSON object.
    #[error("read config.json as a JSON object")]
    NotAnObject(#[source] serde_json::Error),
    /// A field does not have the shape that the runtime spec gives it.
    #[error("read {field} of config.json")]
    Field {
        /// The field, as a dotted path.
        field: String,
        /// The error of serde_json.
        #[source]
        source: serde_json::Error,
    },
}

impl<'a> SpecView<'a> {
    /// Parses the bytes of a config.json.
    ///
    /// # Errors
    /// If the bytes are not a single JSON object, or if `mounts`, `annotations` or
    /// `linux.rootfsPropagation` do not have the runtime spec's shape. All other values only have
    /// to be JSON.
    pub fn from_bytes(bytes: &'a [u8]) -> Result<Self, SpecError> {
        let not_text = |error| SpecError::NotAnObject(serde_json::Error::custom(error));
        let values = Values::from_text(str::from_utf8(bytes).map_err(not_text)?)?;
        // For Go, an empty string means "not set".
        let requested = values
            .rootfs_propagation
            .as_deref()
            .filter(|word| !word.is_empty());
        let rootfs_propagation = requested.map_or(RootfsPropagation::Unset, |word| {
            RootfsPropagation::Set(word.to_owned())
        });
        Ok(Self {
            bytes,
            values,
            rootfs_propagation,
        })
    }

    /// A message if the spec has more mounts than the guard checks.
    pub fn overlooked(&self) -> Option<String> {
        let count = self.values.overlooked;
        (count > 0)
            .then(|| format!("{count} mounts behind the first {MAX_BINDS} binds were not checked"))
    }

    /// The binds among the spec's mounts, in their order.
    pub fn binds(&self) -> &[Bind<'a>] {
        &self.values.binds
    }

    /// The destinations of all mounts, binds or not, in their order; empty for an entry without a
    /// destination.
    pub fn destinations(&self) -> &[Cow<'a, str>] {
        &self.values.destinations
    }

    /// `linux.maskedPaths`.
    pub fn masked_paths(&self) -> &[Cow<'a, str>] {
        &self.values.masked_paths
    }

    /// An annotation's value.
    pub fn annotation(&self, key: &str) -> Option<&str> {
        self.values
            .annotations
            .iter()
            .rev()
            .find(|(name, _)| name == key)
            .map(|(_, value)| &**value)
    }

    /// The spec's `linux.rootfsPropagation`.
    pub fn rootfs_propagation(&self) -> &RootfsPropagation {
        &self.rootfs_propagation
    }

    /// The original bytes.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn only_binds_are_seen() {
        let json = br#"{"mounts":[{"destination":"/proc","type":"proc","source":"proc"},
            {"destination":"/a","type":"bind","source":"/x"},{"destination":"/b","type":"none","source":"/y","options":["rbind"]}]}"#;
        let view = SpecView::from_bytes(json).unwrap();
        let seen: Vec<_> = view
            .binds()
            .iter()
            .map(|b| (b.index(), b.source().to_str().unwrap()))
            .collect();
        assert_eq!(seen, [(1, "/x"), (2, "/y")]);
    }

    #[test]
    fn mounts_behind_too_many_binds_are_counted() {
        let bind = r#"{"type":"bind","source":"/x"}"#;
        let spec = |binds: usize| format!(r#"{{"mounts":[{}]}}"#, vec![bind; binds].join(","));
        assert_eq!(
            SpecView::from_bytes(spec(MAX_BINDS).as_bytes())
                .unwrap()
                .overlooked(),
            None
        );
        let json = spec(MAX_BINDS + 3);
        let view = SpecView::from_bytes(json.as_bytes()).unwrap();
        assert_eq!(view.binds().len(), MAX_BINDS);
        assert!(view.overlooked().unwrap().starts_with("3 mounts"));
    }

    #[test]
    fn null_is_nothing_as_it_is_for_go() {
        let json =
            br#"{"annotations":{"a":null},"mounts":[null,{"type":"bind","source":"/x","options":[null,"rslave"]}]}"#;
        let view = SpecView::from_bytes(json).unwrap();
        assert_eq!(
            (
                view.annotation("a"),
                view.binds().len(),
                view.binds()[0].index()
            ),
            (Some(""), 1, 1)
        );
    }

    #[test]
    fn the_last_of_several_keys_counts_as_it_does_for_go() {
        let json = br#"{"annotations":{"a":"1","b":"1"},"annotations":{"a":"2"},
            "linux":{"rootfsPropagation":"rslave"},"linux":{"rootfsPropagation":null},"mounts":null}"#;
        let view = SpecView::from_bytes(json).unwrap();
        assert_eq!(
            (
                view.annotation("a"),
                view.annotation("b"),
                view.binds().len()
            ),
            (Some("2"), Some("1"), 0)
        );
        assert_eq!(
            view.rootfs_propagation(),
            &RootfsPropagation::Set("rslave".to_owned())
        );
        let json =
            br#"{"annotations":{"a":"1"},"annotations":null,"linux":{"rootfsPropagation":"rslave"},"linux":null}"#;
        let view = SpecView::from_bytes(json).unwrap();
        assert_eq!(
            (view.annotation("a"), view.rootfs_propagation()),
            (None, &RootfsPropagation::Unset)
        );
    }

    /// runc ignores the case of keys and mixes the entries of two lists; crun does neither.
    #[test]
    fn a_spec_that_runtimes_read_differently_is_not_read() {
        let bind = r#""type":"bind","source":"/x","options":["bind"]"#;
        for (json, field) in [
            (format!(r#"{{"Mounts":[{{{bind}}}]}}"#), "the keys"),
            (format!(r#"{{"mountſ":[{{{bind}}}]}}"#), "the keys"),
            (format!(r#"{{"mounts\u0000x":[{{{bind}}}]}}"#), "the keys"),
            (r#"{"LINUX":{}}"#.to_owned(), "the keys"),
            (
                r#"{"linux":{"rootfspropagation":"shared"}}"#.to_owned(),
                "linux.rootfsPropagation",
            ),
            (
                format!(r#"{{"mounts":[{{{bind}}}],"mounts":[{{}}]}}"#),
                "mounts",
            ),
            (
                format!(r#"{{"mounts":[{{{bind},"Source":"/y"}}]}}"#),
                "mounts[0]",
            ),
            (
                format!(r#"{{"mounts":[{{{bind},"ſource":"/y"}}]}}"#),
                "mounts[0]",
            ),
            (
                format!(r#"{{"mounts":[{{{bind},"\u0073ource":"/y"}}]}}"#),
                "mounts[0]",
            ),
            (
                format!(r#"{{"mounts":[{{{bind},"options":[null]}}]}}"#),
                "mounts[0]",
            ),
            (
                format!(r#"{{"mounts":[{{{bind},"destination":"/a\u0000"}}]}}"#),
                "mounts[0]",
            ),
            (
                r#"{"mounts":[{"type":"none","source":"/x","options":["bind\u0000"]}]}"#.to_owned(),
                "mounts[0]",
            ),
            (
                r#"{"mounts":[{"type":"bind","source":"/x\u0000y"}]}"#.to_owned(),
                "mounts[0]",
            ),
        ] {
            let error = SpecView::from_bytes(json.as_bytes()).unwrap_err();
            let expected = format!("read {field} of config.json");
            assert!(error.to_string().starts_with(&expected), "{json}: {error}");
        }
        let other = r#"{"ociVersion":"1","hooks":{},"Mountss":[],"mounts":[{"uidMappings":[]}]}"#;
        assert!(SpecView::from_bytes(other.as_bytes()).is_ok());
    }

    #[test]
    fn an_invalid_spec_is_refused_with_its_field() {
        for (json, name) in [
            (&b"[]"[..], "JSON object"),
            (b"{\"mounts\":[7]}", "mounts[0]"),
            (
                br#"{"mounts":[{},{"type":"bind","source":"/x","options":[1]}]}"#,
                "mounts[1]",
            ),
            (b"{\"mounts\":{}}", "mounts"),
            (b"{", "JSON object"),
        ] {
            let error = SpecView::from_bytes(json).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        }
    }

    #[test]
    fn a_lone_surrogate_is_the_replacement_character_as_it_is_for_go() {
        let json = br#"{"annotations":{"a\udfff":"\ud800x"},"mounts":[{"type":"bind","source":"/\ud800"}]}"#;
        let view = SpecView::from_bytes(json).unwrap();
        assert_eq!(view.annotation("a\u{fffd}"), Some("\u{fffd}x"));
        assert_eq!(view.binds()[0].source(), Path::new("/\u{fffd}"));
    }

    #[test]
    fn a_line_break_is_allowed_only_between_values() {
        assert!(SpecView::from_bytes(b"{\n\t\"annotations\": {\"a\": \"b\"}\n}\n").is_ok());
        assert!(SpecView::from_bytes(b"{\"annotations\":{\"a\":\"b\nc\"}}").is_err());
    }

    #[test]
    fn a_bind_is_named_by_its_type_or_by_an_option() {
        let json = br#"{"mounts":[
            {"destination":"/a","type":"tmpfs","source":"tmpfs","options":["nosuid"]},
            {"destination":"/b","type":"none","source":"/x","options":["ro","bind"]},
            {"type":"bind","source":"/x","options":["rprivate"]}],
            "linux":{"maskedPaths":["/proc/keys"]}}"#;
        let view = SpecView::from_bytes(json).unwrap();
        let seen: Vec<_> = view
            .binds()
            .iter()
            .map(|bind| (bind.index(), bind.leaves_flags()))
            .collect();
        assert_eq!(seen, [(1, false), (2, true)]);
        assert_eq!(view.destinations(), ["/a", "/b", ""]);
        assert_eq!(view.masked_paths(), ["/proc/keys"]);
    }

    #[test]
    fn characters_that_json_forbids_in_a_string_are_an_error() {
        for text in ["\n", "\n\n", "\u{1f}"] {
            let json = format!(r#"{{"mounts":[{{"destination":"/a{text}"}}]}}"#);
            assert!(SpecView::from_bytes(json.as_bytes()).is_err(), "{text:?}");
        }
    }
}
