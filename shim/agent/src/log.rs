//! The agent's log: one line for each event, with the time in UTC.
//!
//! Pods choose many of the names and paths in the log. tracing-subscriber escapes what controls a
//! terminal's colours and cursor. It leaves newlines and the characters that reorder text. JSON has
//! them as data.

use std::fmt;

use bindguard_core::text::one_line;
use tracing::level_filters::LevelFilter;
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, MakeWriter};
use tracing_subscriber::registry::LookupSpan;

use crate::args::{LogFormat, LogLevel};

/// The log of the agent.
pub fn log_to<W>(writer: W, format: LogFormat, level: LogLevel) -> Box<dyn Subscriber + Send + Sync>
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let level = match level {
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
    };
    let log = tracing_subscriber::fmt()
        .with_max_level(level)
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
