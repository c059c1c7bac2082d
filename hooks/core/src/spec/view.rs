//! A view of the few values that the guard reads, over bytes that nobody touches.

use std::borrow::Cow;
use std::ops::Range;

use serde_json::value::RawValue;

use super::bind::Bind;
use super::mounts::{Binds, MOST_BINDS};
use super::object::{RawObject, Text, place};
use super::propagation::RootfsPropagation;

/// The parts of a spec that bear on its binds.
#[derive(Debug)]
pub struct SpecView<'a> {
    bytes: &'a [u8],
    binds: Binds<'a>,
    annotations: Vec<(Cow<'a, str>, Cow<'a, str>)>,
    rootfs_propagation: RootfsPropagation,
    linux: LinuxPlace,
}

/// Where `linux.rootfsPropagation` stands, or where it would have to be written.
#[derive(Debug, Clone)]
pub(super) enum LinuxPlace {
    /// The value itself, `null` included.
    Value(Range<usize>),
    /// Just behind the opening brace of `linux`; `empty` when the object has no keys.
    Object { brace: usize, empty: bool },
    /// `"linux": null`.
    Null(Range<usize>),
    /// Just behind the opening brace of the spec.
    Spec { brace: usize, empty: bool },
}

/// Why bytes were not taken for a spec.
#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    /// Not one JSON object.
    #[error("read config.json as a JSON object")]
    NotAnObject(#[source] serde_json::Error),
    /// A field that the guard reads has another shape than the runtime spec gives it.
    #[error("read {field} of config.json")]
    Field {
        /// The field, as a dotted path.
        field: String,
        /// What serde_json has against it.
        #[source]
        source: serde_json::Error,
    },
}

impl<'a> SpecView<'a> {
    /// Looks at the bytes of a config.json.
    ///
    /// # Errors
    /// When they are not one JSON object, or when `mounts`, `annotations` or `linux.rootfsPropagation` are not of
    /// the runtime spec's shape. What stands elsewhere in the spec is not looked at, only that it is JSON.
    pub fn from_bytes(bytes: &'a [u8]) -> Result<Self, SpecError> {
        let spec: RawObject<'_> = serde_json::from_slice(bytes).map_err(SpecError::NotAnObject)?;
        let (rootfs_propagation, linux) = rootfs_propagation(bytes, &spec).map_err(field("linux.rootfsPropagation"))?;
        Ok(Self {
            bytes,
            binds: spec.value("mounts").map(Binds::from_mounts).transpose()?.unwrap_or_default(),
            annotations: annotations(&spec).map_err(field("annotations"))?,
            rootfs_propagation,
            linux,
        })
    }

    /// What to say when there are more mounts than are looked at.
    pub fn overlooked(&self) -> Option<String> {
        let count = self.binds.overlooked;
        (count > 0).then(|| format!("{count} mounts behind the first {MOST_BINDS} binds were not looked at"))
    }

    /// The binds among the spec's mounts, in their order.
    pub fn binds(&self) -> &[Bind<'a>] {
        &self.binds.seen
    }

    /// An annotation's value.
    pub fn annotation(&self, key: &str) -> Option<&str> {
        self.annotations.iter().rev().find(|(name, _)| name == key).map(|(_, value)| &**value)
    }

    /// The spec's `linux.rootfsPropagation`.
    pub fn rootfs_propagation(&self) -> &RootfsPropagation {
        &self.rootfs_propagation
    }

    /// The bytes as they came.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    pub(super) fn linux(&self) -> &LinuxPlace {
        &self.linux
    }
}

fn annotations<'a>(spec: &RawObject<'a>) -> serde_json::Result<Vec<(Cow<'a, str>, Cow<'a, str>)>> {
    let Some(raw) = spec.value("annotations") else { return Ok(Vec::new()) };
    let object: RawObject<'_> = serde_json::from_str(raw.get())?;
    // For Go, a string that is null is empty.
    let text =
        |raw: &'a RawValue| serde_json::from_str(raw.get()).map(|text: Option<Text<'_>>| text.unwrap_or_default().0);
    object.into_iter().map(|(key, raw)| Ok((key, text(raw)?))).collect()
}

