//! `bindguard journal`: the admissions of this node, the oldest first (docs/journal.md).
//!
//! Lines are parsed without a fixed type, so that journals of older and newer versions of bindguard are shown as well. The last
//! line may be incomplete while a guard writes it. Any other line that is no admission is reported.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, anyhow, bail};
use bindguard_config::Config;
use bindguard_core::report::{BindRecord, Container, JournalLine, UnreadLine};
use bindguard_operator::pods::{PodName, PodSelector};
use clap::Args;
use serde::Serialize;
use serde_json::value::RawValue;
use time::format_description::well_known::Rfc3339;
use time::{Duration, OffsetDateTime};

use crate::show::{self, Lines, print_bind, print_json, print_text};
use crate::time_limits::check_answers;

/// Arguments of `journal`.
#[derive(Debug, Args)]
pub struct Journal {
    /// Show only admissions since then: a time (2026-11-21T05:10:00Z) or an age (90s, 30m, 2h, 7d).
    #[arg(long, value_name = "TIME")]
    since: Option<String>,
    /// Show only the admissions of this pod: UID, NAME or NAMESPACE/NAME.
    #[arg(long, value_name = "POD")]
    pod: Option<String>,
    /// Show admissions without findings as well.
    #[arg(long)]
    all: bool,
    /// Read this journal instead of the node's.
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Read the journal of the node whose root directory this is, from a pod.
    #[arg(long, value_name = "DIR")]
    pub root: Option<PathBuf>,
    /// Print all admissions as JSON, unchanged from the journal.
    #[arg(long)]
    json: bool,
}

/// The content of the journal. `--json` prints its JSON form.
#[derive(Debug, Default, Serialize)]
struct Read {
    admissions: Vec<AdmissionLine>,
    /// The number of lines that a newer version of bindguard wrote.
    #[serde(skip_serializing_if = "is_zero")]
    newer_lines: usize,
    /// Whole lines that are no admissions.
    problems: Vec<String>,
}

/// A line of the journal.
#[derive(Debug)]
struct AdmissionLine {
    /// The text, unchanged.
    text: Box<RawValue>,
    line: JournalLine,
}

impl Serialize for AdmissionLine {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.text.serialize(serializer)
    }
}

impl AdmissionLine {
    fn parse(text: &str) -> Result<Self, UnreadLine> {
        let line = JournalLine::parse(text)?;
        let text = RawValue::from_string(text.trim().to_owned()).map_err(|_| UnreadLine::Foreign)?;
        Ok(Self { text, line })
    }

    fn time(&self) -> Option<OffsetDateTime> {
        OffsetDateTime::parse(self.line.time.as_deref()?, &Rfc3339).ok()
    }

    fn pod(&self) -> PodName {
        let Container { uid, namespace, pod, .. } = self.line.report.container.clone();
        PodName { uid, namespace, name: pod }
    }

    /// True if the admission has a problem or a finding.
    fn has_findings(&self) -> bool {
        let report = &self.line.report;
        !report.problems.is_empty() || report.binds.iter().any(BindRecord::is_finding)
    }

    /// True if the admission has a problem, or a finding that was not repaired.
    fn has_unrepaired(&self) -> bool {
        let report = &self.line.report;
        !report.problems.is_empty() || report.binds.iter().any(|bind| bind.is_finding() && !bind.is_repaired())
    }

    fn headline(&self) -> String {
        let JournalLine { time, id, attempt, pid, report, .. } = &self.line;
        let time = time.as_deref().and_then(|time| time.split('.').next()).unwrap_or("at some time");
        let container = report.container.name.as_ref().map(|name| format!(" {name}")).unwrap_or_default();
        let pod = self.pod().for_people().map(|pod| format!(" {pod}")).unwrap_or_default();
        let id: String = id.as_deref().unwrap_or("?").chars().take(12).collect();
        match (pid, attempt) {
            (Some(_), _) => format!("{time}{pod}{container} ({id}, after its create)"),
            (None, 0) => format!("{time}{pod}{container} ({id})"),
            (None, attempt) => format!("{time}{pod}{container} ({id}, create {})", attempt + 1),
        }
    }
}

fn is_zero(count: &usize) -> bool {
    *count == 0
}

impl Journal {
    /// Runs it.
    pub fn run(self, config: &Config) -> anyhow::Result<ExitCode> {
        let since = self.since.as_deref().map(|text| since(text, OffsetDateTime::now_utc())).transpose()?;
        let journal = match (&self.file, config.journal()) {
            (Some(file), _) => file.clone(),
            (None, Some(journal)) => journal.to_owned(),
            (None, None) => bail!("there is no journal: [journal] enabled is false in config.toml"),
        };
        let mut read = self.read(&journal)?;
        read.admissions.retain(|admission| since.is_none_or(|since| admission.time() >= Some(since)));
        let pod = self.pod.as_deref().map(PodSelector::from_argument);
        read.admissions.retain(|admission| pod.as_ref().is_none_or(|pod| pod.is(&admission.pod())));
        if self.json {
            print_json(&read)?;
        } else {
            print_text(text(&read, self.all).text())?;
        }
        Ok(show::code(!read.problems.is_empty(), read.admissions.iter().any(AdmissionLine::has_unrepaired)))
    }

