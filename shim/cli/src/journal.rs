//! `bindguard journal`: the admissions of this node, and the repairs between creates, the oldest
//! first (docs/journal.md).

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;

use anyhow::{Context, anyhow, bail};
use bindguard_config::Config;
use bindguard_core::identity::PodName;
use bindguard_core::report::{
    BindRecord, CreateLine, JournalLine, Notification, RebindLine, RefreshLine, ReleaseLine,
    UnreadLine,
};
use bindguard_operator::agent_status::seconds;
use clap::Args;
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use serde_json::value::RawValue;
use time::format_description::well_known::Rfc3339;
use time::{Duration, OffsetDateTime};

use crate::named_file::{self, check_answers};
use crate::pods::{Selection, pod_argument};
use crate::show::{self, Lines, Output, print_while_read};

/// Arguments of `journal`.
#[derive(Debug, Args)]
pub struct Journal {
    /// Show only lines since then: a time (2026-11-21T05:10:00Z) or an age (90s, 30m, 2h, 7d).
    #[arg(long, value_name = "TIME")]
    since: Option<String>,
    /// Show only the lines about this pod.
    #[arg(value_name = "pod/NAME", value_parser = pod_argument, conflicts_with = "pod")]
    named: Option<String>,
    /// Show only the lines about this pod: UID, NAME or NAMESPACE/NAME.
    #[arg(long, value_name = "POD")]
    pod: Option<String>,
    /// Show only the lines about pods of this namespace.
    #[arg(long, value_name = "NAMESPACE")]
    namespace: Option<String>,
    /// Show only the newest N lines.
    #[arg(short = 'n', long, value_name = "N")]
    lines: Option<usize>,
    /// Print new lines as they are written, until interrupted.
    #[arg(short, long, conflicts_with = "quiet")]
    follow: bool,
    /// Show creates without findings as well.
    #[arg(long)]
    all: bool,
    /// Read this journal instead of the node's.
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    #[command(flatten)]
    output: Output,
}

impl Journal {
    pub fn run(self, config: &Config) -> anyhow::Result<ExitCode> {
        let since = match &self.since {
            Some(text) => Some(since(text, OffsetDateTime::now_utc())?),
            None => None,
        };
        let Some(journal) = self.file.as_deref().or(config.journal()) else {
            bail!("there is no journal: [journal] enabled is false in config.toml");
        };
        let selection = Selection {
            pod: self.named.clone().or(self.pod.clone()),
            namespace: self.namespace.clone(),
            all_namespaces: false,
        };
        let is_wanted = |line: &RecordedLine| {
            since.is_none_or(|since| line.time() >= Some(since)) && selection.includes(&line.pod)
        };
        if self.follow {
            return self.follow(journal, is_wanted);
        }
        let mut content = read(journal, self.file.is_some())?;
        content.lines.retain(is_wanted);
        let shown = self.lines.unwrap_or(usize::MAX);
        let hidden = content.lines.len().saturating_sub(shown);
        content.lines.drain(..hidden);
        let is_left = content.lines.iter().any(RecordedLine::has_unrepaired);
        show::finish(
            &content,
            self.output,
            text(&content, self.all),
            !content.problems.is_empty(),
            is_left,
        )
    }

    /// Prints the newest lines, then each new line until the reader leaves. For programs, each line
    /// is one JSON object.
    fn follow(
        &self,
        journal: &Path,
        is_wanted: impl Fn(&RecordedLine) -> bool,
    ) -> anyhow::Result<ExitCode> {
        check_answers(journal)?;
        let is_text = self.output.is_text();
        let (mut last, mut seen) = (String::new(), None);
        loop {
            // The journal is read again only after a change.
            let found = journal.metadata().ok().map(|it| (it.ino(), it.len()));
            if seen != Some(found) {
                let mut lines = read(journal, self.file.is_some())?.lines;
                let known = lines.iter().rposition(|line| line.text.get() == last);
                if let Some(line) = lines.last() {
                    line.text.get().clone_into(&mut last);
                }
                lines.drain(..known.map_or(0, |at| at + 1));
                lines.retain(|line| {
                    is_wanted(line) && (self.all || !is_text || line.has_findings())
                });
                if seen.is_none() {
                    let newest = self.lines.unwrap_or(10);
                    lines.drain(..lines.len().saturating_sub(newest));
                }
                let mut text = Lines::default();
                for line in &lines {
                    match is_text {
                        true => line.print(&mut text),
                        false => text.line(line.text.get()),
                    }
                }
                if !print_while_read(text.as_str().as_bytes())? {
                    return Ok(ExitCode::SUCCESS);
                }
                seen = Some(found);
            }
            thread::sleep(FOLLOW_INTERVAL);
        }
    }
}

const FOLLOW_INTERVAL: std::time::Duration = std::time::Duration::from_secs(1);

