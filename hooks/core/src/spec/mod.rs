//! The OCI spec, read and edited as bytes.
//!
//! A spec is kept as the bytes that containerd wrote. A single pass reads the few values that the
//! guard needs, and an edit replaces only those, by splices. Unknown fields, big numbers, odd
//! escapes and duplicate keys therefore reach the runtime unchanged. A round trip through typed
//! structs cannot guarantee that.
//!
//! Mirrors the [runtime spec's `mounts` and `linux.rootfsPropagation`][spec] as runc and crun read
//! them. The reader follows runc, which uses Go's `encoding/json`: annotations are merged, and `null`
//! is no value. Where runc and crun read different binds from a text, the spec is not read: a
//! spelling of a key that Go alone accepts, a second key, a NUL in a string.
//!
//! [spec]: https://github.com/opencontainers/runtime-spec/blob/main/config.md#mounts

mod container;
mod read;

use std::borrow::Cow;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::de::{Deserializer, Error, IgnoredAny};
use serde_json::value::RawValue;

use crate::mount_table::MountAttributes;

pub use crate::spec::container::{
    IdMap, IdMaps, MountMakers, RequestedUserNamespace, SpecMount, SpecUsers,
};
pub use crate::spec::read::{MAX_BINDS, RawObject, Text};
use crate::spec::read::{Parts, parsed, reject_nul, reject_other_spelling, text_or_null};

/// A mount of the spec that runc would bind.
///
/// runc and crun treat an entry as a bind if its type is `bind`, or if its options contain `bind`
/// or `rbind`. In the latter case the type can be any; `none` is common.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bind<'a> {
    /// The position in the spec's `mounts`.
    pub index: usize,
    source: Cow<'a, str>,
    destination: Cow<'a, str>,
    pub propagation: RequestedPropagation,
    /// The permissions that the options deny.
    pub denied: MountAttributes,
    /// The permissions that the options deny on each mount below the bind.
    pub denied_below: MountAttributes,
    /// True without an option for a flag of the mount: the runtime leaves the flags of the source's
    /// mount. With an option it sets all flags, and clears the others.
    pub leaves_flags: bool,
    /// True if the bind includes the mounts below its source with every runtime.
    pub is_recursive: bool,
    /// True if a propagation word begins with an r, such as `rprivate`.
    pub(crate) has_recursive_word: bool,
    /// The source and the options as they are in the spec's own text: an edit replaces them.
    written_source: &'a str,
    written_options: Option<&'a str>,
}

impl<'a> Bind<'a> {
    /// The destination of the entry at `index` of `mounts`, and the bind if it is one. As for Go's
    /// `encoding/json`, a string that is `null` is no string.
    fn from_entry(
        index: usize,
        entry: &'a RawValue,
    ) -> serde_json::Result<(Cow<'a, str>, Option<Self>)> {
        let entry: Option<RawObject<'a>> = parsed(entry)?;
        let names = ["type", "source", "destination", "options"];
        let [kind, source, destination, written_options] =
            entry.unwrap_or_default().values(names)?;
        let kind = text_or_null(kind)?;
        let destination = text_or_null(destination)?.unwrap_or_default();
        let Some(written_source) = source.filter(|source| source.get() != "null") else {
            return Ok((destination, None));
        };
        let options: Option<Vec<Option<Text<'_>>>> = written_options.map_or(Ok(None), parsed)?;
        let mut words = Vec::new();
        for Text(option) in options.iter().flatten().flatten() {
            reject_nul(option)?;
            words.push(&**option);
        }
        let is_recursive = words.contains(&"rbind");
        if !is_recursive && kind.as_deref() != Some("bind") && !words.contains(&"bind") {
            return Ok((destination, None));
        }
        let Text(source) = parsed(written_source)?;
        reject_nul(&source)?;
        reject_nul(&destination)?;
        let (denied, denied_below) = MountAttributes::denied_by_spec(&words);
        let bind = Self {
            index,
            source,
            destination: destination.clone(),
            propagation: RequestedPropagation::from_options(&words),
            denied,
            denied_below,
            leaves_flags: !words
                .iter()
                .any(|word| MountAttributes::is_flag_of_spec(word)),
            is_recursive,
            has_recursive_word: words.iter().any(|word| {
                word.starts_with('r') && RequestedPropagation::from_option(word).is_some()
            }),
            written_source: written_source.get(),
            written_options: written_options.map(RawValue::get),
        };
        Ok((destination, Some(bind)))
    }

