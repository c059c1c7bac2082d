//! `bindguard journal`: the admissions of this node, and the repairs between creates, the oldest
//! first (docs/journal.md).

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, anyhow, bail};
use bindguard_config::Config;
use bindguard_core::identity::PodName;
use bindguard_core::report::{
    Actor, BindRecord, CreateLine, JournalLine, RebindLine, RefreshLine, ReleaseLine,
    ReleaseResult, UnreadLine,
};
use bindguard_operator::doctor::seconds;
use bindguard_operator::pods::PodSelector;
use clap::Args;
use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};
use serde_json::value::RawValue;
use time::format_description::well_known::Rfc3339;
use time::{Duration, OffsetDateTime};

use crate::show::{FAULTY, HEALTHY, Lines, print_bind};
use crate::time_limits::check_answers;
use crate::{named_file, show};

/// Arguments of `journal`.
#[derive(Debug, Args)]
pub struct Journal {
    /// Show only lines since then: a time (2026-11-21T05:10:00Z) or an age (90s, 30m, 2h, 7d).
    #[arg(long, value_name = "TIME")]
    since: Option<String>,
    /// Show only the lines about this pod: UID, NAME or NAMESPACE/NAME.
    #[arg(long, value_name = "POD")]
    pod: Option<String>,
    /// Show creates without findings as well.
    #[arg(long)]
    all: bool,
    /// Read this journal instead of the node's.
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Print all lines as JSON, unchanged from the journal.
    #[arg(long)]
    json: bool,
}

impl Journal {
    /// Runs it.
    pub fn run(self, config: &Config) -> anyhow::Result<ExitCode> {
        let since = self
            .since
            .as_deref()
            .map(|text| since(text, OffsetDateTime::now_utc()))
            .transpose()?;
        let journal = match (&self.file, config.journal()) {
            (Some(file), _) => file.clone(),
            (None, Some(journal)) => journal.to_owned(),
            (None, None) => bail!("there is no journal: [journal] enabled is false in config.toml"),
        };
        let mut content = read(&journal, self.file.is_some())?;
        content
            .lines
            .retain(|line| since.is_none_or(|since| line.time() >= Some(since)));
        let pod = self.pod.as_deref().map(PodSelector::from_argument);
        content
            .lines
            .retain(|line| pod.as_ref().is_none_or(|pod| pod.is(&line.pod)));
        show::print_report(&content, self.json, |content| text(content, self.all))?;
        Ok(show::code(
            !content.problems.is_empty(),
            content.lines.iter().any(RecordedLine::has_unrepaired),
        ))
    }
}

/// The headlines of the newest admissions, the newest first; none if the node has no journal.
pub fn last_headlines(config: &Config, count: usize) -> anyhow::Result<Vec<String>> {
    let Some(journal) = config.journal() else {
        return Ok(Vec::new());
    };
    let content = read(journal, false)?;
    let admissions = content
        .lines
        .iter()
        .rev()
        .filter(|line| line.is_admission());
    Ok(admissions.take(count).map(RecordedLine::headline).collect())
}

/// Parses a time, or an age before `now`.
fn since(text: &str, now: OffsetDateTime) -> anyhow::Result<OffsetDateTime> {
    let ago = text
        .split_at_checked(text.len().saturating_sub(1))
        .and_then(|(number, unit)| {
            let number: i64 = number.parse().ok()?;
            let seconds = match unit {
                "s" => 1,
                "m" => 60,
                "h" => 3_600,
                "d" => 86_400,
                _ => return None,
            };
            now.checked_sub(Duration::seconds(number.checked_mul(seconds)?))
        });
    match ago {
        Some(time) => Ok(time),
        None => OffsetDateTime::parse(text, &Rfc3339).map_err(|_| {
            anyhow!("{text:?} is neither a time such as 2026-11-21T05:10:00Z nor how long ago, such as 30m")
        }),
    }
}