/// The headlines of the newest admissions, the newest first; none if the node has no journal.
pub fn last_headlines(config: &Config, count: usize) -> anyhow::Result<Vec<String>> {
    let Some(journal) = config.journal() else {
        return Ok(Vec::new());
    };
    let mut lines = read(journal, false)?.lines;
    lines.retain(RecordedLine::is_admission);
    let newest = lines.iter().rev().take(count);
    Ok(newest.map(RecordedLine::headline).collect())
}

/// Parses a time, or an age before `now`.
fn since(text: &str, now: OffsetDateTime) -> anyhow::Result<OffsetDateTime> {
    for (unit, seconds) in [("s", 1), ("m", 60), ("h", 3_600), ("d", 86_400)] {
        if let Some(number) = text.strip_suffix(unit)
            && let Ok(number) = number.parse::<i64>()
            && let Some(seconds) = number.checked_mul(seconds)
            && let Some(time) = now.checked_sub(Duration::seconds(seconds))
        {
            return Ok(time);
        }
    }
    OffsetDateTime::parse(text, &Rfc3339).map_err(|_| {
        anyhow!(
            "{text:?} is neither a time such as 2026-11-21T05:10:00Z nor how long ago, such as 30m"
        )
    })
}

/// A busy node creates thousands of containers without findings: they are only counted.
fn text(content: &JournalContent, all: bool) -> Lines {
    let mut lines = Lines::of_problems(&content.problems);
    let (mut creates, mut found, mut unrepaired) = (0, 0, 0);
    let (mut repairs, mut incomplete) = (0, 0);
    for line in &content.lines {
        let has_findings = line.has_findings();
        if all || has_findings {
            line.print(&mut lines);
        }
        let is_left = usize::from(line.has_unrepaired());
        if line.is_admission() {
            creates += 1;
            found += usize::from(has_findings);
            unrepaired += is_left;
        } else {
            repairs += 1;
            incomplete += is_left;
        }
    }
    lines.line(&format!(
        "{creates} creates, {found} with findings, {unrepaired} of them not repaired"
    ));
    if repairs > 0 {
        lines.line(&format!(
            "{repairs} refreshes and repairs between creates, {incomplete} of them not complete"
        ));
    }
    if content.newer_lines > 0 {
        lines.line(&format!(
            "{} lines of a newer version of bindguard are not shown",
            content.newer_lines
        ));
    }
    lines
}

// Reads the journal, and the file before its last rotation.
//
// The reader keeps the text of each line for `--json`, which prints the text unchanged. The last
// line may be incomplete while a guard writes it. Other invalid lines are reported.

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
    if is_named && !found {
        bail!("read {}: there is no such file", journal.display());
    }
    let is_empty = content.lines.is_empty() && content.newer_lines == 0;
    if is_empty && !content.problems.is_empty() {
        bail!("{} is no journal of bindguard's", journal.display());
    }
    Ok(content)
}

impl JournalContent {
    fn take(&mut self, file: &Path, text: &str) {
        for (index, line) in text.split_inclusive('\n').enumerate() {
            match RecordedLine::parse(line) {
                Ok(recorded) => self.lines.push(recorded),
                Err(UnreadLine::Newer) => self.newer_lines += 1,
                // A guard is writing this line, the last.
                Err(UnreadLine::Foreign) if line.starts_with('{') && !line.ends_with('\n') => {}
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
        let mut names = BTreeMap::new();
        for RecordedLine { pod, .. } in &self.lines {
            if pod.name.is_some()
                && let Some(uid) = &pod.uid
            {
                names.insert(uid.clone(), pod.clone());
            }
        }
        for RecordedLine { pod, .. } in &mut self.lines {
            if pod.name.is_none()
                && let Some(uid) = &pod.uid
                && let Some(known) = names.get(uid)
            {
                *pod = known.clone();
            }
        }
    }
}

impl Serialize for JournalContent {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut texts = BTreeMap::from([("admissions", Vec::new())]);
        for RecordedLine { line, text, .. } in &self.lines {
            let key = match line {
                JournalLine::Create(_) => "admissions",
                JournalLine::NriCreate(_) => "nri_creates",
                JournalLine::Rebind(_) => "rebinds",
                JournalLine::Refresh(_) => "refreshes",
                JournalLine::Release(_) => "releases",
            };
            texts.entry(key).or_default().push(text);
        }
        let mut keys = serializer.serialize_map(None)?;
        for (key, texts) in texts {
            keys.serialize_entry(key, &texts)?;
        }
        if self.newer_lines > 0 {
            keys.serialize_entry("newer_lines", &self.newer_lines)?;
        }
        keys.serialize_entry("problems", &self.problems)?;
        keys.end()
    }
}

// A line of the journal, as text.

/// A line of the journal.
#[derive(Debug)]
pub struct RecordedLine {
    /// The text, unchanged.
    pub text: Box<RawValue>,
    /// Its content.
    pub line: JournalLine,
    /// Its pod. A line of the agent may have only the uid; other lines have the names.
    pub pod: PodName,
}

impl RecordedLine {
    /// Parses a line.
    pub fn parse(text: &str) -> Result<Self, UnreadLine> {
        let line = JournalLine::parse(text)?;
        let text =
            RawValue::from_string(text.trim().to_owned()).map_err(|_| UnreadLine::Foreign)?;
        Ok(Self {
            text,
            pod: line.container().pod.clone(),
            line,
        })
    }

