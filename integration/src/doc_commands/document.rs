//! Reading commands out of a document.
//!
//! A command may span lines by a backslash, and may hold a here-document.

use std::fs;

use anyhow::{Context, Result};

use super::repository;

/// A command of a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DocCommand {
    /// The line of the document that it begins on, counted from 1.
    pub line: usize,
    /// The verbatim text, with continuation lines.
    pub text: String,
}

/// The commands of a document, in their order. `name` is its path from the repository's top.
pub fn commands_of(name: &str) -> Result<Vec<DocCommand>> {
    let path = repository().join(name);
    let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    Ok(commands_in(&text))
}

/// Every document of the repository that shows commands, by its path from the top.
pub fn documents_with_commands() -> Result<Vec<String>> {
    let mut documents = all_documents()?;
    documents.retain(|name| commands_of(name).is_ok_and(|commands| !commands.is_empty()));
    Ok(documents)
}

/// Every document of the repository, by its path from the top.
pub fn all_documents() -> Result<Vec<String>> {
    let top = repository();
    let mut documents = Vec::new();
    let mut folders = vec![top.clone()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).with_context(|| format!("list {}", folder.display()))? {
            let path = entry
                .with_context(|| format!("list {}", folder.display()))?
                .path();
            let name = path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            if path.is_dir() && name != "target" && !name.starts_with('.') {
                folders.push(path);
            } else if name.ends_with(".md") {
                documents.push(path.strip_prefix(&top)?.to_string_lossy().into_owned());
            }
        }
    }
    documents.sort();
    Ok(documents)
}

/// Command lines of these programs in a document's blocks that are not `sh` blocks.
pub fn commands_outside_of_sh(name: &str, programs: &[&str]) -> Result<Vec<String>> {
    let path = repository().join(name);
    let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    let (mut language, mut found) = (None, Vec::new());
    for line in text.lines().map(str::trim_start) {
        match line.strip_prefix("```") {
            Some(word) => language = language.map_or(Some(word), |_| None),
            None => {
                let is_other = language.is_some_and(|language| language != "sh");
                let first = line.split_whitespace().next().unwrap_or_default();
                if is_other && programs.contains(&first) {
                    found.push(line.to_owned());
                }
            }
        }
    }
    Ok(found)
}

fn commands_in(document: &str) -> Vec<DocCommand> {
    let mut commands: Vec<DocCommand> = Vec::new();
    let (mut in_block, mut until) = (false, Until::LineEnd);
    for (index, line) in document.lines().enumerate() {
        let fence = line.trim_start();
        match (in_block, fence.starts_with("```")) {
            (false, true) => in_block = fence == "```sh",
            (true, true) => in_block = false,
            (false, false) => {}
            (true, false) => until = until.take(line, index + 1, &mut commands),
        }
        if !in_block {
            until = Until::LineEnd;
        }
    }
    commands
}

/// The end of the command that is being read.
#[derive(Debug)]
enum Until {
    LineEnd,
    /// The next line, too, belongs to it.
    Continued,
    /// A line with this word alone ends its here-document.
    Word(String),
}

impl Until {
    fn take(self, line: &str, number: usize, commands: &mut Vec<DocCommand>) -> Self {
        let joins = !matches!(self, Self::LineEnd);
        if !joins && (line.trim().is_empty() || line.trim_start().starts_with('#')) {
            return Self::LineEnd;
        }
        match commands.last_mut().filter(|_| joins) {
            Some(shown) => shown.text.push_str(&format!("\n{line}")),
            None => commands.push(DocCommand {
                line: number,
                text: line.trim_start().to_owned(),
            }),
        }
        match self {
            Self::Word(word) if line.trim() != word => Self::Word(word),
            Self::Word(_) => Self::LineEnd,
            Self::LineEnd | Self::Continued if line.ends_with('\\') => Self::Continued,
            Self::LineEnd | Self::Continued => {
                here_document(line).map_or(Self::LineEnd, Self::Word)
            }
        }
    }
}

/// The word that ends a here-document, if the line begins a here-document.
fn here_document(line: &str) -> Option<String> {
    let (_, after) = line.split_once("<<")?;
    let word = after.trim_start_matches('-').split_whitespace().next()?;
    Some(word.trim_matches(['\'', '"']).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_read_with_their_further_lines() {
        let document = "\n```sh\n# why\none --and \\\n  more\n\ntwo <<'END'\n# kept\nEND\nthree\n```\n\n```text\nno\n```\n  ```sh\n  four # said\n  ```\n";
        let commands = commands_in(document);
        let texts: Vec<&str> = commands.iter().map(|shown| shown.text.as_str()).collect();
        assert_eq!(
            texts,
            [
                "one --and \\\n  more",
                "two <<'END'\n# kept\nEND",
                "three",
                "four # said"
            ]
        );
        assert_eq!(commands[3].line, 17);
    }
}
