//! containerd's files without the edits of an earlier install.
//!
//! An installation is planned from these texts, so the result depends only on the options.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::change::{self, Content};
use crate::record::Record;

use super::cleaned;

/// The texts from before the first install.
pub struct FormerTexts<'r>(pub &'r Record);

impl FormerTexts<'_> {
    /// The text of a file without bindguard in it; `None` if there is no file, or install made it.
    pub fn of(&self, path: &Path) -> Result<Option<String>> {
        let path = change::resolved(path);
        let Some(present) = change::read(&path)? else {
            return Ok(None);
        };
        let doing = || format!("read {}", path.display());
        let entry = self.0.entry(&path);
        let original = entry.map(|entry| entry.original()).transpose()?.flatten();
        let original = original.as_ref().and_then(Content::bytes);
        if entry.is_some_and(|entry| entry.is_as_written(&Content::File(present.clone()))) {
            return original
                .map(|bytes| String::from_utf8(bytes.to_vec()).with_context(doing))
                .transpose();
        }
        let original =
            String::from_utf8(original.unwrap_or_default().to_vec()).with_context(doing)?;
        let present = String::from_utf8(present).with_context(doing)?;
        // a template is no TOML, and has no lines of bindguard's outside of its block
        Ok(Some(cleaned(&present, &original).unwrap_or(present)))
    }

    /// True if the file has something of bindguard's.
    pub fn is_changed(&self, path: &Path) -> Result<bool> {
        let present = change::read(&change::resolved(path))?;
        Ok(self.of(path)?.map(String::into_bytes) != present)
    }
}

/// A file that containerd imports, and the file that it reads in a trial.
#[derive(Debug, Clone)]
pub struct Import {
    /// The path on the node.
    pub path: PathBuf,
    /// The same, or a copy without bindguard.
    pub read: PathBuf,
}