    /// The time of the line.
    fn time(&self) -> Option<OffsetDateTime> {
        OffsetDateTime::parse(self.line.time()?, &Rfc3339).ok()
    }

    /// True for a create.
    fn is_admission(&self) -> bool {
        matches!(
            self.line,
            JournalLine::Create(_) | JournalLine::NriCreate(_)
        )
    }

    /// The problems, and the binds of a create or a re-bind.
    fn checked(&self) -> (&[String], &[BindRecord]) {
        match &self.line {
            JournalLine::Create(CreateLine { report, .. })
            | JournalLine::NriCreate(CreateLine { report, .. }) => {
                (&report.problems, &report.binds)
            }
            JournalLine::Rebind(line) => (&line.problems, &line.binds),
            JournalLine::Refresh(line) => (&line.problems, &[]),
            JournalLine::Release(_) => (&[], &[]),
        }
    }

    /// True if it has a problem or a finding.
    fn has_findings(&self) -> bool {
        let (problems, binds) = self.checked();
        !self.is_admission() || !problems.is_empty() || binds.iter().any(BindRecord::is_finding)
    }

    /// True if it has a problem, or a finding that was not repaired.
    fn has_unrepaired(&self) -> bool {
        let (problems, binds) = self.checked();
        let mut binds = binds.iter();
        !problems.is_empty()
            || binds.any(|bind| bind.is_finding() && !bind.is_repaired())
            || match &self.line {
                JournalLine::Refresh(line) => line.has_unrepaired(),
                JournalLine::Release(line) => line.has_unrepaired(),
                JournalLine::Create(_) | JournalLine::NriCreate(_) | JournalLine::Rebind(_) => {
                    false
                }
            }
    }

    /// The time, the pod, the container and the event.
    fn headline(&self) -> String {
        let time = self.line.time().map(seconds);
        let mut headline = time.unwrap_or_else(|| "at some time".to_owned());
        let container = self.line.container().container.clone();
        for name in [self.pod.display_name(), container].into_iter().flatten() {
            headline += &format!(" {name}");
        }
        let event = match &self.line {
            JournalLine::Create(line) => {
                let mut event = format!("{:.12}", line.id.as_deref().unwrap_or("?"));
                if line.pid.is_some() {
                    event += ", after its create";
                } else if line.attempt > 0 {
                    event += &format!(", create {}", line.attempt + 1);
                }
                if let Some(version) = &line.bindguard {
                    event += &format!(", bindguard {version}");
                }
                event
            }
            JournalLine::NriCreate(line) => {
                let id = line.id.as_deref().unwrap_or("?");
                format!("{id:.12}, by the NRI plugin")
            }
            JournalLine::Rebind(RebindLine { volume, by, .. }) => {
                format!("volume {volume} on the host, by {by}")
            }
            JournalLine::Refresh(RefreshLine { id, by, .. }) => {
                format!("{id:.12}, refreshed while it runs, by {by}")
            }
            JournalLine::Release(ReleaseLine { id, by, .. }) => {
                format!("{id:.12}, copies of unmounted mounts, by {by}")
            }
        };
        format!("{headline} ({event})")
    }

    /// Prints the headline and what was found.
    fn print(&self, lines: &mut Lines) {
        lines.line(&self.headline());
        let (problems, binds) = self.checked();
        lines.problems(problems);
        for bind in binds {
            lines.bind(bind);
        }
        match &self.line {
            JournalLine::Create(_) | JournalLine::NriCreate(_) | JournalLine::Rebind(_) => {}
            JournalLine::Refresh(line) => {
                for mount in &line.mounts {
                    let outcome = &mount.outcome;
                    lines.marked(outcome.as_str(), outcome.is_replaced(), &mount.to_string());
                }
                if let Some(Notification { request, error }) = &line.notification {
                    let is_good = error.is_none();
                    let word = if is_good { "notified" } else { "unnotified" };
                    lines.result(word, is_good, &request.to_string(), error.as_deref());
                }
            }
            JournalLine::Release(line) => {
                for copy in &line.copies {
                    lines.copy(copy, &copy.to_string());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn since_is_a_time_or_how_long_ago() {
        let now = OffsetDateTime::from_unix_timestamp(1_000_000).unwrap();
        assert_eq!(
            since("2h", now).unwrap().unix_timestamp(),
            1_000_000 - 7_200
        );
        assert_eq!(
            since("1970-01-01T00:00:05Z", now).unwrap().unix_timestamp(),
            5
        );
        for wrong in ["", "soon", "5", "9999999999999999999d", "2026-11-21", "5é"] {
            assert!(since(wrong, now).is_err(), "{wrong}");
        }
    }
}

#[cfg(test)]
mod read_tests {
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
