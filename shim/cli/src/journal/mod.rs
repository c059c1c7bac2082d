//! `bindguard journal`: the admissions of this node, and the repairs between creates, the oldest
//! first (docs/journal.md).

mod line;
mod read;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{anyhow, bail};
use bindguard_config::Config;
use bindguard_operator::pods::PodSelector;
use clap::Args;
use time::format_description::well_known::Rfc3339;
use time::{Duration, OffsetDateTime};

use self::line::RecordedLine;
use self::read::{JournalContent, read};
use crate::show::{self, Lines};

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
