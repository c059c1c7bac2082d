//! The agent's log: one line for each event, with the time in UTC, and each message once.
//!
//! Pods choose many of the names and paths in the log. tracing-subscriber escapes what controls a
//! terminal's colours and cursor. It leaves newlines and the characters that reorder text. JSON has
//! them as data.

use std::collections::HashSet;
use std::fmt;
use std::hash::{BuildHasher, Hash, RandomState};

use bindguard_core::text::one_line;
use lru::LruCache;
use tracing::level_filters::LevelFilter;
use tracing::{Event, Subscriber, warn};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, MakeWriter};
use tracing_subscriber::registry::LookupSpan;

use crate::args::{LogFormat, LogLevel};

impl From<LogLevel> for LevelFilter {
    fn from(level: LogLevel) -> Self {
        match level {
            LogLevel::Error => Self::ERROR,
            LogLevel::Warn => Self::WARN,
            LogLevel::Info => Self::INFO,
            LogLevel::Debug => Self::DEBUG,
        }
    }
}

/// The log of the agent.
pub fn log_to<W>(writer: W, format: LogFormat, level: LogLevel) -> Box<dyn Subscriber + Send + Sync>
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let log = tracing_subscriber::fmt()
        .with_max_level(LevelFilter::from(level))
        .with_writer(writer)
        // tracing would report a failed write on stderr, and panic if stderr is closed or full.
        .log_internal_errors(false)
        .with_target(false)
        .with_ansi(false);
    match format {
        LogFormat::Text => Box::new(log.map_event_format(OneLine).finish()),
        LogFormat::Json => Box::new(log.json().flatten_event(true).finish()),
    }
}

/// Formats events with the inner format, and escapes the result.
#[derive(Debug)]
struct OneLine<F>(F);

impl<S, N, F> FormatEvent<S, N> for OneLine<F>
where
    S: Subscriber + for<'s> LookupSpan<'s>,
    N: for<'w> FormatFields<'w> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut log: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut line = String::new();
        self.0
            .format_event(context, Writer::new(&mut line), event)?;
        let line = line.strip_suffix('\n').unwrap_or(&line);
        writeln!(log, "{}", one_line(line))
    }
}

// Remembers the last message about each subject. Surveys and retries find the same faults again; only
// news are logged, journaled or written as events.

/// Limit of findings, of all subjects together: containers come and go, and each can have thousands.
/// Beyond the limit the subject with the most findings is forgotten, so that no pod makes the agent
/// repeat its messages about other pods.
const MAX_FINDINGS: usize = 32 * 1024;

/// The findings about each subject at its last check. Their hashes: a pod chooses how long the paths in
/// them are.
#[derive(Debug)]
pub struct SayOnce<K: Hash + Eq = ()> {
    known: LruCache<K, HashSet<u64>>,
    findings: usize,
    hasher: RandomState,
}

impl<K: Hash + Eq> Default for SayOnce<K> {
    fn default() -> Self {
        // A bounded cache would reserve memory for all subjects.
        let known = LruCache::unbounded();
        Self {
            known,
            findings: 0,
            hasher: RandomState::new(),
        }
    }
}

impl<K: Hash + Eq + Clone> SayOnce<K> {
    /// The findings about a subject that its last check did not have.
    pub fn news<T: Hash>(&mut self, about: K, mut found: Vec<T>) -> Vec<T> {
        let before = self.known.pop(&about).unwrap_or_default();
        let mut now = HashSet::new();
        found.retain(|finding| {
            let hash = self.hasher.hash_one(finding);
            now.insert(hash);
            !before.contains(&hash)
        });
        self.findings = self.findings - before.len() + now.len();
        if !now.is_empty() {
            self.known.push(about, now);
        }
        while self.findings > MAX_FINDINGS
            && let Some((most, _)) = self.known.iter().max_by_key(|(_, known)| known.len())
        {
            let most = most.clone();
            self.findings -= self.known.pop(&most).map_or(0, |forgotten| forgotten.len());
        }
        found
    }

    #[cfg(test)]
    pub fn findings(&self) -> usize {
        self.findings
    }

    /// Logs the failures that are news; the work is done again.
    pub fn warn_of_retry(&mut self, failures: Vec<String>)
    where
        K: Default,
    {
        let tried_again = failures.iter().map(|why| format!("{why}; trying again"));
        self.warn(K::default(), tried_again);
    }

