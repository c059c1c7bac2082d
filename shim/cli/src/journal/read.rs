//! Reads the journal, and the file before its last rotation.
//!
//! The reader keeps the text of each line for `--json`, which prints the text unchanged. The last
//! line may be incomplete while a guard writes it. Other invalid lines are reported.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use bindguard_core::identity::PodName;
use bindguard_core::report::{JournalLine, UnreadLine};
use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};
use serde_json::value::RawValue;

use super::line::RecordedLine;
use crate::named_file;
use crate::time_limits::check_answers;

/// The content of the journal. `--json` prints its JSON form.
#[derive(Debug, Default)]
pub struct JournalContent {
    /// The oldest first.
    pub lines: Vec<RecordedLine>,
    /// The number of lines that a newer version of bindguard wrote.
    pub newer_lines: usize,
    /// Whole lines that are no lines of a journal.
    pub problems: Vec<String>,
}

/// Reads a journal. The node's journal may be missing; a journal named by the operator must exist.
///
/// # Errors
/// If it cannot be read, or is no journal.
pub fn read(journal: &Path, is_named: bool) -> anyhow::Result<JournalContent> {
    let mut content = JournalContent::default();
    let rotated = PathBuf::from(format!("{}.1", journal.display()));
    let mut found = false;
    for file in [rotated.as_path(), journal] {
        check_answers(file)?;
        match named_file::read(file) {
            Ok(bytes) => {
                found = true;
                content.take(file, &String::from_utf8_lossy(&bytes));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error).with_context(|| format!("read {}", file.display())),
        }
    }
    content.name_pods();
    match (found, is_named) {
        (false, true) => bail!("read {}: there is no such file", journal.display()),
        _ if content.lines.is_empty()
            && content.newer_lines == 0
            && !content.problems.is_empty() =>
        {
            bail!("{} is no journal of bindguard's", journal.display())
        }
        _ => Ok(content),
    }
}

impl JournalContent {
    fn take(&mut self, file: &Path, text: &str) {
        let mut lines = text.split_inclusive('\n').enumerate().peekable();
        while let Some((index, line)) = lines.next() {
            match RecordedLine::parse(line) {
                Ok(recorded) => self.lines.push(recorded),
                Err(UnreadLine::Newer) => self.newer_lines += 1,
                // A guard is writing this line.
                Err(UnreadLine::Foreign)
                    if lines.peek().is_none() && line.starts_with('{') && !line.ends_with('\n') => {
                }
                Err(UnreadLine::Foreign) => {
                    self.problems.push(format!(
                        "line {} of {} is no line of a journal",
                        index + 1,
                        file.display()
                    ));
                }
            }
        }
    }

    /// Copies the pod's names to lines with the pod's uid only.
    fn name_pods(&mut self) {
        let named = self.lines.iter().filter(|line| line.pod.name.is_some());
        let names: BTreeMap<String, PodName> = named
            .filter_map(|line| Some((line.pod.uid.clone()?, line.pod.clone())))
            .collect();
        for line in self.lines.iter_mut().filter(|line| line.pod.name.is_none()) {
            if let Some(known) = line.pod.uid.as_ref().and_then(|uid| names.get(uid)) {
                line.pod = known.clone();
            }
        }
    }

    fn texts(&self, is_wanted: fn(&JournalLine) -> bool) -> Vec<&RawValue> {
        self.lines
            .iter()
            .filter(|line| is_wanted(&line.line))
            .map(|line| &*line.text)
            .collect()
    }
}

impl Serialize for JournalContent {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut keys = serializer.serialize_struct("JournalContent", 7)?;
        keys.serialize_field(
            "admissions",
            &self.texts(|line| matches!(line, JournalLine::Create(_))),
        )?;
        for (key, texts) in [
            (
                "nri_creates",
                self.texts(|line| matches!(line, JournalLine::NriCreate(_))),
            ),
            (
                "rebinds",
                self.texts(|line| matches!(line, JournalLine::Rebind(_))),
            ),
            (
                "refreshes",
                self.texts(|line| matches!(line, JournalLine::Refresh(_))),
            ),
            (
                "releases",
                self.texts(|line| matches!(line, JournalLine::Release(_))),
            ),
        ] {
            if texts.is_empty() {
                keys.skip_field(key)?
            } else {
                keys.serialize_field(key, &texts)?
            }
        }
        match self.newer_lines {
            0 => keys.skip_field("newer_lines")?,
            count => keys.serialize_field("newer_lines", &count)?,
        }
        keys.serialize_field("problems", &self.problems)?;
        keys.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bindguard_testing::documented;

    #[test]
    fn json_matches_the_document() {
        let shown = documented("`journal`");
        let mut content = JournalContent::default();
        let lines: String = shown
            .lines()
            .map(|line| line.trim().trim_end_matches(','))
            .filter(|line| line.starts_with("{\"version\""))
            .flat_map(|line| [line, "\n"])
            .collect();
        content.take(
            Path::new("/run/bindguard/journal.jsonl"),
            &format!("{lines}no\n"),
        );
        assert_eq!(
            serde_json::to_string_pretty(&content).unwrap(),
            shown.trim_end()
        );
    }

    #[test]
    fn only_a_half_written_last_line_is_passed_over() {
        let whole = r#"{"version":1,"time":null,"id":"a","attempt":0,"binds":[],"foreign":0,"duration_us":1}"#;
        let newer = whole.replace(r#""version":1"#, r#""version":2"#);
        let mut content = JournalContent::default();
        content.take(
            Path::new("j"),
            &format!("{whole}\nno\n{whole}\n{newer}\n{}", &whole[..20]),
        );
        assert_eq!((content.lines.len(), content.newer_lines), (2, 1));
        assert_eq!(content.problems, ["line 2 of j is no line of a journal"]);
        let mut foreign = JournalContent::default();
        foreign.take(Path::new("j"), "no journal");
        assert_eq!(foreign.problems.len(), 1);
    }

    /// The agent knows a pod by its uid alone when it re-binds.
    #[test]
    fn a_line_with_a_uid_gets_the_names_of_another_line() {
        let create = r#"{"version":1,"time":null,"attempt":0,"container":{"pod":"web","namespace":"default","uid":"u"},"binds":[],"foreign":0,"duration_us":1}"#;
        let rebind = r#"{"version":2,"kind":"rebind","time":null,"by":"agent","container":{"uid":"u"},"volume":"conf","binds":[],"duration_us":1}"#;
        let mut content = JournalContent::default();
        content.take(Path::new("j"), &format!("{rebind}\n{create}\n"));
        content.name_pods();
        assert_eq!(content.lines[0].pod, content.lines[1].pod);
        assert_eq!(
            content.lines[0].headline(),
            "at some time default/web (volume conf on the host, by the agent)"
        );
    }
}
