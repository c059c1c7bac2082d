//! Finds the files whose prose is checked.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;

/// Folders without prose of this project: build output, captured data, fuzzing seeds.
const SKIPPED: [&str; 4] = ["target", "fixtures", "seeds", ".git"];

/// The language that a file is written in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Rust whose string literals are messages to a user.
    Program,
    /// Rust of tests, the demo and the bench: only its comments are checked.
    Test,
    /// A document in Markdown.
    Document,
    /// Comments that begin with `#`: shell, TOML, YAML, make.
    Hash,
}

/// A file and its text.
#[derive(Debug)]
pub struct File {
    /// Relative to the repository.
    pub path: PathBuf,
    /// Decides where its prose is.
    pub kind: Kind,
    /// All of it.
    pub text: String,
}

/// Every file with prose below `root`, in order of the path.
pub fn files(root: &Path) -> anyhow::Result<Vec<File>> {
    let mut found = Vec::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).with_context(|| format!("list {}", folder.display()))? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if SKIPPED.contains(&&*name) {
                continue;
            }
            if path.is_dir() {
                folders.push(path);
            } else if let Some(kind) = kind(path.strip_prefix(root)?, &name) {
                let text = fs::read_to_string(&path)
                    .with_context(|| format!("read {}", path.display()))?;
                found.push(File {
                    path: path.strip_prefix(root)?.to_owned(),
                    kind,
                    text,
                });
            }
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(found)
}

fn kind(path: &Path, name: &str) -> Option<Kind> {
    // The list of words that are not to be used names them.
    if path.ends_with("language/words.rs") || path.ends_with("language/rules.rs") {
        return None;
    }
    let is_test = path.starts_with("integration")
        || path.iter().any(|part| part == "tests" || part == "benches");
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("rs") if is_test => Some(Kind::Test),
        Some("rs") => Some(Kind::Program),
        Some("md") => Some(Kind::Document),
        Some("sh" | "toml" | "yaml" | "conf" | "dict") => Some(Kind::Hash),
        _ if [
            "Makefile",
            "Dockerfile",
            "run",
            "postinst",
            "postrm",
            "prerm",
        ]
        .contains(&name) =>
        {
            Some(Kind::Hash)
        }
        _ => None,
    }
}
