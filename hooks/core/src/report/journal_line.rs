//! A line of the journal: one JSON object, with the version of its form.
//!
//! After a rollback, an older program reads lines of a newer one. It passes over every line that has a newer version, a key
//! or a value that it does not know, and counts them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::RecordedReport;

/// A line of the journal. `R` is a reference to a [`Report`](super::Report) in a line that is written.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct JournalLine<R = RecordedReport> {
    /// The version of the line's form.
    version: u32,
    /// RFC 3339, UTC; none if the clock shows a year past 9999.
    pub time: Option<String>,
    /// The container's id, as the runtime gets it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Which create of the container this was, counted from 0.
    pub attempt: u32,
    /// The container's init, in a line about a container that was created.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// The findings and outcomes.
    #[serde(flatten)]
    pub report: R,
    /// The number of binds that are not in the line, because it would be too long.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub omitted_binds: Option<usize>,
    /// Keys of a newer version.
    #[serde(flatten)]
    unknown: BTreeMap<String, Value>,
}

/// Why a line was not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnreadLine {
    /// A newer version of bindguard wrote it.
    Newer,
    /// It is no line of a journal.
    Foreign,
}

impl<R> JournalLine<R> {
    /// The version that this program writes. Each new key or value needs the next number.
    pub const VERSION: u32 = 1;

    /// A line about the first create of a container.
    pub fn new(report: R) -> Self {
        let (version, unknown) = (Self::VERSION, BTreeMap::new());
        Self { version, time: None, id: None, attempt: 0, pid: None, report, omitted_binds: None, unknown }
    }
}

impl JournalLine {
    /// Parses a line.
    ///
    /// # Errors
    /// If a newer version wrote it, or it is no line of a journal.
    pub fn parse(line: &str) -> Result<Self, UnreadLine> {
        #[derive(Deserialize)]
        struct Version {
            version: u32,
        }
        if !line.starts_with('{') {
            return Err(UnreadLine::Foreign);
        }
        let Version { version } = serde_json::from_str(line).map_err(|_| UnreadLine::Foreign)?;
        let known = serde_json::from_str::<Self>(line).ok();
        known.filter(|line| version <= Self::VERSION && line.unknown.is_empty()).ok_or(UnreadLine::Newer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::judge::{Finding, NoRemedy, StaleCause, Verdict};
    use crate::places::Places;
    use crate::policy::Scope;
    use crate::report::{Outcome, Report};
    use crate::source::SourceKind;

    fn written() -> String {
        let source = "/var/lib/kubelet/pods/u/volume-subpaths/conf/app/0";
        let finding = Finding {
            bind: Some(0),
            source: source.into(),
            destination: Some("/etc/app.conf".into()),
            kind: SourceKind::from_path(source.as_ref(), &Places::default(), Scope::default()),
            verdict: Verdict::Stale {
                cause: StaleCause::DeletedRoot,
                remedy: Err(NoRemedy::Unreadable("why".to_owned())),
            },
        };
        let mut report = Report::about_bundle("/b".as_ref());
        report.add(vec![finding], |_| Some(Outcome::Rebound { tries: 2 }));
        let line = JournalLine { id: Some("c".to_owned()), ..JournalLine::new(&report) };
        serde_json::to_string(&line).unwrap()
    }

    #[test]
    fn a_line_is_read_as_it_was_written() {
        let line = JournalLine::parse(&written()).unwrap();
        let bind = &line.report.binds[0];
        assert!(bind.is_finding() && bind.is_repaired());
        assert_eq!(bind.destination.as_deref(), Some("/etc/app.conf"));
        assert_eq!(serde_json::to_string(&line).unwrap(), written());
    }

    #[test]
    fn a_line_of_a_newer_version_is_passed_over() {
        let newer = |from: &str, to: &str| {
            let line = written().replace(from, to);
            assert_ne!(line, written(), "{from}");
            JournalLine::parse(&line).unwrap_err()
        };
        for (from, to) in [
            (r#""version":1"#, r#""version":2"#),
            (r#""attempt":0"#, r#""attempt":0,"agent":"a""#),
            (r#""verdict":"stale""#, r#""verdict":"outdated""#),
            (r#""kind":"subpath""#, r#""kind":"device""#),
            (r#""kind":"subpath""#, r#""kind":"subpath","node":"n""#),
            (r#""rebound""#, r#""replaced""#),
            (r#""tries":2"#, r#""tries":2,"pause":1"#),
        ] {
            assert_eq!(newer(from, to), UnreadLine::Newer, "{to}");
        }
    }

    #[test]
    fn any_other_line_is_foreign() {
        for line in ["", "no", "{}", r#"{"time":null,"binds":[]}"#, "[1]"] {
            assert_eq!(JournalLine::parse(line).unwrap_err(), UnreadLine::Foreign, "{line}");
        }
    }
}
