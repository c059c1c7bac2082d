//! containerd's main file, read and parsed, and the files that it imports.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use toml_edit::{Array, Document, Item};

use super::effective::Effective;
use super::places;
use super::program::Containerd;
use crate::install::change;
use crate::install::toml_text::{Place, parse, with_root_value};

/// The main file.
pub struct MainFile {
    /// Its path.
    pub path: PathBuf,
    /// Its text; at least a version.
    pub text: String,
    /// The place of runtimes in this version of the file.
    pub place: Place,
    /// The CRI plugin's section in this version.
    pub plugin: &'static str,
    /// 2 or 3.
    pub version: i64,
}

impl MainFile {
    /// Reads the main file. An empty or missing one gets the newest version.
    pub fn read(path: &Path, containerd: &Containerd) -> Result<Self> {
        let newest = if containerd.version() < (2, 0) { 2 } else { 3 };
        let bytes = change::read(path)?.unwrap_or_default();
        let mut text = String::from_utf8(bytes).map_err(|_| anyhow!("{} is not text", path.display()))?;
        if parse(&text).with_context(|| format!("parse {}", path.display()))?.is_empty() {
            text = format!("{text}version = {newest}\n");
        }
        let document = parse(&text)?;
        ensure!(
            !names_in(&document, "disabled_plugins").iter().any(|plugin| plugin == "cri" || plugin.contains(".cri")),
            "{} disables the CRI plugin: no pods run on this containerd",
            path.display()
        );
        let [v2, v3] = places();
        let (place, plugin, version) = match document.get("version").and_then(Item::as_integer) {
            Some(2) => (v2, "io.containerd.grpc.v1.cri", 2),
            Some(3) => (v3, "io.containerd.cri.v1.runtime", 3),
            _ => bail!(
                "{} is not of version 2 or 3: move it there first, containerd config migrate shows how",
                path.display()
            ),
        };
        Ok(Self { path: path.to_owned(), text, place, plugin, version })
    }

    /// The files that it imports, in order.
    pub fn imports(&self) -> Result<Vec<PathBuf>> {
        let patterns = self.patterns()?;
        Ok(patterns.iter().flat_map(|pattern| expanded(pattern)).filter(|path| *path != self.path).collect())
    }

    /// The folders from which it imports every `*.toml`.
    pub fn drop_in_folders(&self) -> Result<Vec<PathBuf>> {
        let is_folder = |pattern: &PathBuf| pattern.file_name().is_some_and(|name| name == "*.toml");
        let folders = self.patterns()?.into_iter().filter(is_folder);
        Ok(folders.filter_map(|pattern| pattern.parent().map(Path::to_owned)).collect())
    }

    /// The effective configuration with another main text, and with these files as its only imports.
    pub fn effective_with_imports(&self, containerd: &Containerd, imports: &[PathBuf]) -> Result<Effective> {
        let list = imports.iter().map(|path| path.display().to_string()).collect::<Array>();
        let text = with_root_value(&self.text, "imports", toml_edit::Value::from(list).to_string().trim())?;
        containerd.effective_with(&self.path, &text)
    }

    fn patterns(&self) -> Result<Vec<PathBuf>> {
        let folder = self.path.parent().unwrap_or(Path::new("/"));
        Ok(names_in(&parse(&self.text)?, "imports").iter().map(|pattern| folder.join(pattern)).collect())
    }
}

fn names_in(document: &Document<&str>, key: &str) -> Vec<String> {
    let array = document.get(key).and_then(Item::as_array);
    array.into_iter().flatten().filter_map(|name| name.as_str().map(str::to_owned)).collect()
}

/// A path, or the files that match the `*` in its last part.
fn expanded(pattern: &Path) -> Vec<PathBuf> {
    let name = pattern.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let Some((start, end)) = name.split_once('*') else { return vec![pattern.to_owned()] };
    let entries = pattern.parent().and_then(|folder| folder.read_dir().ok()).into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    files.retain(|path| {
        path.file_name()
            .and_then(|name| name.to_str())
            .is_some_and(|name| !name.starts_with('.') && name.starts_with(start) && name.ends_with(end))
    });
    files.sort();
    files
}