    /// The path on the host to bind. A relative path is relative to the bundle.
    pub fn source(&self) -> &Path {
        Path::new(&*self.source)
    }

    /// The path in the container.
    pub fn destination(&self) -> &Path {
        Path::new(&*self.destination)
    }
}

/// The combined propagation that the options of a bind request, in the terms of mount(8).
///
/// See mount_namespaces(7). The `r` of rprivate, rslave and rshared is distinguished only where it
/// changes which mounts a host umount reaches. With plain `slave` the submounts stay as they were
/// cloned. Of several options, the greatest applies.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum RequestedPropagation {
    /// No propagation option at all: runc and crun make the bind rprivate.
    #[default]
    Nothing,
    /// `rslave`.
    RecursiveSlave,
    /// `slave` without `rslave`.
    Slave,
    /// `private` or `rprivate`.
    Private,
    /// `unbindable` or `runbindable`.
    Unbindable,
    /// `shared` or `rshared`, alone or among other options: the container's mounts should reach the
    /// host.
    Shared,
}

impl RequestedPropagation {
    /// Combines the propagation of all mount options. If an option is shared, the bind is treated
    /// as shared. Otherwise the option that lowers propagation most applies, as in runc: a private
    /// mount made slave stays private.
    fn from_options(options: &[&str]) -> Self {
        let known = options
            .iter()
            .filter_map(|option| Self::from_option(option));
        known.max().unwrap_or_default()
    }

    /// The propagation that a mount option requests; `None` for options that do not set
    /// propagation.
    pub fn from_option(option: &str) -> Option<Self> {
        match option {
            "private" | "rprivate" => Some(Self::Private),
            "slave" => Some(Self::Slave),
            "rslave" => Some(Self::RecursiveSlave),
            "shared" | "rshared" => Some(Self::Shared),
            "unbindable" | "runbindable" => Some(Self::Unbindable),
            _ => None,
        }
    }

    /// True if host umounts would stop at this bind, or at its submounts.
    pub fn keeps_host_mounts_alive(self) -> bool {
        match self {
            // mount_namespaces(7): unbindable mounts are private mounts.
            Self::Nothing | Self::Private | Self::Slave | Self::Unbindable => true,
            Self::RecursiveSlave | Self::Shared => false,
        }
    }
}

/// `linux.rootfsPropagation` of a spec.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum RootfsPropagation {
    /// Not set: an rslave bind receives umounts under runc's default, but not under crun's.
    #[default]
    Unset,
    /// Set to this word.
    Set(String),
}

impl RootfsPropagation {
    /// True if an rslave bind receives the host's umounts under both runc and crun.
    pub fn lets_umounts_in(&self) -> bool {
        matches!(self, Self::Set(word) if word == "rslave" || word == "rshared")
    }

    /// True if the container's own mounts are meant to propagate out of it.
    pub fn is_shared(&self) -> bool {
        matches!(self, Self::Set(word) if word == "shared" || word == "rshared")
    }
}

/// A read-only view of the parts of a spec that concern binds.
#[derive(Debug, Default)]
pub struct SpecView<'a> {
    bytes: &'a [u8],
    binds: Vec<Bind<'a>>,
    /// The destinations of all mounts, binds or not, in their order; empty for an entry without a
    /// destination.
    pub destinations: Vec<Cow<'a, str>>,
    /// The number of mounts beyond [`MAX_BINDS`], which are not checked.
    overlooked: usize,
    pub masked_paths: Vec<Cow<'a, str>>,
    annotations: Vec<(Cow<'a, str>, Cow<'a, str>)>,
    pub rootfs_propagation: RootfsPropagation,
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
        #[source]
        source: serde_json::Error,
    },
}

