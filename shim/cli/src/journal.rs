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
use bindguard_operator::pods::{PodAsked, PodName};
use clap::Args;
use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;
use time::format_description::well_known::Rfc3339;
use time::{Duration, OffsetDateTime};

use crate::ask::answers;
use crate::show::{self, Lines, print_json, print_text, verdict_style};

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
    /// Print all admissions as JSON, unchanged from the journal.
    #[arg(long)]
    json: bool,
}

/// The content of the journal. `--json` prints its JSON form.
#[derive(Debug, Default, Serialize)]
struct Read {
    admissions: Vec<Admission>,
    /// Whole lines that are no admissions.
    #[serde(rename = "problems")]
    strange: Vec<String>,
}

/// A line of the journal.
#[derive(Debug)]
struct Admission {
    /// The text, unchanged.
    line: Box<RawValue>,
    /// The same, parsed.
    value: Value,
}

impl Serialize for Admission {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.line.serialize(serializer)
    }
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
        read.admissions.retain(|admission| since.is_none_or(|since| time_of(&admission.value) >= Some(since)));
        let pod = self.pod.as_deref().map(PodAsked::from_argument);
        read.admissions.retain(|admission| pod.as_ref().is_none_or(|pod| pod.is(&pod_of(&admission.value))));
        if self.json {
            print_json(&read)?;
        } else {
            print_text(text(&read, self.all).text())?;
        }
        Ok(show::code(!read.strange.is_empty(), read.admissions.iter().any(|admission| is_left(&admission.value))))
    }

    fn read(&self, journal: &Path) -> anyhow::Result<Read> {
        let mut read = Read::default();
        let rotated = PathBuf::from(format!("{}.1", journal.display()));
        let mut found = false;
        for file in [rotated.as_path(), journal] {
            answers(file)?;
            match fs::read(file) {
                Ok(bytes) => {
                    found = true;
                    read.take(file, &String::from_utf8_lossy(&bytes));
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error).with_context(|| format!("read {}", file.display())),
            }
        }
        match (found, &self.file) {
            (false, Some(_)) => bail!("read {}: there is no such file", journal.display()),
            _ if read.admissions.is_empty() && !read.strange.is_empty() => {
                bail!("{} is no journal of bindguard's", journal.display())
            }
            _ => Ok(read),
        }
    }
}

impl Read {
    fn take(&mut self, file: &Path, text: &str) {
        let mut lines = text.split_inclusive('\n').enumerate().peekable();
        while let Some((index, line)) = lines.next() {
            match admission(line) {
                Some(admission) => self.admissions.push(admission),
                // A guard is writing this line.
                None if lines.peek().is_none() && line.starts_with('{') && !line.ends_with('\n') => {}
                None => self.strange.push(format!("line {} of {} is no admission", index + 1, file.display())),
            }
        }
    }
}

