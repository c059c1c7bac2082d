//! A document's commands on a node. Words in capitals stand for names of the reader's node (`UID`,
//! `BUNDLE`). The story gives the names of the test node.

use std::fmt;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::{DocCommand, NOT_RUN, NotRun, commands_of};
use crate::node::Node;
use crate::process::{Finished, run};

/// The reaction to a call of systemctl.
type Done<'n> = Box<dyn Fn() -> Result<()> + 'n>;

/// A document's commands on a node.
pub struct Rehearsal<'n> {
    node: &'n Node,
    names: Vec<(String, String)>,
    instead: Vec<(String, String)>,
    may_be_incomplete: Vec<String>,
    prints: Vec<(String, Vec<String>)>,
    environment: Vec<(String, String)>,
    systemd: Vec<(String, Done<'n>)>,
    folder: PathBuf,
}

impl<'n> Rehearsal<'n> {
    /// Commands run in the node's own folder, with its environment.
    pub fn on(node: &'n Node) -> Self {
        let (names, instead, may_be_incomplete, prints, environment, systemd) = Default::default();
        let folder = node.disk().to_path_buf();
        Self {
            node,
            names,
            instead,
            may_be_incomplete,
            prints,
            environment,
            systemd,
            folder,
        }
    }

    /// Replacements for words of the document on this node. Whole words only.
    pub fn with(mut self, word: &str, value: &str) -> Self {
        self.names.push((word.to_owned(), value.to_owned()));
        self
    }

    /// For commands that begin with `beginning`, these words are run in its place: a program by its
    /// path, say.
    pub fn instead_of(mut self, beginning: &str, words: &str) -> Self {
        self.instead.push((beginning.to_owned(), words.to_owned()));
        self
    }

    /// The decisive part of the output of the command with this first line, for each time that the document shows it; the
    /// last part is that of all later times. A command that reads or repairs needs a
    /// decisive part: a command that cannot find anything also ends with status 0.
    pub fn prints(mut self, command: &str, parts: &[&str]) -> Self {
        let parts = parts.iter().map(|part| (*part).to_owned()).collect();
        self.prints.push((command.to_owned(), parts));
        self
    }

    /// A variable in the commands' environment.
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// The reaction to `systemctl` with these arguments. A node has no systemd, and its `systemctl`
    /// records its arguments.
    pub fn systemd(mut self, words: &str, done: impl Fn() -> Result<()> + 'n) -> Self {
        self.systemd.push((words.to_owned(), Box::new(done)));
        self
    }

    /// Commands that begin so read every process of the machine: where even root may not read some,
    /// they report that, and exit with 2.
    pub fn reads_all_processes(mut self, beginning: &str) -> Self {
        if fs::metadata("/proc/1/ns/mnt").is_err() {
            self.may_be_incomplete.push(beginning.to_owned());
        }
        self
    }

    /// Sets the working directory.
    pub fn folder(self, folder: &Path) -> Self {
        Self {
            folder: folder.to_path_buf(),
            ..self
        }
    }

    /// Runs every command of a document, and returns the outputs. A command has to succeed; a
    /// command of `bindguard` may also report findings.
    pub fn play(&self, document: &str) -> Result<Vec<Finished>> {
        let commands = commands_of(document)?;
        ensure!(!commands.is_empty(), "{document} shows no commands");
        let mut done = Vec::new();
        for (at, shown) in commands.iter().enumerate() {
            let earlier = &commands[..at];
            let times = earlier.iter().filter(|it| it.text == shown.text).count();
            let finished = self
                .run(document, shown)
                .and_then(|finished| self.check_output(shown, times, finished))
                .with_context(|| format!("{document}, line {}: {}", shown.line, shown.text))?;
            done.push(finished);
        }
        for (command, _) in &self.prints {
            let is_shown = commands.iter().any(|shown| first_line(shown) == command);
            ensure!(is_shown, "{document} does not show {command}");
        }
        Ok(done)
    }

