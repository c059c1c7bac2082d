//! containerd's main file without bindguard, read and parsed, and the files that it imports.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use toml_edit::{Array, Document, Item};

use super::effective::Effective;
use super::former::{FormerTexts, Import};
use super::places;
use super::program::Containerd;
use crate::toml_text::{Place, parse, with_value};

/// The main file.
pub struct MainFile {
    /// Its path.
    pub path: PathBuf,
    /// Its text without bindguard; at least a version.
    pub text: String,
    /// The places where containerd may read runtimes, the likeliest first. containerd 2 reads the
    /// sections of version 3 from a file of version 2, too, as on AKS.
    pub places: Vec<Place>,
    /// 2, 3 or 4.
    pub version: i64,
    /// The files that it imports, in order, without bindguard.
    pub imports: Vec<Import>,
}

impl MainFile {
    /// Reads the main file. An empty or missing file gets the newest version that every containerd
    /// of its generation reads.
    pub fn read(path: &Path, containerd: &Containerd, former: &FormerTexts<'_>) -> Result<Self> {
        let newest = if containerd.version() < (2, 0) { 2 } else { 3 };
        let mut text = former.of(path)?.unwrap_or_default();
        if parse(&text)
            .with_context(|| format!("parse {}", path.display()))?
            .is_empty()
        {
            text = format!("{text}version = {newest}\n");
        }
        let document = parse(&text)?;
        ensure!(
            !names_in(&document, "disabled_plugins")
                .iter()
                .any(|plugin| plugin == "cri" || plugin.contains(".cri")),
            "{} disables the CRI plugin: no pods run on this containerd",
            path.display()
        );
        let version = document
            .get("version")
            .and_then(Item::as_integer)
            .unwrap_or_default();
        let Some(places) = places_of(version) else {
            bail!(
                "{} is not of version 2, 3 or 4: move it there first, containerd config migrate shows how",
                path.display()
            );
        };
        let mut main = Self {
            path: path.to_owned(),
            text,
            places,
            version,
            imports: Vec::new(),
        };
        main.imports = main.imports_without_bindguard(containerd, former)?;
        let mut texts = Vec::new();
        for import in &main.imports {
            texts.push(former.of(&import.path)?.unwrap_or_default());
        }
        texts.push(main.text.clone());
        // The sort is stable: a section of the main file comes before a section of an import.
        for text in texts {
            let document = parse(&text).with_context(|| format!("parse {}", path.display()))?;
            main.places
                .sort_by_key(|place| !has_section(&document, place));
        }
        Ok(main)
    }

    /// The files that a main file's text imports, as they are now.
    pub fn imports_of(path: &Path, text: &str) -> Result<Vec<PathBuf>> {
        let files = patterns(path, text)?
            .into_iter()
            .flat_map(|pattern| expanded(&pattern));
        Ok(files.filter(|file| file != path).collect())
    }

    /// The folders of the imports of the form `FOLDER/*.toml`.
    pub fn drop_in_folders(&self) -> Result<Vec<PathBuf>> {
        let is_folder =
            |pattern: &PathBuf| pattern.file_name().is_some_and(|name| name == "*.toml");
        let folders = patterns(&self.path, &self.text)?
            .into_iter()
            .filter(is_folder);
        Ok(folders
            .filter_map(|pattern| pattern.parent().map(Path::to_owned))
            .collect())
    }

    /// The effective configuration with this text as the main file.
    pub fn effective_with(&self, containerd: &Containerd, text: &str) -> Result<Effective> {
        let mut read = Vec::new();
        for import in &self.imports {
            read.push(import.read.clone());
        }
        containerd.effective(&self.path, &with_imports(text, &read)?)
    }

    /// The effective configuration with `copy` in the place of an import, which may be a new file.
    pub fn effective_with_import(
        &self,
        containerd: &Containerd,
        path: &Path,
        copy: PathBuf,
    ) -> Result<Effective> {
        let mut imports = Vec::new();
        for pattern in patterns(&self.path, &self.text)? {
            let mut files = expanded(&pattern);
            if matches(&pattern, path) && !files.iter().any(|file| file == path) {
                files.push(path.to_owned());
                files.sort();
            }
            for file in files {
                let known = self.imports.iter().find(|import| import.path == file);
                if file == path {
                    imports.push(copy.clone());
                } else if let Some(import) = known {
                    imports.push(import.read.clone());
                }
            }
        }
        containerd.effective(&self.path, &with_imports(&self.text, &imports)?)
    }

    /// The last import that names a default runtime.
    pub fn names_default(&self, former: &FormerTexts<'_>) -> Result<Option<PathBuf>> {
        for import in self.imports.iter().rev() {
            let text = former.of(&import.path)?.unwrap_or_default();
            for place in places() {
                if place.default_in(&text)?.is_some() {
                    return Ok(Some(import.path.clone()));
                }
            }
        }
        Ok(None)
    }

