//! The commands that the documents show, run as they stand there.
//!
//! What somebody copies out of a document at night has to work. So a document's `sh` blocks hold commands and nothing
//! else (what is only looked at is `text` or `toml`), and a story a document runs every one of them:
//!
//! ```text
//! docs/runbook.md ── ```sh blocks ──► commands ── names replaced ──► sh -ec, as a process of a node
//! ```
//!
//! What cannot be run is in [`NOT_RUN`], each with the reason, and said aloud. A command may span lines by a backslash, and may hold a here-document. Words in capitals stand for names of the
//! reader's node (`UID`, `BUNDLE`); the story says what they are on its own.

use std::fmt;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::node::Node;
use crate::process::{Finished, run};

/// A command that a document shows and no story runs.
#[derive(Clone, Copy, Debug)]
pub struct NotRun {
    /// The document.
    pub document: &'static str,
    /// What the command begins with.
    pub command: &'static str,
    /// What is run in its place.
    pub instead: &'static str,
    /// Why.
    pub why: &'static str,
}

/// All of them.
pub const NOT_RUN: [NotRun; 6] = [
    NotRun {
        document: "README.md",
        command: "make demo",
        instead: "make --dry-run demo",
        why: "it builds; demo_leaves_nothing_behind.rs runs the demo",
    },
    NotRun {
        document: "README.md",
        command: "make test",
        instead: "make --dry-run test",
        why: "it is what runs the stories",
    },
    NotRun {
        document: "README.md",
        command: "make build",
        instead: "make --dry-run build",
        why: "it builds; what it builds is what the stories run",
    },
    NotRun {
        document: "integration/README.md",
        command: "sh integration/matrix/fetch.sh",
        instead: "sh -n integration/matrix/fetch.sh",
        why: "it fetches hundreds of megabytes; what it lays out is what the stories run",
    },
    NotRun {
        document: "integration/README.md",
        command: "cargo build --workspace",
        instead: "test -f Cargo.toml",
        why: "it builds",
    },
    NotRun {
        document: "integration/README.md",
        command: "cargo test -p bindguard-integration --test storm",
        instead: "test -f integration/tests/storm.rs",
        why: "it is a story beside this one",
    },
];

/// One command of a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shown {
    /// The line of the document that it begins on, counted from 1.
    pub line: usize,
    /// As it stands there; several lines where it spans them.
    pub text: String,
}

/// The commands of a document, in their order. `name` is its path from the repository's top.
pub fn commands_of(name: &str) -> Result<Vec<Shown>> {
    let path = repository().join(name);
    let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    Ok(commands_in(&text))
}

/// Every document of the repository that shows commands, by its path from the top.
pub fn documents_with_commands() -> Result<Vec<String>> {
    let top = repository();
    let mut documents = Vec::new();
    let mut folders = vec![top.clone()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).with_context(|| format!("list {}", folder.display()))? {
            let path = entry.with_context(|| format!("list {}", folder.display()))?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if path.is_dir() && name != "target" && !name.starts_with('.') {
                folders.push(path);
            } else if name.ends_with(".md") {
                documents.push(path.strip_prefix(&top)?.to_string_lossy().into_owned());
            }
        }
    }
    documents.retain(|name| commands_of(name).is_ok_and(|commands| !commands.is_empty()));
    documents.sort();
    Ok(documents)
}

/// What happens when systemd is asked for something.
type Done<'n> = Box<dyn Fn() -> Result<()> + 'n>;

/// A document's commands on a node.
pub struct Rehearsal<'n> {
    node: &'n Node,
    names: Vec<(String, String)>,
    instead: Vec<(String, String)>,
    may_not_tell: Vec<String>,
    environment: Vec<(String, String)>,
    systemd: Vec<(String, Done<'n>)>,
    folder: PathBuf,
}

impl<'n> Rehearsal<'n> {
    /// Commands run in the node's own folder, with its environment.
    pub fn on(node: &'n Node) -> Self {
        let (names, instead, may_not_tell, environment, systemd) = Default::default();
        let folder = node.disk().to_path_buf();
        Self { node, names, instead, may_not_tell, environment, systemd, folder }
    }

    /// What a word in the document is on this node. Whole words only.
    pub fn with(mut self, word: &str, value: &str) -> Self {
        self.names.push((word.to_owned(), value.to_owned()));
        self
    }

    /// For commands that begin with `beginning`, these words are run in its place: a program by its path, say.
    pub fn instead_of(mut self, beginning: &str, words: &str) -> Self {
        self.instead.push((beginning.to_owned(), words.to_owned()));
        self
    }

    /// A variable in the commands' environment.
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// What happens when `systemctl` is run with these words. A node has no systemd, and its `systemctl` writes down what it is
    /// asked for.
    pub fn systemd(mut self, words: &str, done: impl Fn() -> Result<()> + 'n) -> Self {
        self.systemd.push((words.to_owned(), Box::new(done)));
        self
    }

    /// Commands that begin so look at every process of the machine: where even root may not look at some, they say so, and
    /// exit with 2.
    pub fn looks_at_all_processes(mut self, beginning: &str) -> Self {
        if fs::metadata("/proc/1/ns/mnt").is_err() {
            self.may_not_tell.push(beginning.to_owned());
        }
        self
    }

    /// Another working directory.
    pub fn folder(self, folder: &Path) -> Self {
        Self { folder: folder.to_path_buf(), ..self }
    }