impl SpecError {
    /// An error in a part that is parsed on its own: the error's line and column would be those in
    /// the part, and not in config.json.
    fn in_part(field: &str, error: &serde_json::Error) -> Self {
        let position = format!(" at line {} column {}", error.line(), error.column());
        let message = error.to_string();
        Self::Field {
            field: field.to_owned(),
            source: Error::custom(message.strip_suffix(&position).unwrap_or(&message)),
        }
    }
}

impl<'a> SpecView<'a> {
    /// Parses the bytes of a config.json.
    ///
    /// # Errors
    /// If the bytes are not a single JSON object, or if `mounts`, `annotations` or
    /// `linux.rootfsPropagation` do not have the runtime spec's shape. All other values only have
    /// to be JSON.
    pub fn from_bytes(bytes: &'a [u8]) -> Result<Self, SpecError> {
        let text = str::from_utf8(bytes).map_err(Error::custom);
        let text = text.map_err(SpecError::NotAnObject)?;
        // A fold over all bytes, because the compiler makes it several times as fast as a search
        // that can stop early.
        let has_control = text
            .bytes()
            .fold(false, |found, byte| found | (byte < b' '));
        if has_control {
            // Such characters are nearly always line breaks. But `Text` also accepts them inside a
            // string, where JSON forbids them.
            serde_json::from_str::<IgnoredAny>(text).map_err(SpecError::NotAnObject)?;
        }
        let mut parts = Parts::default();
        let mut json = serde_json::Deserializer::from_str(text);
        let read = json.deserialize_map(&mut parts).and_then(|()| json.end());
        match (read, parts.field) {
            (Ok(()), _) => {}
            (Err(source), Some(field)) if source.is_data() => {
                let field = field.to_owned();
                return Err(SpecError::Field { field, source });
            }
            (Err(error), _) => return Err(SpecError::NotAnObject(error)),
        }
        let mut view = Self {
            bytes,
            ..Self::default()
        };
        for (index, entry) in parts.mounts.iter().enumerate() {
            if view.binds.len() == MAX_BINDS {
                view.overlooked = parts.mounts.len() - index;
                break;
            }
            let (destination, bind) = Bind::from_entry(index, entry)
                .map_err(|error| SpecError::in_part(&format!("mounts[{index}]"), &error))?;
            view.destinations.push(destination);
            view.binds.extend(bind);
        }
        for (name, value) in parts.annotations.0 {
            let value = text_or_null(Some(value))
                .map_err(|error| SpecError::in_part("annotations", &error))?;
            // Go reads `null` as an empty string.
            view.annotations.push((name, value.unwrap_or_default()));
        }
        view.read_linux(&parts.linux)
            .map_err(|error| SpecError::in_part("linux.rootfsPropagation", &error))?;
        Ok(view)
    }

    fn read_linux(&mut self, linux: &RawObject<'a>) -> serde_json::Result<()> {
        for (key, value) in &linux.0 {
            match &**key {
                "rootfsPropagation" => {
                    // For Go, an empty string means "not set", and `null` changes nothing.
                    if let Some(word) = text_or_null(Some(value))? {
                        self.rootfs_propagation = match word.is_empty() {
                            true => RootfsPropagation::Unset,
                            false => RootfsPropagation::Set(word.into_owned()),
                        };
                    }
                }
                "maskedPaths" => {
                    self.masked_paths.clear();
                    let paths: Option<Vec<Option<Text<'a>>>> = parsed(value)?;
                    for path in paths.unwrap_or_default() {
                        self.masked_paths.push(path.unwrap_or_default().0);
                    }
                }
                other => reject_other_spelling(other, &["rootfsPropagation", "maskedPaths"])?,
            }
        }
        Ok(())
    }

    /// A message if the spec has more mounts than the guard checks.
    pub fn overlooked(&self) -> Option<String> {
        let count = self.overlooked;
        (count > 0)
            .then(|| format!("{count} mounts behind the first {MAX_BINDS} binds were not checked"))
    }

    /// The binds among the spec's mounts, in their order.
    pub fn binds(&self) -> &[Bind<'a>] {
        &self.binds
    }