fn rootfs_propagation(bytes: &[u8], spec: &RawObject<'_>) -> serde_json::Result<(RootfsPropagation, LinuxPlace)> {
    let Some(linux) = spec.written("linux") else {
        let brace = 1 + bytes.iter().position(|b| *b == b'{').unwrap_or(0);
        return Ok((RootfsPropagation::Unset, LinuxPlace::Spec { brace, empty: spec.iter().next().is_none() }));
    };
    if linux.get() == "null" {
        return Ok((RootfsPropagation::Unset, LinuxPlace::Null(place(bytes, linux.get()))));
    }
    let object: RawObject<'_> = serde_json::from_str(linux.get())?;
    let Some(value) = object.written("rootfsPropagation") else {
        let brace = place(bytes, linux.get()).start + 1;
        return Ok((RootfsPropagation::Unset, LinuxPlace::Object { brace, empty: object.iter().next().is_none() }));
    };
    let word: Option<String> = serde_json::from_str(value.get())?;
    // An empty string is Go's "not set".
    let asked = word.filter(|w| !w.is_empty()).map_or(RootfsPropagation::Unset, RootfsPropagation::Set);
    Ok((asked, LinuxPlace::Value(place(bytes, value.get()))))
}

fn field(name: &str) -> impl FnOnce(serde_json::Error) -> SpecError {
    move |source| SpecError::Field { field: name.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::spec::AskedPropagation;

    #[test]
    fn only_binds_are_seen() {
        let json = br#"{"mounts":[{"destination":"/proc","type":"proc","source":"proc"},
            {"destination":"/a","type":"bind","source":"/x"},{"destination":"/b","type":"none","source":"/y","options":["rbind"]}]}"#;
        let view = SpecView::from_bytes(json).unwrap();
        let seen: Vec<_> = view.binds().iter().map(|b| (b.index(), b.source().to_str().unwrap())).collect();
        assert_eq!(seen, [(1, "/x"), (2, "/y")]);
    }

    #[test]
    fn mounts_behind_too_many_binds_are_counted() {
        let bind = r#"{"type":"bind","source":"/x"}"#;
        let spec = |binds: usize| format!(r#"{{"mounts":[{}]}}"#, vec![bind; binds].join(","));
        assert_eq!(SpecView::from_bytes(spec(MOST_BINDS).as_bytes()).unwrap().overlooked(), None);
        let json = spec(MOST_BINDS + 3);
        let view = SpecView::from_bytes(json.as_bytes()).unwrap();
        assert_eq!(view.binds().len(), MOST_BINDS);
        assert!(view.overlooked().unwrap().starts_with("3 mounts"));
    }

    #[test]
    fn null_is_nothing_as_it_is_for_go() {
        let json =
            br#"{"annotations":{"a":null},"mounts":[null,{"type":"bind","source":"/x","options":[null,"rslave"]}]}"#;
        let view = SpecView::from_bytes(json).unwrap();
        assert_eq!((view.annotation("a"), view.binds().len(), view.binds()[0].index()), (Some(""), 1, 1));
    }

    #[test]
    fn the_last_of_several_keys_counts_as_it_does_for_go() {
        let json = br#"{"mounts":[{"type":"tmpfs","type":"bind","type":null,"source":"/x","source":"/y","source":null,
            "options":["rshared"],"options":null,"destination":"/a","destination":"/b"}]}"#;
        let view = SpecView::from_bytes(json).unwrap();
        let bind = &view.binds()[0];
        assert_eq!((bind.source(), bind.destination()), (Path::new("/y"), Path::new("/b")));
        assert_eq!(bind.propagation(), AskedPropagation::Nothing);
    }

    #[test]
    fn what_is_no_spec_is_refused_with_the_field_named() {
        for (json, name) in [
            (&b"[]"[..], "JSON object"),
            (b"{\"mounts\":[7]}", "mounts[0]"),
            (br#"{"mounts":[{},{"type":"bind","source":"/x","options":[1]}]}"#, "mounts[1]"),
            (b"{\"mounts\":{}}", "mounts"),
            (b"{", "JSON object"),
        ] {
            let error = SpecView::from_bytes(json).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        }
    }
}
