//! Edits of a spec, by splices: the bytes outside the edited values are unchanged.

use std::ops::Range;
use std::path::PathBuf;

use serde_json::value::RawValue;

use crate::spec::Bind;
use crate::spec::RequestedPropagation;
use crate::spec::SpecView;
use crate::spec::read::{RawObject, Text, place};

const RSLAVE: &str = "\"rslave\"";

/// A change to a spec. A bind is identified by its position in `mounts`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SpecEdit {
    /// Point the bind's source at another path.
    Source {
        /// Position in `mounts`.
        bind: usize,
        to: PathBuf,
    },
    /// Make the bind rslave.
    BindRslave {
        /// Position in `mounts`.
        bind: usize,
    },
    /// Set `linux.rootfsPropagation` to rslave.
    RootfsRslave,
}

/// The reason for which an edit could not be written.
#[derive(Debug, thiserror::Error)]
pub enum EditError {
    /// The edit's position in `mounts` is not a bind.
    #[error("edit mounts[{0}]: it is no bind of this spec")]
    NoSuchBind(usize),
    /// JSON strings contain Unicode; this path is not Unicode.
    #[error("write {} as the source of mounts[{bind}]: it is not UTF-8", to.display())]
    NotUtf8 {
        /// Position in `mounts`.
        bind: usize,
        to: PathBuf,
    },
}

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
            splices.extend(self.splices(edit)?);
        }
        splices.sort_by_key(|(range, _)| (range.start, range.end));
        splices.dedup();
        let mut out = Vec::with_capacity(self.bytes().len() + 64 * splices.len());
        let mut done = 0;
        for (range, text) in splices {
            out.extend_from_slice(&self.bytes()[done..range.start]);
            out.extend_from_slice(text.as_bytes());
            done = range.end;
        }
        out.extend_from_slice(&self.bytes()[done..]);
        Ok(out)
    }

    fn splices(&self, edit: &SpecEdit) -> Result<Vec<Splice>, EditError> {
        match edit {
            SpecEdit::Source { bind, to } => {
                let not_utf8 = || EditError::NotUtf8 {
                    bind: *bind,
                    to: to.clone(),
                };
                let path = to.to_str().ok_or_else(not_utf8)?;
                let quoted = serde_json::Value::from(path).to_string();
                Ok(vec![(
                    self.place(self.bind(*bind)?.written().source),
                    quoted,
                )])
            }
            SpecEdit::BindRslave { bind } => Ok(self.bind_rslave(self.bind(*bind)?)),
            SpecEdit::RootfsRslave => Ok(self.rootfs_rslave().into_iter().collect()),
        }
    }

    fn bind(&self, index: usize) -> Result<&Bind<'_>, EditError> {
        self.binds()
            .iter()
            .find(|b| b.index() == index)
            .ok_or(EditError::NoSuchBind(index))
    }

    fn place(&self, written: &str) -> Range<usize> {
        place(self.bytes(), written)
    }

    fn bind_rslave(&self, bind: &Bind<'_>) -> Vec<Splice> {
        let Some(written) = bind.written().options else {
            let behind_source = self.place(bind.written().source).end;
            return vec![(
                behind_source..behind_source,
                format!(",\"options\":[{RSLAVE}]"),
            )];
        };
        let options = options(written);
        let Some(last) = options.last().map(|last| self.place(last).end) else {
            return vec![self.first_option(written)];
        };
        // runc applies propagation options in turn: every option that lowers propagation must go.
        let lowering: Vec<Splice> = options
            .into_iter()
            .filter(|option| keeps_host_mounts_alive(option))
            .map(|option| (self.place(option), RSLAVE.to_owned()))
            .collect();
        if lowering.is_empty() {
            vec![(last..last, format!(",{RSLAVE}"))]
        } else {
            lowering
        }
    }

    /// An empty array keeps the white space between its brackets; null becomes an array.
    fn first_option(&self, written: &str) -> Splice {
        let place = self.place(written);
        if written.starts_with('[') {
            let behind_bracket = place.start + 1;
            return (behind_bracket..behind_bracket, RSLAVE.to_owned());
        }
        (place, format!("[{RSLAVE}]"))
    }

    /// Never returns `None`: an earlier step parsed the bytes as an object.
    fn rootfs_rslave(&self) -> Option<Splice> {
        let key = format!("\"rootfsPropagation\":{RSLAVE}");
        let spec: RawObject<'_> = serde_json::from_slice(self.bytes()).ok()?;
        let Some(linux) = spec.written("linux") else {
            let brace = 1 + self.bytes().iter().position(|b| *b == b'{')?;
            return Some((
                brace..brace,
                format!("\"linux\":{{{key}}}{}", comma_before(&spec)),
            ));
        };
        if linux.get() == "null" {
            return Some((self.place(linux.get()), format!("{{{key}}}")));
        }
        let object: RawObject<'_> = serde_json::from_str(linux.get()).ok()?;
        Some(match object.written("rootfsPropagation") {
            Some(value) => (self.place(value.get()), RSLAVE.to_owned()),
            None => {
                let behind_brace = self.place(linux.get()).start + 1;
                (
                    behind_brace..behind_brace,
                    format!("{key}{}", comma_before(&object)),
                )
            }
        })
    }
}

fn comma_before(keys: &RawObject<'_>) -> &'static str {
    if keys.is_empty() { "" } else { "," }
}

/// Splits the options into their JSON texts. An earlier step parsed them as a list of strings.
fn options(written: &str) -> Vec<&str> {
    let options: Option<Vec<&RawValue>> = serde_json::from_str(written).unwrap_or_default();
    options
        .unwrap_or_default()
        .into_iter()
        .map(RawValue::get)
        .collect()
}

fn keeps_host_mounts_alive(option: &str) -> bool {
    let option: Option<Text<'_>> = serde_json::from_str(option).unwrap_or_default();
    let requested = option.and_then(|Text(option)| RequestedPropagation::from_option(&option));
    requested.is_some_and(RequestedPropagation::keeps_host_mounts_alive)
}