    pub fn annotation(&self, key: &str) -> Option<&str> {
        let mut annotations = self.annotations.iter().rev();
        let (_, value) = annotations.find(|(name, _)| name == key)?;
        Some(value)
    }

    /// The original bytes.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }
}

const RSLAVE: &str = "\"rslave\"";

/// A change to a spec. A bind is identified by its position in `mounts`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SpecEdit {
    /// Point the bind's source at another path.
    Source { bind: usize, to: PathBuf },
    /// Make the bind rslave.
    BindRslave { bind: usize },
    /// Set `linux.rootfsPropagation` to rslave.
    RootfsRslave,
}

/// The reason for which an edit could not be written.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct EditError(String);

/// A range of the old bytes and its replacement.
type Splice = (Range<usize>, String);

impl SpecView<'_> {
    /// The spec's bytes with the edits made.
    ///
    /// # Errors
    /// If an edit names no bind, or a source that JSON cannot represent. No edit is made then.
    pub fn edited(&self, edits: &[SpecEdit]) -> Result<Vec<u8>, EditError> {
        let mut splices = Vec::new();
        for edit in edits {
            match edit {
                SpecEdit::Source { bind, to } => {
                    let Some(path) = to.to_str() else {
                        return Err(EditError(format!(
                            "write {} as the source of mounts[{bind}]: it is not UTF-8",
                            to.display()
                        )));
                    };
                    let place = self.place(self.bind(*bind)?.written_source);
                    splices.push((place, serde_json::Value::from(path).to_string()));
                }
                SpecEdit::BindRslave { bind } => self.make_rslave(self.bind(*bind)?, &mut splices),
                SpecEdit::RootfsRslave => splices.extend(self.rootfs_rslave()),
            }
        }
        splices.sort_by_key(|(range, _)| (range.start, range.end));
        splices.dedup();
        let mut out = Vec::with_capacity(self.bytes.len() + 64 * splices.len());
        let mut done = 0;
        for (range, text) in splices {
            out.extend_from_slice(&self.bytes[done..range.start]);
            out.extend_from_slice(text.as_bytes());
            done = range.end;
        }
        out.extend_from_slice(&self.bytes[done..]);
        Ok(out)
    }

    fn bind(&self, index: usize) -> Result<&Bind<'_>, EditError> {
        let bind = self.binds.iter().find(|bind| bind.index == index);
        bind.ok_or_else(|| EditError(format!("edit mounts[{index}]: it is no bind of this spec")))
    }

    /// The place of a part that was parsed from the bytes.
    fn place(&self, written: &str) -> Range<usize> {
        let start = written.as_ptr().addr() - self.bytes.as_ptr().addr();
        start..start + written.len()
    }

    fn make_rslave(&self, bind: &Bind<'_>, splices: &mut Vec<Splice>) {
        let Some(written) = bind.written_options else {
            let end = self.place(bind.written_source).end;
            splices.push((end..end, format!(",\"options\":[{RSLAVE}]")));
            return;
        };
        // An earlier step parsed the options as a list of strings.
        let options: Option<Vec<&RawValue>> = serde_json::from_str(written).unwrap_or_default();
        let options = options.unwrap_or_default();
        let Some(last) = options.last() else {
            let place = self.place(written);
            // An empty array keeps the white space between its brackets; null becomes an array.
            splices.push(match written.starts_with('[') {
                true => (place.start + 1..place.start + 1, RSLAVE.to_owned()),
                false => (place, format!("[{RSLAVE}]")),
            });
            return;
        };
        // runc applies propagation options in turn: every option that lowers propagation must go.
        let before = splices.len();
        for option in &options {
            let text: Option<Text<'_>> = parsed(option).unwrap_or_default();
            let requested = text.and_then(|text| RequestedPropagation::from_option(&text.0));
            if requested.is_some_and(RequestedPropagation::keeps_host_mounts_alive) {
                splices.push((self.place(option.get()), RSLAVE.to_owned()));
            }
        }
        if splices.len() == before {
            let end = self.place(last.get()).end;
            splices.push((end..end, format!(",{RSLAVE}")));
        }
    }

    /// Never returns `None`: an earlier step parsed the bytes as an object.
    fn rootfs_rslave(&self) -> Option<Splice> {
        let key = format!("\"rootfsPropagation\":{RSLAVE}");
        let spec: RawObject<'_> = serde_json::from_slice(self.bytes).ok()?;
        let (object, start, added) = match spec.written("linux") {
            None => {
                let brace = self.bytes.iter().position(|byte| *byte == b'{')?;
                (spec, brace, format!("\"linux\":{{{key}}}"))
            }
            Some(linux) if linux.get() == "null" => {
                return Some((self.place(linux.get()), format!("{{{key}}}")));
            }
            Some(linux) => {
                let object: RawObject<'_> = parsed(linux).ok()?;
                if let Some(value) = object.written("rootfsPropagation") {
                    return Some((self.place(value.get()), RSLAVE.to_owned()));
                }
                (object, self.place(linux.get()).start, key)
            }
        };
        let comma = if object.0.is_empty() { "" } else { "," };
        Some((start + 1..start + 1, format!("{added}{comma}")))
    }
}