    /// Logs the warnings about a subject that are news.
    pub fn warn(&mut self, about: K, warnings: impl IntoIterator<Item = String>) {
        for warning in self.news(about, Vec::from_iter(warnings)) {
            warn!("{warning}");
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test says what it expects")]

    use std::io::{self, Write};
    use std::process::Command;
    use std::sync::{Arc, Mutex};

    use time::OffsetDateTime;
    use time::format_description::well_known::Rfc3339;
    use tracing::subscriber::with_default;
    use tracing::{info, warn};

    use super::*;

    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);

    impl Write for Log {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn written(format: LogFormat, level: LogLevel, events: impl FnOnce()) -> String {
        let written = Log::default();
        let log = written.clone();
        with_default(log_to(move || log.clone(), format, level), events);
        let bytes = written.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    }

    fn is_time(text: &str) -> bool {
        OffsetDateTime::parse(text, &Rfc3339).is_ok() && text.ends_with('Z')
    }

    #[test]
    fn a_line_has_its_time_and_level_and_the_level_is_chosen() {
        let events = || {
            info!("surveyed");
            warn!("not watched");
        };
        let all = written(LogFormat::Text, LogLevel::Info, events);
        let (time, _) = all.split_once(' ').unwrap();
        assert!(is_time(time), "{all}");
        assert!(
            all.contains(" INFO surveyed\n") && all.contains(" WARN not watched\n"),
            "{all}"
        );
        let few = written(LogFormat::Text, LogLevel::Warn, events);
        assert!(
            !few.contains("surveyed") && few.contains("not watched"),
            "{few}"
        );
    }

    #[test]
    fn json_is_one_object_a_line() {
        let name = "app\n WARN refused";
        let line = written(LogFormat::Json, LogLevel::Info, || warn!("pod {name}"));
        assert_eq!(line.lines().count(), 1, "{line}");
        let event: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!(
            (&event["level"], &event["message"]),
            (&"WARN".into(), &"pod app\n WARN refused".into())
        );
        assert!(is_time(event["timestamp"].as_str().unwrap()), "{event}");
    }

    #[test]
    fn a_name_neither_begins_a_line_of_the_log_nor_reorders_it() {
        let name = "app\n WARN refused\r\u{202e}fnoc\u{2066}\u{85}";
        let written = written(LogFormat::Text, LogLevel::Info, || {
            warn!(name, "pod {name}");
        });
        let escaped = r"app\n WARN refused\r\u{202e}fnoc\u{2066}";
        assert!(written.contains(escaped), "{written}");
        assert_eq!(written.lines().count(), 1, "{written}");
        assert!(
            !written.contains(['\r', '\u{202e}', '\u{2066}', '\u{85}']),
            "{written}"
        );
    }

    /// The test runs itself again, with a pipe without a reader as stderr.
    #[test]
    fn a_closed_stderr_ends_no_thread() {
        const IN_CHILD: &str = "BINDGUARD_TEST_LOGS_TO_CLOSED_STDERR";
        if std::env::var_os(IN_CHILD).is_some() {
            let log = log_to(io::stderr, LogFormat::Text, LogLevel::Info);
            return with_default(log, || info!("lost"));
        }
        let (reader, writer) = io::pipe().unwrap();
        drop(reader);
        let name = "log::tests::a_closed_stderr_ends_no_thread";
        let ended = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture"])
            .env(IN_CHILD, "1")
            .stderr(writer)
            .output()
            .unwrap();
        let printed = String::from_utf8_lossy(&ended.stdout);
        assert!(
            ended.status.success() && printed.contains("1 passed"),
            "{printed}"
        );
    }
}

#[cfg(test)]
mod say_once_tests {
    use super::*;

    #[test]
    fn only_a_change_is_news() {
        let mut said = SayOnce::default();
        assert_eq!(said.news(1, vec!["a"]), ["a"]);
        assert_eq!(said.news(1, vec!["a", "b"]), ["b"]);
        assert_eq!(said.news(2, vec!["a"]), ["a"], "another subject");
        assert!(said.news(1, vec!["b"]).is_empty());
        assert_eq!(said.news(1, vec!["a"]), ["a"], "it was gone in between");
    }

    /// A pod with thousands of mounts that restarts its container again and again cannot fill the
    /// agent's memory.
    #[test]
    fn findings_about_subjects_that_are_gone_are_forgotten() {
        let mut said = SayOnce::default();
        let of_a_container = Vec::from_iter(0..2000);
        said.news(usize::MAX, vec![1]);
        for container in 0..100 {
            said.news(container, of_a_container.clone());
            assert!(said.findings <= MAX_FINDINGS);
        }
        let counted = said.known.iter().map(|(_, known)| known.len());
        assert_eq!(counted.sum::<usize>(), said.findings);
        assert!(said.news(usize::MAX, vec![1]).is_empty(), "of others");
        assert!(said.news(99, of_a_container.clone()).is_empty());
        assert_eq!(said.news(0, of_a_container.clone()), of_a_container);
        for container in 100..MAX_FINDINGS + 50 {
            said.news(container, vec![1]);
            assert!(said.findings <= MAX_FINDINGS);
        }
    }
}