    /// Runs every command of a document, and hands over what each said. A command has to succeed; one of `bindguard` may
    /// also say that it found something.
    pub fn play(&self, document: &str) -> Result<Vec<Finished>> {
        let commands = commands_of(document)?;
        ensure!(!commands.is_empty(), "{document} shows no commands");
        let run = |shown: &Shown| {
            self.run(document, shown).with_context(|| format!("{document}, line {}: {}", shown.line, shown.text))
        };
        commands.iter().map(run).collect()
    }

    fn run(&self, document: &str, shown: &Shown) -> Result<Finished> {
        let not_run = NOT_RUN.iter().find(|it| it.document == document && shown.text.starts_with(it.command));
        if let Some(NotRun { command, instead, why, .. }) = not_run {
            // past the test runner's capture
            let _ = writeln!(io::stderr(), "NOT RUN {document}: {command}: {why}; {instead} is");
        }
        let words = not_run.map_or_else(|| self.words_for(&shown.text), |it| it.instead.to_owned());
        let mut command = self.node.command("sh")?;
        command.args(["-ec", &words]).current_dir(&self.folder).envs(self.environment.iter().cloned());
        let asked = self.asked_of_systemd();
        let done = run(command)?;
        for words in &self.asked_of_systemd()[asked.len()..] {
            let (_, done) = self
                .systemd
                .iter()
                .find(|(known, _)| known == words)
                .with_context(|| format!("systemctl {words}: this story does not say what happens then"))?;
            done().with_context(|| format!("systemctl {words}"))?;
        }
        let found = done.code() == 1 && words.starts_with("bindguard ");
        let not_told = done.code() == 2 && self.may_not_tell.iter().any(|beginning| words.starts_with(beginning));
        ensure!(done.code() == 0 || found || not_told, "exit code {}: {}{}", done.code(), done.stderr, done.stdout);
        Ok(done)
    }

    fn asked_of_systemd(&self) -> Vec<String> {
        let log = fs::read_to_string(self.node.programs().join("systemctl.log")).unwrap_or_default();
        log.lines().map(str::to_owned).collect()
    }

    fn words_for(&self, text: &str) -> String {
        let instead = self
            .instead
            .iter()
            .find_map(|(beginning, words)| text.strip_prefix(beginning.as_str()).map(|rest| format!("{words}{rest}")));
        let text = instead.unwrap_or_else(|| text.to_owned());
        self.names.iter().fold(text, |text, (word, value)| replace_word(&text, word, value))
    }
}

impl fmt::Debug for Rehearsal<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rehearsal").field("names", &self.names).field("folder", &self.folder).finish_non_exhaustive()
    }
}

/// The folder that holds the workspace.
pub fn repository() -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().unwrap_or(manifest).to_path_buf()
}

fn commands_in(document: &str) -> Vec<Shown> {
    let mut commands: Vec<Shown> = Vec::new();
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

/// Where the command that is being read ends.
#[derive(Debug)]
enum Until {
    LineEnd,
    /// The next line, too, belongs to it.
    Continued,
    /// A line with this word alone ends its here-document.
    Word(String),
}

impl Until {
    fn take(self, line: &str, number: usize, commands: &mut Vec<Shown>) -> Self {
        let joins = !matches!(self, Self::LineEnd);
        if !joins && (line.trim().is_empty() || line.trim_start().starts_with('#')) {
            return Self::LineEnd;
        }
        match commands.last_mut().filter(|_| joins) {
            Some(shown) => shown.text.push_str(&format!("\n{line}")),
            None => commands.push(Shown { line: number, text: line.trim_start().to_owned() }),
        }
        match self {
            Self::Word(word) if line.trim() != word => Self::Word(word),
            Self::Word(_) => Self::LineEnd,
            Self::LineEnd | Self::Continued if line.ends_with('\\') => Self::Continued,
            Self::LineEnd | Self::Continued => here_document(line).map_or(Self::LineEnd, Self::Word),
        }
    }
}

/// The word that ends a here-document which begins on this line.
fn here_document(line: &str) -> Option<String> {
    let (_, after) = line.split_once("<<")?;
    let word = after.trim_start_matches('-').split_whitespace().next()?;
    Some(word.trim_matches(['\'', '"']).to_owned())
}

fn replace_word(text: &str, word: &str, value: &str) -> String {
    let is_part = |c: char| c.is_alphanumeric() || c == '_' || c == '-';
    let (mut out, mut rest) = (String::new(), text);
    while let Some(at) = rest.find(word) {
        let (before, after) = (&rest[..at], &rest[at + word.len()..]);
        let whole = !before.ends_with(is_part) && !after.starts_with(is_part);
        out.push_str(before);
        out.push_str(if whole { value } else { word });
        rest = after;
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_read_with_their_further_lines() {
        let document = "\n```sh\n# why\none --and \\\n  more\n\ntwo <<'END'\n# kept\nEND\nthree\n```\n\n```text\nno\n```\n  ```sh\n  four # said\n  ```\n";
        let commands = commands_in(document);
        let texts: Vec<&str> = commands.iter().map(|shown| shown.text.as_str()).collect();
        assert_eq!(texts, ["one --and \\\n  more", "two <<'END'\n# kept\nEND", "three", "four # said"]);
        assert_eq!(commands[3].line, 17);
    }

    #[test]
    fn only_whole_words_are_names() {
        assert_eq!(replace_word("a UID UIDS --pod=UID/x", "UID", "7"), "a 7 UIDS --pod=7/x");
    }
}