    /// The file that makes `gone` the default, and its text with `name` as the default. `None` if no
    /// file does.
    pub fn with_default_instead_of(
        &self,
        gone: &str,
        name: &str,
        containerd: &Containerd,
        former: &FormerTexts<'_>,
    ) -> Result<Option<(PathBuf, String)>> {
        // the last file wins
        for import in self.imports.iter().rev() {
            let text = former.of(&import.path)?.unwrap_or_default();
            for place in &self.places {
                if place.default_in(&text)?.as_deref() != Some(gone) {
                    continue;
                }
                let text = place.with_default(&text, name)?;
                let copy = containerd.trial_file(&text)?;
                let after = self.effective_with_import(containerd, &import.path, copy)?;
                if after.default() == name {
                    return Ok(Some((import.path.clone(), text)));
                }
            }
        }
        for place in &self.places {
            if place.default_in(&self.text)?.as_deref() != Some(gone) {
                continue;
            }
            let text = place.with_default(&self.text, name)?;
            if self.effective_with(containerd, &text)?.default() == name {
                return Ok(Some((self.path.clone(), text)));
            }
        }
        Ok(None)
    }

    fn imports_without_bindguard(
        &self,
        containerd: &Containerd,
        former: &FormerTexts<'_>,
    ) -> Result<Vec<Import>> {
        let mut imports = Vec::new();
        for path in Self::imports_of(&self.path, &self.text)? {
            if !former.is_changed(&path)? {
                imports.push(Import {
                    read: path.clone(),
                    path,
                });
            } else if let Some(text) = former.of(&path)? {
                imports.push(Import {
                    read: containerd.trial_file(&text)?,
                    path,
                });
            }
        }
        Ok(imports)
    }
}

/// The places of runtimes, that of this version of the file first.
fn places_of(version: i64) -> Option<Vec<Place>> {
    let [v2, v3] = places();
    match version {
        2 => Some(vec![v2, v3]),
        // version 4, of containerd 2.3 and newer, moves the sections of servers, and not those of
        // the CRI
        3 | 4 => Some(vec![v3, v2]),
        _ => None,
    }
}

/// True if a file has settings of containerd's CRI plugin in the section of this place.
pub fn has_section(document: &Document<&str>, place: &Place) -> bool {
    let mut item = Some(document.as_item());
    for key in place.section() {
        item = item.and_then(|item| item.get(key));
    }
    item.is_some()
}

/// The text with these imports, if it has imports. The paths are absolute, because a trial file is
/// in a different folder.
pub fn with_imports(text: &str, imports: &[PathBuf]) -> Result<String> {
    if imports.is_empty() && parse(text)?.get("imports").is_none() {
        return Ok(text.to_owned());
    }
    let list = imports
        .iter()
        .map(|path| path.display().to_string())
        .collect::<Array>();
    Ok(with_value(
        text,
        &["imports"],
        toml_edit::Value::from(list).to_string().trim(),
    )?)
}

fn patterns(path: &Path, text: &str) -> Result<Vec<PathBuf>> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    let document = parse(text).with_context(|| format!("parse {}", path.display()))?;
    Ok(names_in(&document, "imports")
        .iter()
        .map(|pattern| folder.join(pattern))
        .collect())
}

fn names_in(document: &Document<&str>, key: &str) -> Vec<String> {
    let array = document.get(key).and_then(Item::as_array);
    array
        .into_iter()
        .flatten()
        .filter_map(|name| name.as_str().map(str::to_owned))
        .collect()
}

/// A path, or the files that match the `*` in its last part.
fn expanded(pattern: &Path) -> Vec<PathBuf> {
    let name = pattern.file_name().unwrap_or_default();
    if !name.to_string_lossy().contains('*') {
        return vec![pattern.to_owned()];
    }
    let entries = pattern
        .parent()
        .and_then(|folder| folder.read_dir().ok())
        .into_iter()
        .flatten()
        .flatten();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    files.retain(|path| matches(pattern, path));
    files.sort();
    files
}

/// True if the file is in the pattern's folder and matches the `*` in its last part.
fn matches(pattern: &Path, file: &Path) -> bool {
    let wanted = pattern.file_name().unwrap_or_default().to_string_lossy();
    let Some((start, end)) = wanted.split_once('*') else {
        return pattern == file;
    };
    let name = file.file_name().and_then(|name| name.to_str());
    pattern.parent() == file.parent()
        && name.is_some_and(|name| {
            !name.starts_with('.') && name.starts_with(start) && name.ends_with(end)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `cmd/containerd/server/config/config.go` of containerd v2.3.4.
    #[test]
    fn version_4_has_the_runtimes_of_version_3() {
        assert_eq!(places_of(4), places_of(3));
        assert!(places_of(2).is_some() && places_of(2) != places_of(3));
        assert_eq!(
            (places_of(0), places_of(1), places_of(5)),
            (None, None, None)
        );
    }
}