#[cfg(test)]
mod propagation_tests {
    use super::*;

    #[test]
    fn shared_is_never_taken_for_less() {
        assert_eq!(
            RequestedPropagation::from_options(&["rprivate", "rshared", "rslave"]),
            RequestedPropagation::Shared
        );
        assert_eq!(
            RequestedPropagation::from_options(&["rbind", "ro"]),
            RequestedPropagation::Nothing
        );
        assert_eq!(
            RequestedPropagation::from_options(&["slave", "rbind"]),
            RequestedPropagation::Slave
        );
        assert_eq!(
            RequestedPropagation::from_options(&["rprivate", "rslave"]),
            RequestedPropagation::Private
        );
        for option in ["unbindable", "runbindable"] {
            assert_eq!(
                RequestedPropagation::from_options(&["rprivate", option]),
                RequestedPropagation::Unbindable
            );
        }
    }
}

#[cfg(test)]
mod view_tests {
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
            .map(|b| (b.index, b.source().to_str().unwrap()))
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
                view.binds()[0].index
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
            &view.rootfs_propagation,
            &RootfsPropagation::Set("rslave".to_owned())
        );
        let json =
            br#"{"annotations":{"a":"1"},"annotations":null,"linux":{"rootfsPropagation":"rslave"},"linux":null}"#;
        let view = SpecView::from_bytes(json).unwrap();
        assert_eq!(
            (view.annotation("a"), &view.rootfs_propagation),
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
            .map(|bind| (bind.index, bind.leaves_flags))
            .collect();
        assert_eq!(seen, [(1, false), (2, true)]);
        assert_eq!(view.destinations, ["/a", "/b", ""]);
        assert_eq!(view.masked_paths, ["/proc/keys"]);
    }

    #[test]
    fn an_error_in_a_part_has_no_position_of_the_part() {
        for (spec, text) in [
            (
                r#"{"annotations": {"a": 5}}"#,
                "invalid type: integer `5`, expected a string",
            ),
            (
                r#"{"mounts": [{"type": "bind", "source": 7}]}"#,
                "invalid type: integer `7`, expected a string",
            ),
        ] {
            let Err(SpecError::Field { source, .. }) = SpecView::from_bytes(spec.as_bytes()) else {
                panic!("{spec} was read");
            };
            assert_eq!(source.to_string(), text);
        }
    }

    #[test]
    fn characters_that_json_forbids_in_a_string_are_an_error() {
        for text in ["\n", "\n\n", "\u{1f}"] {
            let json = format!(r#"{{"mounts":[{{"destination":"/a{text}"}}]}}"#);
            assert!(SpecView::from_bytes(json.as_bytes()).is_err(), "{text:?}");
        }
    }

    #[test]
    fn a_value_knows_its_place() {
        let bytes = br#"{"a": [1, 2] }"#;
        let object: RawObject<'_> = serde_json::from_slice(bytes).unwrap();
        let view = SpecView {
            bytes,
            ..SpecView::default()
        };
        let place = view.place(object.written("a").unwrap().get());
        assert_eq!(&bytes[place], b"[1, 2]");
    }
}