    /// `times`: how often the document has shown the command before.
    fn check_output(&self, shown: &DocCommand, times: usize, done: Finished) -> Result<Finished> {
        let command = first_line(shown);
        let known = self.prints.iter().find(|(known, _)| known == command);
        let Some((_, parts)) = known else {
            let is_not_run = NOT_RUN.iter().any(|it| command.starts_with(it.command));
            ensure!(
                is_not_run || !is_for_output(command),
                "the story does not say what it prints: {}{}",
                done.stdout,
                done.stderr
            );
            return Ok(done);
        };
        let part = &parts[times.min(parts.len() - 1)];
        ensure!(
            done.stdout.contains(part.as_str()),
            "it does not print {part:?}: {}{}",
            done.stdout,
            done.stderr
        );
        Ok(done)
    }

    fn run(&self, document: &str, shown: &DocCommand) -> Result<Finished> {
        let not_run = NOT_RUN
            .iter()
            .find(|it| it.document == document && shown.text.starts_with(it.command));
        if let Some(NotRun {
            command,
            instead,
            why,
            ..
        }) = not_run
        {
            // past the test runner's capture
            let _ = writeln!(
                io::stderr(),
                "NOT RUN {document}: {command}: {why}; {instead} is"
            );
        }
        let words = not_run.map_or_else(|| self.words_for(&shown.text), |it| it.instead.to_owned());
        let mut command = self.node.command("sh")?;
        command
            .args(["-ec", &words])
            .current_dir(&self.folder)
            .envs(self.environment.iter().cloned());
        let earlier = self.systemd_requests();
        let done = run(command)?;
        for words in &self.systemd_requests()[earlier.len()..] {
            let (_, done) = self
                .systemd
                .iter()
                .find(|(known, _)| known == words)
                .with_context(|| {
                    format!("systemctl {words}: this story does not say what happens then")
                })?;
            done().with_context(|| format!("systemctl {words}"))?;
        }
        let found = done.code() == 1 && words.starts_with("bindguard ");
        let incomplete = done.code() == 2
            && self
                .may_be_incomplete
                .iter()
                .any(|beginning| words.starts_with(beginning));
        ensure!(
            done.code() == 0 || found || incomplete,
            "exit code {}: {}{}",
            done.code(),
            done.stderr,
            done.stdout
        );
        Ok(done)
    }

    fn systemd_requests(&self) -> Vec<String> {
        let log =
            fs::read_to_string(self.node.programs().join("systemctl.log")).unwrap_or_default();
        log.lines().map(str::to_owned).collect()
    }

    fn words_for(&self, text: &str) -> String {
        let instead = self.instead.iter().find_map(|(beginning, words)| {
            text.strip_prefix(beginning.as_str())
                .map(|rest| format!("{words}{rest}"))
        });
        let text = instead.unwrap_or_else(|| text.to_owned());
        self.names
            .iter()
            .fold(text, |text, (word, value)| replace_word(&text, word, value))
    }
}

impl fmt::Debug for Rehearsal<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rehearsal")
            .field("names", &self.names)
            .field("folder", &self.folder)
            .finish_non_exhaustive()
    }
}

/// True for a command whose purpose is its output, or that reports what it changes.
fn is_for_output(command: &str) -> bool {
    let program = command.split_whitespace().next().unwrap_or_default();
    matches!(
        program.rsplit('/').next().unwrap_or_default(),
        "bindguard" | "grep" | "cat" | "kubectl" | "helm"
    )
}

/// The first line of a command, without a comment.
fn first_line(shown: &DocCommand) -> &str {
    let line = shown.text.lines().next().unwrap_or_default();
    let line = line.split_once(" #").map_or(line, |(line, _)| line);
    line.trim_end_matches([' ', '\\'])
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
    fn only_whole_words_are_names() {
        assert_eq!(
            replace_word("a UID UIDS --pod=UID/x", "UID", "7"),
            "a 7 UIDS --pod=7/x"
        );
    }
}