/// A busy node creates thousands of containers without findings: they are only counted.
fn text(content: &JournalContent, all: bool) -> Lines {
    let mut lines = Lines::default();
    for problem in &content.problems {
        lines.problem(problem);
    }
    content
        .lines
        .iter()
        .filter(|line| all || line.has_findings())
        .for_each(|line| line.print(&mut lines));
    let (admissions, repairs): (Vec<_>, Vec<_>) =
        content.lines.iter().partition(|line| line.is_admission());
    let count = |of: &[&RecordedLine], is: fn(&RecordedLine) -> bool| {
        of.iter().filter(|line| is(line)).count()
    };
    lines.line(&format!(
        "{} creates, {} with findings, {} of them not repaired",
        admissions.len(),
        count(&admissions, RecordedLine::has_findings),
        count(&admissions, RecordedLine::has_unrepaired)
    ));
    if !repairs.is_empty() {
        lines.line(&format!(
            "{} refreshes and repairs between creates, {} of them not complete",
            repairs.len(),
            count(&repairs, RecordedLine::has_unrepaired)
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
    pub fn time(&self) -> Option<OffsetDateTime> {
        OffsetDateTime::parse(self.line.time()?, &Rfc3339).ok()
    }

    /// True for a create.
    pub fn is_admission(&self) -> bool {
        match self.line {
            JournalLine::Create(_) | JournalLine::NriCreate(_) => true,
            JournalLine::Rebind(_) | JournalLine::Refresh(_) | JournalLine::Release(_) => false,
        }
    }

    /// True if it has a problem or a finding.
    pub fn has_findings(&self) -> bool {
        match &self.line {
            JournalLine::Create(CreateLine { report, .. })
            | JournalLine::NriCreate(CreateLine { report, .. }) => {
                !report.problems.is_empty() || report.binds.iter().any(BindRecord::is_finding)
            }
            JournalLine::Rebind(_) | JournalLine::Refresh(_) | JournalLine::Release(_) => true,
        }
    }

    /// True if it has a problem, or a finding that was not repaired.
    pub fn has_unrepaired(&self) -> bool {
        let is_left = |bind: &BindRecord| bind.is_finding() && !bind.is_repaired();
        match &self.line {
            JournalLine::Create(CreateLine { report, .. })
            | JournalLine::NriCreate(CreateLine { report, .. }) => {
                !report.problems.is_empty() || report.binds.iter().any(is_left)
            }
            JournalLine::Rebind(line) => {
                !line.problems.is_empty() || line.binds.iter().any(is_left)
            }
            JournalLine::Refresh(line) => line.has_unrepaired(),
            JournalLine::Release(line) => line.has_unrepaired(),
        }
    }

    /// The time, the pod, the container and the event.
    pub fn headline(&self) -> String {
        let time = self
            .line
            .time()
            .map_or_else(|| "at some time".to_owned(), seconds);
        let container = self
            .line
            .container()
            .container
            .as_ref()
            .map(|name| format!(" {name}"))
            .unwrap_or_default();
        let pod = self
            .pod
            .display_name()
            .map(|pod| format!(" {pod}"))
            .unwrap_or_default();
        format!("{time}{pod}{container} ({})", self.event())
    }

    fn event(&self) -> String {
        let short = |id: Option<&str>| id.unwrap_or("?").chars().take(12).collect::<String>();
        match &self.line {
            JournalLine::Create(line) => {
                let id = short(line.id.as_deref());
                let event = match (line.pid, line.attempt) {
                    (Some(_), _) => format!("{id}, after its create"),
                    (None, 0) => id,
                    (None, attempt) => format!("{id}, create {}", attempt + 1),
                };
                match &line.bindguard {
                    Some(version) => format!("{event}, bindguard {version}"),
                    None => event,
                }
            }
            JournalLine::NriCreate(line) => {
                format!("{}, by the NRI plugin", short(line.id.as_deref()))
            }
            JournalLine::Rebind(line) => {
                format!("volume {} on the host, by {}", line.volume, actor(line.by))
            }
            JournalLine::Refresh(line) => {
                format!(
                    "{}, refreshed while it runs, by {}",
                    short(Some(&line.id)),
                    actor(line.by)
                )
            }
            JournalLine::Release(line) => {
                let id = short(Some(&line.id));
                format!("{id}, copies of unmounted mounts, by {}", actor(line.by))
            }
        }
    }

    /// Prints the headline and what was found.
    pub fn print(&self, lines: &mut Lines) {
        lines.line(&self.headline());
        match &self.line {
            JournalLine::Create(CreateLine { report, .. })
            | JournalLine::NriCreate(CreateLine { report, .. }) => {
                print_findings(&report.problems, &report.binds, lines);
            }
            JournalLine::Rebind(RebindLine {
                problems, binds, ..
            }) => print_findings(problems, binds, lines),
            JournalLine::Refresh(line) => print_refresh(line, lines),
            JournalLine::Release(line) => print_release(line, lines),
        }
    }
}

fn print_findings(problems: &[String], binds: &[BindRecord], lines: &mut Lines) {
    problems.iter().for_each(|problem| lines.problem(problem));
    binds.iter().for_each(|bind| print_bind(bind, lines));
}

fn print_refresh(line: &RefreshLine, lines: &mut Lines) {
    line.problems
        .iter()
        .for_each(|problem| lines.problem(problem));
    for mount in &line.mounts {
        let style = if mount.outcome.is_replaced() {
            HEALTHY
        } else {
            FAULTY
        };
        lines.headed(mount.outcome.as_str(), style, &mount.to_string());
    }
    match line
        .notification
        .as_ref()
        .map(|notification| (&notification.request, &notification.error))
    {
        None => {}
        Some((request, None)) => lines.headed("notified", HEALTHY, &request.to_string()),
        Some((request, Some(error))) => {
            lines.headed("unnotified", FAULTY, &format!("{request}: {error}"))
        }
    }
}

fn print_release(line: &ReleaseLine, lines: &mut Lines) {
    for copy in &line.copies {
        let style = match copy.result {
            ReleaseResult::Released => HEALTHY,
            ReleaseResult::Kept | ReleaseResult::Busy | ReleaseResult::Refused => FAULTY,
        };
        let error = copy.error.as_ref();
        let error = error.map(|error| format!(": {error}")).unwrap_or_default();
        lines.headed(copy.result.into_str(), style, &format!("{copy}{error}"));
    }
}

fn actor(by: Actor) -> &'static str {
    match by {
        Actor::Agent => "the agent",
        Actor::Operator => "an operator",
        Actor::Guard => "the guard",
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
