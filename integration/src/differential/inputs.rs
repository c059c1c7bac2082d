//! The inputs of both builds: captured files, fuzz seeds, and the texts of the tests.
//!
//! A test's texts are the string literals of its source: a new test of a reader is a new input here
//! without a line of code. A literal with a placeholder of `format!` is an input, too: readers have
//! to answer it.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::doc_commands::repository;

/// Bytes for a reader.
#[derive(Clone, Debug)]
pub(super) struct Input {
    /// Its file below the repository; for a literal with the line.
    pub name: String,
    /// All of it.
    pub bytes: Vec<u8>,
}

/// The inputs by the reader that gets them.
#[derive(Debug, Default)]
pub(super) struct Inputs {
    /// JSON: specs, and files of Docker.
    pub json: Vec<Input>,
    /// bindguard's own config.
    pub configs: Vec<Input>,
    pub containerd: Vec<Input>,
    /// Texts of `/proc/PID/mountinfo`.
    pub mount_tables: Vec<Input>,
}

/// Reads all inputs of the repository, and the specs of a folder.
pub(super) fn read(specs: Option<&Path>) -> Result<Inputs> {
    let root = repository();
    let mut inputs = Inputs::default();
    for folder in ["config", "hooks", "integration", "shim"] {
        for path in files_below(&root.join(folder))? {
            let name = path.strip_prefix(&root).unwrap_or(&path);
            let name = name.display().to_string();
            if path.is_symlink() {
                continue;
            }
            let bytes = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
            inputs.add_file(name, bytes);
        }
    }
    for path in specs.map(files_below).transpose()?.unwrap_or_default() {
        let bytes = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
        let name = format!("SPECS/{}", path.file_name().unwrap_or_default().display());
        inputs.json.push(Input { name, bytes });
    }
    for kind in [
        &mut inputs.json,
        &mut inputs.configs,
        &mut inputs.containerd,
        &mut inputs.mount_tables,
    ] {
        let mut seen = BTreeSet::new();
        kind.retain(|input| seen.insert(input.bytes.clone()));
    }
    Ok(inputs)
}

impl Inputs {
    fn add_file(&mut self, name: String, bytes: Vec<u8>) {
        let is_captured = name.contains("/fixtures/") || name.contains("/seeds/");
        let file_name = name.rsplit('/').next().unwrap_or_default().to_owned();
        if name.ends_with(".rs") {
            let literals = literals(&String::from_utf8_lossy(&bytes));
            for (number, (line, text)) in literals.into_iter().enumerate() {
                self.add_literal(format!("{name}:{line} #{number}"), text);
            }
        } else if is_captured && (name.contains("mountinfo") || file_name.starts_with("race-")) {
            self.mount_tables.push(Input { name, bytes });
        } else if is_captured && (name.ends_with(".json") || name.contains("/spec/")) {
            self.json.push(Input { name, bytes });
        } else if name.starts_with("config/containerd/") || name.contains("/seeds/containerd/") {
            self.containerd.push(Input { name, bytes });
        } else if name == "config/config.toml" || name.contains("/seeds/config/") {
            self.configs.push(Input { name, bytes });
        }
    }

    fn add_literal(&mut self, name: String, text: String) {
        const TABLES: [&str; 9] = [
            "agent",
            "annotations",
            "checks",
            "guard",
            "host-root",
            "journal",
            "kubelet",
            "refresh",
            "runtime",
        ];
        let begins = text
            .trim_start()
            .trim_start_matches(['{', '['])
            .trim_start();
        let is_json = text.trim_start().starts_with(['{', '['])
            && (begins.starts_with('"') || ["{}", "[]"].contains(&text.trim()));
        let mut of_containerd = false;
        let mut is_config = false;
        for line in text.lines() {
            of_containerd |= line.starts_with("[plugins") || line.starts_with("version = ");
            for table in TABLES {
                let rest = line.trim().trim_start_matches('[').strip_prefix(table);
                let Some(rest) = rest else { continue };
                is_config |= line.trim().starts_with('[') && rest.starts_with([']', '.'])
                    || rest.starts_with([' ', '.']) && rest.contains(" = ");
            }
        }
        let input = Input {
            name,
            bytes: text.into_bytes(),
        };
        if is_json {
            self.json.push(input);
        } else if of_containerd {
            self.containerd.push(input);
        } else if is_config {
            self.configs.push(input);
        }
    }
}

/// All files below a folder but build outputs, sorted.
pub(super) fn files_below(folder: &Path) -> Result<Vec<PathBuf>> {
    let (mut found, mut folders) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(folder) = folders.pop() {
        let entries =
            fs::read_dir(&folder).with_context(|| format!("list {}", folder.display()))?;
        for entry in entries {
            let path = entry?.path();
            let is_folder = path.symlink_metadata().is_ok_and(|found| found.is_dir());
            if !is_folder {
                found.push(path);
            } else if !path.ends_with("target") {
                folders.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}

/// The string literals of Rust source, each with its line. Escapes that no test's text has stay as
/// they are.
fn literals(source: &str) -> Vec<(usize, String)> {
    let (mut found, mut rest) = (Vec::new(), source);
    while let Some(at) = rest.find(['"', '/', '\'']) {
        let before = &rest[..at];
        let line = 1 + source[..source.len() - rest.len() + at]
            .matches('\n')
            .count();
        rest = &rest[at..];
        let hashes = before.len() - before.trim_end_matches('#').len();
        let end;
        if rest.starts_with("//") {
            end = rest.find('\n').unwrap_or(rest.len());
        } else if rest.starts_with('"') && before[..before.len() - hashes].ends_with('r') {
            let close = format!("\"{}", "#".repeat(hashes));
            let length = rest[1..].find(&close).unwrap_or(rest.len() - 1);
            found.push((line, rest[1..][..length].to_owned()));
            end = (1 + length + close.len()).min(rest.len());
        } else if let Some(text) = rest.strip_prefix('"') {
            let mut length = 0;
            while let Some(next) = text[length..].find(['"', '\\']) {
                length += next;
                if text[length..].starts_with('"') {
                    break;
                }
                length += 2;
            }
            found.push((line, unescaped(&text[..length])));
            end = (length + 2).min(rest.len());
        } else if rest.starts_with("'\\") {
            end = 3 + rest[3..].find('\'').unwrap_or(0) + 1;
        } else if rest.starts_with("'\"'") {
            end = 3;
        } else {
            end = 1;
        }
        rest = &rest[end..];
    }
    found
}

fn unescaped(literal: &str) -> String {
    let (mut text, mut rest) = (String::new(), literal);
    while let Some((before, after)) = rest.split_once('\\') {
        text.push_str(before);
        let mut letters = after.chars();
        match letters.next() {
            Some('n') => text.push('\n'),
            Some('t') => text.push('\t'),
            Some('0') => text.push('\0'),
            Some('\n') => {
                rest = after.trim_start();
                continue;
            }
            Some(letter @ ('"' | '\\')) => text.push(letter),
            other => text.extend(['\\'].into_iter().chain(other)),
        }
        rest = letters.as_str();
    }
    text + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_literal_is_read() {
        let source = r###"f('"', '\'', "a\n\"b\""); // "no"
            g::<'a>(r#"{"c": 'd'}"#, br"e\", "f \
               g");"###;
        let found: Vec<String> = literals(source).into_iter().map(|(_, text)| text).collect();
        assert_eq!(found, ["a\n\"b\"", "{\"c\": 'd'}", "e\\", "f g"]);
        assert_eq!(literals("\n\"x\""), [(2, "x".to_owned())]);
    }
}
