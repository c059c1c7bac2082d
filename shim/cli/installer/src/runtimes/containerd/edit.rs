//! The edits that could give containerd the handler, and their trial: containerd's own `config
//! dump` decides.
//!
//! | file | when |
//! |---|---|
//! | a drop-in of bindguard's own | the main file imports a folder, and this containerd merges what is in it |
//! | the main file | no program generates the file |
//! | an import with the CRI plugin's section | containerd 1.6 and 1.7 take the whole section from it |

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use bindguard_core::program_names::RUNTIME;
use bindguard_core::text::shell_word;

use super::effective::{Effective, Meant};
use super::former::FormerTexts;
use super::handler::as_item;
use super::main_file::{MainFile, has_section};
use super::program::Containerd;
use crate::runtimes::runtime_drop_in::HEADING;
use crate::toml_text::{Place, parse};

/// The name of the drop-in. containerd reads the files of a folder in the order of their names, and
/// the last default wins: GPU toolkits write `99-nvidia.toml`.
pub const DROP_IN: &str = "zz-bindguard.toml";
/// The name that older versions gave to the drop-in.
pub const FORMER_DROP_IN: &str = "50-bindguard.toml";

/// A file and its new text.
pub type Edited = (PathBuf, String);

/// An installation that is being planned.
pub struct Trial<'a> {
    /// The containerd that evaluates the edited files.
    pub containerd: &'a Containerd,
    /// Its main file.
    pub main: &'a MainFile,
    /// The place of the handler in the edited file.
    pub place: &'a Place,
    /// The files without bindguard.
    pub former: &'a FormerTexts<'a>,
    /// The effective configuration without bindguard.
    pub before: &'a Effective,
    /// The intended change.
    pub meant: &'a Meant,
}

impl Trial<'_> {
    /// True if the files have this effect as they are.
    pub fn is_done(&self, now: &Effective) -> bool {
        self.before.surprises(now, self.meant).is_empty()
    }

    /// The planned drop-in, in a folder that the main file imports. `None` if containerd would not
    /// merge the drop-in.
    pub fn drop_in(&self) -> Result<Option<Edited>> {
        for folder in self.main.drop_in_folders()? {
            let path = folder.join(DROP_IN);
            let text = self.drop_in_text(&path)?;
            let copy = self.containerd.trial_file(&text)?;
            let after = self
                .main
                .effective_with_import(self.containerd, &path, copy)?;
            if self.is_done(&after) {
                return Ok(Some((path, text)));
            }
        }
        Ok(None)
    }

    /// The drop-in's text: the present text plus the handler, or a new text.
    pub fn drop_in_text(&self, path: &Path) -> Result<String> {
        let text = self
            .former
            .of(path)?
            .unwrap_or_else(|| format!("{HEADING}version = {}\n", self.main.version));
        self.with_handler(&text)
            .with_context(|| format!("edit {}", path.display()))
    }

    /// The main file.
    pub fn main(&self) -> Result<Option<Edited>> {
        let effective = |text: &str| self.main.effective_with(self.containerd, text);
        let text = self.until_right(&self.main.text, &self.main.path, effective)?;
        Ok(text.map(|text| (self.main.path.clone(), text)))
    }

    /// An import that has the CRI plugin's section.
    pub fn import(&self) -> Result<Option<Edited>> {
        for import in self.main.imports.iter().map(|import| &import.path) {
            let Some(text) = self.former.of(import)? else {
                continue;
            };
            let document = parse(&text).with_context(|| format!("parse {}", import.display()))?;
            if !has_section(&document, self.place) {
                continue;
            }
            let effective = |text: &str| {
                self.main.effective_with_import(
                    self.containerd,
                    import,
                    self.containerd.trial_file(text)?,
                )
            };
            if let Some(text) = self.until_right(&text, import, effective)? {
                return Ok(Some((import.clone(), text)));
            }
        }
        Ok(None)
    }

    /// The error if no file can be edited.
    pub fn refused(&self) -> Result<Edited> {
        bail!(
            "no edit of {} or its imports gives containerd a runtime {RUNTIME:?}, so nothing was changed: {}",
            self.main.path.display(),
            self.next_step()
        )
    }

    fn next_step(&self) -> String {
        if self.containerd.version() < (2, 0) || self.main.version > 2 {
            return "edit the file by hand, as docs/install.md of bindguard shows".to_owned();
        }
        let path = shell_word(&self.main.path);
        format!(
            "replace the file's text by that of `containerd --config {path} config migrate`, and install again"
        )
    }

    /// The text with the handler, and with the default if that is meant.
    pub fn with_handler(&self, text: &str) -> Result<String> {
        let place = self.place;
        let mut edited = text.to_owned();
        if self.before.runtime(RUNTIME).as_ref() != Some(&self.meant.handler) {
            edited = place.with_runtime(&edited, RUNTIME, &as_item(&self.meant.handler))?;
        }
        if let Some(default) = &self.meant.default
            && self.before.default() != default
        {
            edited = place.with_default(&edited, default)?;
        }
        Ok(edited)
    }

    /// The text with the handler, and with the runtimes that would be lost by naming it. `None` if
    /// containerd does not take its runtimes from this file.
    fn until_right(
        &self,
        text: &str,
        path: &Path,
        effective: impl Fn(&str) -> Result<Effective>,
    ) -> Result<Option<String>> {
        let doing = || format!("edit {}", path.display());
        let mut edited = self.with_handler(text).with_context(doing)?;
        let mut after = effective(&edited)?;
        if after.runtime(RUNTIME).as_ref() != Some(&self.meant.handler) {
            return Ok(None);
        }
        let lost: Vec<_> = self.before.lost_in(&after).collect();
        for (name, table) in lost {
            edited = self
                .place
                .with_runtime(&edited, name, &as_item(&table))
                .with_context(doing)?;
            after = effective(&edited)?;
        }
        let surprises = self.before.surprises(&after, self.meant);
        if after.default()
            != self
                .meant
                .default
                .as_deref()
                .unwrap_or(self.before.default())
            && let Some(later) = self.main.names_default(self.former)?
        {
            bail!(
                "make bindguard containerd's default: {} names the default {:?}, and containerd reads that file after {}; remove default_runtime_name from the file, or run this without --default",
                later.display(),
                after.default(),
                path.display()
            );
        }
        ensure!(
            surprises.is_empty(),
            "with {} edited, containerd config dump differs in more than was meant ({}), so nothing was changed: {}",
            path.display(),
            surprises.join(", "),
            self.next_step()
        );
        Ok(Some(edited))
    }
}
