//! A line of the journal, as text.

use bindguard_core::identity::PodName;
use bindguard_core::report::{
    Actor, BindRecord, CreateLine, JournalLine, RebindLine, RefreshLine, ReleaseLine,
    ReleaseResult, UnreadLine,
};
use bindguard_operator::doctor::seconds;
use serde_json::value::RawValue;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::show::{FAULTY, HEALTHY, Lines, print_bind};

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
        let is_left = |bind: &BindRecord<'_>| bind.is_finding() && !bind.is_repaired();
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

fn print_findings(problems: &[String], binds: &[BindRecord<'_>], lines: &mut Lines) {
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
        lines.headed(copy.result.as_str(), style, &format!("{copy}{error}"));
    }
}

fn actor(by: Actor) -> &'static str {
    match by {
        Actor::Agent => "the agent",
        Actor::Operator => "an operator",
        Actor::Guard => "the guard",
    }
}