fn admission(line: &str) -> Option<Admission> {
    let value = serde_json::from_str::<Value>(line).ok().filter(|value| value.get("binds").is_some())?;
    Some(Admission { line: RawValue::from_string(line.trim().to_owned()).ok()?, value })
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

fn time_of(admission: &Value) -> Option<OffsetDateTime> {
    OffsetDateTime::parse(admission.get("time")?.as_str()?, &Rfc3339).ok()
}

fn pod_of(admission: &Value) -> PodName {
    let word = |key: &str| admission["container"][key].as_str().map(str::to_owned);
    PodName { uid: word("uid"), namespace: word("namespace"), name: word("pod") }
}

/// True if the admission has a problem or a bind with a reason.
fn is_finding(admission: &Value) -> bool {
    let has_reason = |binds: &Vec<Value>| binds.iter().any(|bind| bind.get("reason").is_some());
    admission.get("problems").is_some() || admission["binds"].as_array().is_some_and(has_reason)
}

/// True if the admission has a problem, or a bind with a reason that was not repaired.
fn is_left(admission: &Value) -> bool {
    let mended = ["rebound", "already-current", "pointed-at-volume", "made-rslave", "detached"];
    let left = |bind: &Value| {
        bind.get("reason").is_some() && !bind["outcome"]["what"].as_str().is_some_and(|what| mended.contains(&what))
    };
    admission.get("problems").is_some() || admission["binds"].as_array().is_some_and(|binds| binds.iter().any(left))
}

/// A busy node creates thousands of containers without findings: they are only counted.
fn text(read: &Read, all: bool) -> Lines {
    let mut lines = Lines::default();
    for strange in &read.strange {
        lines.headed("problem", verdict_style("problem"), strange);
    }
    let shown = read.admissions.iter().map(|admission| &admission.value).filter(|it| all || is_finding(it));
    for admission in shown {
        lines.line(&headline(admission));
        for problem in admission["problems"].as_array().into_iter().flatten() {
            lines.headed("problem", verdict_style("problem"), problem.as_str().unwrap_or_default());
        }
        for bind in admission["binds"].as_array().into_iter().flatten() {
            tell(bind, &mut lines);
        }
    }
    let count = |is: fn(&Value) -> bool| read.admissions.iter().filter(|admission| is(&admission.value)).count();
    let (found, left) = (count(is_finding), count(is_left));
    lines.line(&format!(
        "{} admissions, {found} with findings, {left} of them with something that was left as it was",
        read.admissions.len()
    ));
    lines
}

fn headline(admission: &Value) -> String {
    let time = admission["time"].as_str().and_then(|time| time.split('.').next()).unwrap_or("at some time");
    let container = admission["container"]["name"].as_str().map(|name| format!(" {name}")).unwrap_or_default();
    let pod = pod_of(admission).for_people().map(|pod| format!(" {pod}")).unwrap_or_default();
    let id: String = admission["id"].as_str().unwrap_or("?").chars().take(12).collect();
    if admission.get("pid").is_some() {
        return format!("{time}{pod}{container} ({id}, after its create)");
    }
    let again = match admission["attempt"].as_u64() {
        None | Some(0) => String::new(),
        Some(attempt) => format!(", create {}", attempt + 1),
    };
    format!("{time}{pod}{container} ({id}{again})")
}

fn tell(bind: &Value, lines: &mut Lines) {
    let word = |key: &str| bind[key].as_str().unwrap_or_default();
    lines.headed(word("verdict"), verdict_style(word("verdict")), word("source"));
    let what = bind["outcome"]["what"].as_str();
    let more = ["source", "command", "why", "done"].iter().find_map(|key| bind["outcome"][key].as_str());
    let outcome = what.map(|what| format!("{what}{}", more.map(|more| format!(": {more}")).unwrap_or_default()));
    for line in [bind["reason"].as_str(), outcome.as_deref()].into_iter().flatten() {
        lines.below(line);
    }
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
    fn json_is_what_the_document_shows() {
        let shown = documented("`journal`");
        let line = shown.lines().map(str::trim).find(|line| line.starts_with("{\"time\"")).unwrap();
        let mut read = Read::default();
        read.take(Path::new("/run/bindguard/journal.jsonl"), &format!("{line}\nno\n"));
        assert_eq!(serde_json::to_string_pretty(&read).unwrap(), shown.trim_end());
    }

    #[test]
    fn only_a_half_written_last_line_is_passed_over() {
        let whole = r#"{"time":"2026-11-21T05:10:00Z","id":"a","binds":[]}"#;
        let mut read = Read::default();
        read.take(Path::new("j"), &format!("{whole}\nno\n{whole}\n{}", &whole[..20]));
        assert_eq!((read.admissions.len(), read.strange), (2, vec!["line 2 of j is no admission".to_owned()]));
        let mut foreign = Read::default();
        foreign.take(Path::new("j"), "no journal");
        assert_eq!(foreign.strange.len(), 1);
    }
}