    fn read(&self, journal: &Path) -> anyhow::Result<Read> {
        read(journal, self.file.is_some())
    }
}

/// The headlines of the newest admissions, the newest first; none if the node has no journal.
pub fn last_headlines(config: &Config, count: usize) -> anyhow::Result<Vec<String>> {
    let Some(journal) = config.journal() else { return Ok(Vec::new()) };
    let admissions = read(journal, false)?.admissions;
    Ok(admissions.iter().rev().take(count).map(AdmissionLine::headline).collect())
}

fn read(journal: &Path, is_named: bool) -> anyhow::Result<Read> {
    let mut read = Read::default();
    let rotated = PathBuf::from(format!("{}.1", journal.display()));
    let mut found = false;
    for file in [rotated.as_path(), journal] {
        check_answers(file)?;
        match fs::read(file) {
            Ok(bytes) => {
                found = true;
                read.take(file, &String::from_utf8_lossy(&bytes));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error).with_context(|| format!("read {}", file.display())),
        }
    }
    match (found, is_named) {
        (false, true) => bail!("read {}: there is no such file", journal.display()),
        _ if read.admissions.is_empty() && read.newer_lines == 0 && !read.problems.is_empty() => {
            bail!("{} is no journal of bindguard's", journal.display())
        }
        _ => Ok(read),
    }
}

impl Read {
    fn take(&mut self, file: &Path, text: &str) {
        let mut lines = text.split_inclusive('\n').enumerate().peekable();
        while let Some((index, line)) = lines.next() {
            match AdmissionLine::parse(line) {
                Ok(admission) => self.admissions.push(admission),
                Err(UnreadLine::Newer) => self.newer_lines += 1,
                // A guard is writing this line.
                Err(UnreadLine::Foreign)
                    if lines.peek().is_none() && line.starts_with('{') && !line.ends_with('\n') => {}
                Err(UnreadLine::Foreign) => {
                    self.problems.push(format!("line {} of {} is no admission", index + 1, file.display()));
                }
            }
        }
    }
}

/// Parses a time, or an age before `now`.
fn since(text: &str, now: OffsetDateTime) -> anyhow::Result<OffsetDateTime> {
    let ago = text.split_at_checked(text.len().saturating_sub(1)).and_then(|(number, unit)| {
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
fn text(read: &Read, all: bool) -> Lines {
    let mut lines = Lines::default();
    for problem in &read.problems {
        lines.problem(problem);
    }
    for admission in read.admissions.iter().filter(|admission| all || admission.has_findings()) {
        lines.line(&admission.headline());
        for problem in &admission.line.report.problems {
            lines.problem(problem);
        }
        for bind in &admission.line.report.binds {
            print_bind(bind, &mut lines);
        }
    }
    let count = |is: fn(&AdmissionLine) -> bool| read.admissions.iter().filter(|admission| is(admission)).count();
    let (found, left) = (count(AdmissionLine::has_findings), count(AdmissionLine::has_unrepaired));
    lines.line(&format!(
        "{} admissions, {found} with findings, {left} of them with something that was left as it was",
        read.admissions.len()
    ));
    if read.newer_lines > 0 {
        lines.line(&format!("{} lines of a newer version of bindguard are not shown", read.newer_lines));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::show::documented;

    #[test]
    fn since_is_a_time_or_how_long_ago() {
        let now = OffsetDateTime::from_unix_timestamp(1_000_000).unwrap();
        assert_eq!(since("2h", now).unwrap().unix_timestamp(), 1_000_000 - 7_200);
        assert_eq!(since("1970-01-01T00:00:05Z", now).unwrap().unix_timestamp(), 5);
        for wrong in ["", "soon", "5", "9999999999999999999d", "2026-11-21", "5é"] {
            assert!(since(wrong, now).is_err(), "{wrong}");
        }
    }

    #[test]
    fn json_matches_the_document() {
        let shown = documented("`journal`");
        let line = shown.lines().map(str::trim).find(|line| line.starts_with("{\"version\"")).unwrap();
        let mut read = Read::default();
        read.take(Path::new("/run/bindguard/journal.jsonl"), &format!("{line}\nno\n"));
        assert_eq!(serde_json::to_string_pretty(&read).unwrap(), shown.trim_end());
    }

    #[test]
    fn only_a_half_written_last_line_is_passed_over() {
        let whole = r#"{"version":1,"time":null,"id":"a","attempt":0,"binds":[],"foreign":0,"duration_us":1}"#;
        let newer = whole.replace(r#""version":1"#, r#""version":2"#);
        let mut read = Read::default();
        read.take(Path::new("j"), &format!("{whole}\nno\n{whole}\n{newer}\n{}", &whole[..20]));
        assert_eq!((read.admissions.len(), read.newer_lines), (2, 1));
        assert_eq!(read.problems, ["line 2 of j is no admission"]);
        let mut foreign = Read::default();
        foreign.take(Path::new("j"), "no journal");
        assert_eq!(foreign.problems.len(), 1);
    }
}
