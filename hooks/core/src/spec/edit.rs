//! Edits of a spec, by splices: the bytes outside the edited values are unchanged.

use std::ops::Range;
use std::path::PathBuf;

use serde_json::value::RawValue;

use crate::spec::read::{RawObject, Text, parsed, place};
use crate::spec::{Bind, RequestedPropagation, SpecView};

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

    fn splices(&self, edit: &SpecEdit) -> Result<Vec<Splice>, EditError> {
        let bind = |index: usize| {
            let bind = self.binds.iter().find(|bind| bind.index == index);
            bind.ok_or(EditError::NoSuchBind(index))
        };
        match edit {
            SpecEdit::Source { bind: index, to } => {
                let path = to.to_str().ok_or_else(|| EditError::NotUtf8 {
                    bind: *index,
                    to: to.clone(),
                })?;
                let quoted = serde_json::Value::from(path).to_string();
                Ok(vec![(self.place(bind(*index)?.written_source), quoted)])
            }
            SpecEdit::BindRslave { bind: index } => Ok(self.bind_rslave(bind(*index)?)),
            SpecEdit::RootfsRslave => Ok(self.rootfs_rslave().into_iter().collect()),
        }
    }

    fn place(&self, written: &str) -> Range<usize> {
        place(self.bytes, written)
    }

    fn bind_rslave(&self, bind: &Bind<'_>) -> Vec<Splice> {
        let Some(written) = bind.written_options else {
            let end = self.place(bind.written_source).end;
            return vec![(end..end, format!(",\"options\":[{RSLAVE}]"))];
        };
        // An earlier step parsed the options as a list of strings.
        let options: Option<Vec<&RawValue>> = serde_json::from_str(written).unwrap_or_default();
        let options = options.unwrap_or_default();
        let Some(last) = options.last() else {
            let place = self.place(written);
            // An empty array keeps the white space between its brackets; null becomes an array.
            return match written.starts_with('[') {
                true => vec![(place.start + 1..place.start + 1, RSLAVE.to_owned())],
                false => vec![(place, format!("[{RSLAVE}]"))],
            };
        };
        // runc applies propagation options in turn: every option that lowers propagation must go.
        let mut lowering = Vec::new();
        for option in &options {
            let text: Option<Text<'_>> = parsed(option).unwrap_or_default();
            let requested = text.and_then(|text| RequestedPropagation::from_option(&text.0));
            if requested.is_some_and(RequestedPropagation::keeps_host_mounts_alive) {
                lowering.push((self.place(option.get()), RSLAVE.to_owned()));
            }
        }
        if lowering.is_empty() {
            let end = self.place(last.get()).end;
            lowering.push((end..end, format!(",{RSLAVE}")));
        }
        lowering
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
